"""What a command prints: a JSON report if asked for, text for people otherwise, and never both on one stream.

Owns `--json [FILE]`, the schema version and the choice of stream. Knows nothing about any one command's report.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click

from mok.errors import RunError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SCHEMA_VERSION", "FileToWrite", "FiniteFloat", "Output", "examples", "json_option"]

F = TypeVar("F", bound=Callable[..., Any])

SCHEMA_VERSION = 1
"""Version of every JSON report. Names in it are added, never renamed; a change of meaning raises it."""


class Output:
    """Where one command's words go.

    destination: None (no JSON), "-" (JSON alone on standard output, the rest on standard error), or a file's path.
    Raises UsageError at once if the file cannot be written, not after the work. A stream that the caller has closed takes
    what people would read; a report has to go somewhere.
    """

    def __init__(self, destination: str | None = None) -> None:
        self.destination = destination
        stream: TextIO | None = sys.stderr if destination == "-" else sys.stdout
        self.stream: TextIO = stream or io.StringIO()
        if destination == "-":
            if cast(TextIO | None, sys.stdout) is None:
                raise UsageError("--json: standard output is closed; name a file, --json FILE")
        elif destination is not None and not _is_writable(destination):
            raise UsageError(f"--json {destination}: {NOT_WRITABLE}")

    def line(self, text: str = "") -> None:
        """Print one line for people."""
        with _written("standard output"):
            click.echo(text, file=self.stream)

    def console(self) -> Console:
        """A rich console on the stream for people: colour and progress on a terminal only, NO_COLOR honoured."""
        from rich.console import Console  # here, because it costs more than all of `mok --help`

        class LastingConsole(Console):
            """Goes on in silence where nobody reads any more (`mok train toy | head`): work is worth more than its lines."""

            def on_broken_pipe(self) -> None:
                self.quiet = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

        return LastingConsole(file=self.stream, highlight=False, soft_wrap=not self.stream.isatty())

    def report(self, data: Mapping[str, Any]) -> None:
        """Write `data` as JSON with its schema version, if JSON was asked for. NaN and infinities become null."""
        if self.destination is None:
            return
        text = json.dumps(_finite({"schema_version": SCHEMA_VERSION, **data}), indent=2, allow_nan=False) + "\n"
        if self.destination == "-":
            with _written("standard output"):
                sys.stdout.write(text)
                sys.stdout.flush()
        else:
            with _written(f"--json {self.destination}"):
                Path(self.destination).write_text(text, encoding="utf-8")


NOT_WRITABLE = "cannot be written; name a file in a folder that exists and is writable"


class FileToWrite(click.Path):
    """An option's file that is written after long work: refused before it if that cannot be."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        if not _is_writable(value):
            self.fail(f"{value}: {NOT_WRITABLE}", parameter, context)
        return cast(Path, super().convert(value, parameter, context))


class FiniteFloat(click.FloatRange):
    """A number in a range; NaN, which is in every range for click, and infinities are none."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, parameter, context))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", parameter, context)
        return number


def _is_writable(path: str | Path) -> bool:
    path = Path(path).absolute()
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


@contextmanager
def _written(what: str) -> Iterator[None]:
    """Around writing; a pipe that nobody reads is click's to end."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"{what}: cannot be written ({error.strerror}); make room, or write elsewhere") from error


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_option(command: F) -> F:
    """Add `--json [FILE]` to a command; it receives an `Output` as `output`."""
    return click.option(
        "--json",
        "output",
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        callback=lambda context, parameter, value: Output(value),
        help="Report as JSON, to FILE or alone on standard output.",
    )(command)


def examples(*lines: str) -> str:
    """An epilog that shows each line as it is to be typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
