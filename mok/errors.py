"""The exception tree of mok, each with the exit code that the command line gives it.

Owns nothing but names: no formatting, no printing, no imports from the package.

    MokError                 1    anything mok refuses or fails at; the message names what, where and how to fix it
    ├── UsageError           2    wrong call, option or value, found before any work starts
    │   └── RecipeError      2    every problem of a recipe at once, see `Problem`
    ├── CheckFailed          3    the work was done and a check did not hold
    ├── RunError             1    a run could not go on
    │   ├── DataError        1    text, tokens or tokenizer unusable
    │   ├── NonFiniteError   1    NaN or infinity in router logits, loss or gradients
    │   ├── CheckpointError  1    a checkpoint is missing, damaged or does not fit
    │   └── RankError        1    a rank was lost, stalled or disagreed
    └── Interrupted        130    Ctrl-C or SIGTERM, after the state was saved
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CheckFailed",
    "CheckpointError",
    "DataError",
    "Interrupted",
    "MokError",
    "NonFiniteError",
    "Problem",
    "RankError",
    "RecipeError",
    "RunError",
    "UsageError",
]


class MokError(Exception):
    """Base of every error mok raises on purpose; `str(error)` is one clear message for a user."""

    exit_code = 1


class UsageError(MokError):
    """A call, option or value that cannot be right; nothing was started."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe.

    where: "recipes/x.toml:14 moe.num_expert", or "--set moe.num_expert=3".
    what: what is wrong there.
    fix: what to write instead.
    """

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class RecipeError(UsageError):
    """All problems of one recipe, reported together."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class CheckFailed(MokError):
    """A divergence, a regression, a missing requirement, a mismatch or a failed correctness check."""

    exit_code = 3


class RunError(MokError):
    """A run that had started could not go on."""


class DataError(RunError):
    """Text, tokens or a tokenizer that cannot be used."""


class NonFiniteError(RunError):
    """NaN or infinity where none may be: router logits, loss or gradients."""


class CheckpointError(RunError):
    """A checkpoint that is missing, damaged, or does not fit this recipe."""


class RankError(RunError):
    """A rank that was lost, stalled, or disagreed with the others."""


class Interrupted(MokError):
    """Stopped by Ctrl-C or SIGTERM after the state was saved."""

    exit_code = 130
