"""The `mok` command: finds the command asked for, runs it, and turns errors into exit codes.

Owns the table of commands and the one place where an exception becomes a message and an exit code. Knows nothing about
what a command does; each lives in its own file and is imported only when it is named. Read next: `mok_cli/output.py`.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

import click

from mok import __version__
from mok.errors import MokError, RecipeError
from mok_cli.output import examples

__all__ = ["COMMANDS", "cli", "main"]

# name -> (where the command is, what it does); the second is here too so that `mok --help` imports no command.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("mok_cli.train:train", "Train a model from a recipe."),
    "verify-determinism": ("mok_cli.verify_determinism:verify_determinism", "Prove that RECIPE gives the same bytes."),
    "sample": ("mok_cli.sample:sample", "Write text with a trained model."),
    "eval": ("mok_cli.eval:evaluate", "Loss of a trained model on text."),
    "export": ("mok_cli.export:export", "Write a run as a Hugging Face model."),
    "probe-topology": ("mok_cli.probe_topology:probe_topology", "Show GPUs and links; advise on expert groups."),
    "bench": ("mok_cli.bench:bench", "Measure speed, after checking that the result is right."),
    "recipes": ("mok_cli.recipes:recipes", "List, show, copy or check recipes."),
}


@dataclass
class Settings:
    """What holds for a whole invocation."""

    debug: bool = False


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Settings).debug = True


def _add_debug(command: click.Command) -> click.Command:
    """Give `command` and everything below it the --debug option, so that it may stand anywhere on the line."""
    if not any(parameter.name == "debug" for parameter in command.params):
        option = ["--debug"]
        command.params.append(
            click.Option(option, is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show tracebacks.")
        )
    if isinstance(command, click.Group):
        for child in command.commands.values():
            _add_debug(child)
    return command


class LazyGroup(click.Group):
    """A group that imports a command when it is run, not when its name is shown."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        return _add_debug(getattr(importlib.import_module(module), attribute))

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, arguments)
        except click.UsageError as error:
            import difflib  # only where a mistake was made

            near = difflib.get_close_matches(arguments[0], COMMANDS, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"{error.message}{hint}", context) from None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=examples("mok train toy", "mok recipes list"),
)
@click.version_option(__version__, prog_name="mok")
def cli() -> None:
    """Train and verify Mixture-of-Experts language models."""


_add_debug(cli)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run `mok` with `arguments` (default: the process's own) and exit with the code of the outcome."""
    settings = Settings()
    try:
        code = cli.main(arguments, prog_name="mok", standalone_mode=False, obj=settings)
    except click.exceptions.Abort:
        click.echo("mok: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except MokError as error:
        if settings.debug:
            traceback.print_exc()
        click.echo(f"Error: {_listed(error) if isinstance(error, RecipeError) else error}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        if settings.debug:
            traceback.print_exc()
        else:
            click.echo(f"Error: unexpected {type(error).__name__}: {error} (--debug shows where)", err=True)
        sys.exit(1)
    sys.exit(code or 0)


def _listed(error: RecipeError) -> str:
    """One problem as it is, several as a list."""
    if len(error.problems) == 1:
        return str(error)
    return "\n  ".join([f"{len(error.problems)} problems", *map(str, error.problems)])
