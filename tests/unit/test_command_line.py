"""From what is typed to what is printed: streams, exit codes, tracebacks, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import click
import pytest

from mok.errors import CheckFailed, Interrupted, MokError, RunError, UsageError
from mok_cli import main as program
from mok_cli.output import Output, json_option


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `mok` in this process, with commands given as name=function: (exit code, stdout, stderr)."""

    def run(*arguments: str, **commands):
        for name, function in commands.items():
            monkeypatch.setattr(program, name, function, raising=False)
            monkeypatch.setitem(program.COMMANDS, name, (f"mok_cli.main:{name}", "A command of this test."))
        with pytest.raises(SystemExit) as stopped:
            program.main(list(arguments))
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run


def failing(error: BaseException) -> click.Command:
    @click.command()
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MokError("m"), 1),
        (RunError("m"), 1),
        (UsageError("m"), 2),
        (CheckFailed("m"), 3),
        (Interrupted("m"), 130),
        (KeyboardInterrupt(), 130),
        (ValueError("m"), 1),
        (click.UsageError("m"), 2),
        (click.FileError("m"), 2),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_no_traceback(run, error, code):
    assert run("fail", fail=failing(error))[0] == code
    _, out, err = run("fail", fail=failing(error))
    assert out == ""
    assert "Traceback" not in err
    assert "m" in err


@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"]])
@pytest.mark.parametrize("error", [UsageError("m"), ValueError("m")])
def test_debug_shows_the_traceback_wherever_it_stands(run, arguments, error):
    code, _, err = run(*arguments, fail=failing(error))
    assert "Traceback" in err
    assert "in fail" in err
    assert code == getattr(error, "exit_code", 1)


def test_unknown_commands_and_options_are_usage_errors(run):
    code, out, err = run("recipe")
    assert (code, out) == (2, "")
    assert err.endswith("No such command 'recipe'. Did you mean recipes?\n")
    code, out, err = run("recipes", "list", "--jsn")
    assert (code, out) == (2, "")
    assert "No such option" in err


def test_no_command_shows_the_help_on_the_right_stream(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "recipes" in out
    assert run()[0] == 2


def test_recipes_alone_lists_them(run):
    assert run("recipes") == run("recipes", "list")


def test_one_problem_is_a_line_and_several_are_a_list(run):
    assert run("recipes", "show", "toy", "--set", "a=1")[2].count("\n") == 1
    code, out, err = run("recipes", "show", "toy", "--set", "a=1", "--set", "b=1")
    assert (code, out) == (2, "")
    assert err.startswith("Error: 2 problems\n  --set a=1: ")


@click.command()
@json_option
def say(output: Output) -> None:
    output.line("words")
    output.report({"figure": float("nan"), "list": [float("inf"), 1.5], 3: "key"})


def test_without_json_the_words_go_to_standard_output(run):
    assert run("say", say=say) == (0, "words\n", "")


def test_json_is_alone_on_standard_output_and_strict(run):
    code, out, err = run("say", "--json", say=say)
    assert (code, err) == (0, "words\n")
    assert json.loads(out, parse_constant=pytest.fail) == {
        "schema_version": 1,
        "figure": None,
        "list": [None, 1.5],
        "3": "key",
    }


def test_json_goes_to_a_file_and_the_words_stay(run, tmp_path: Path):
    file = tmp_path / "report.json"
    assert run("say", "--json", str(file), say=say) == (0, "words\n", "")
    assert json.loads(file.read_text())["list"] == [None, 1.5]


def test_a_json_file_that_cannot_be_written_is_refused_before_the_work(run, tmp_path: Path):
    for place in (tmp_path, tmp_path / "none" / "report.json"):
        code, out, err = run("say", "--json", str(place), say=say)
        assert (code, out) == (2, "")
        assert "cannot be written" in err


def test_a_full_disk_or_a_closed_stream_is_said(run, monkeypatch):
    monkeypatch.setattr("mok_cli.output._is_writable", lambda path: True)
    code, _, err = run("say", "--json", "/dev/full", say=say)
    assert code == 1 and "--json /dev/full: cannot be written (No space left on device)" in err
    for arguments in (["recipes", "list"], ["say", "--json"]):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", open("/dev/full", "w"))  # noqa: SIM115
            code, _, err = run(*arguments, say=say)
            with contextlib.suppress(OSError):
                sys.stdout.close()
        assert code == 1 and "standard output: cannot be written" in err
    monkeypatch.setattr("sys.stdout", None)
    assert run("recipes", "list")[0] == 0
    code, _, err = run("say", "--json", say=say)
    assert code == 2 and "standard output is closed" in err


def test_work_goes_on_where_nobody_reads(run):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        output = Output()
        output.stream = stream
        console = output.console()
        console.print("words")
        console.print("more")
        stream.flush()


@pytest.mark.parametrize(
    "arguments",
    [
        ["sample", "run", "--temperature", "nan"],
        ["sample", "run", "--prompt", "\udcff"],
        ["train", "toy", "--max-minutes", "inf"],
        ["probe-topology", "--wait", "nan"],
        ["probe-topology", "--shape", "toy", "--ep", "\u00b2"],
        ["probe-topology", "--save", "/nowhere/file"],
        ["bench", "layer", "--device", "tpu"],
        ["bench", "layer", "--plot", "/nowhere/file"],
        ["verify-determinism", "--junit", "/nowhere/file"],
        ["verify-determinism", "--baseline", "/nowhere/file"],
        ["verify-determinism", "--force"],
        ["verify-determinism", "--target", "layer", "--baseline", "file"],
        ["verify-determinism", "toy", "--compare", "a", "b"],
        ["verify-determinism", "--compare", "a", "b", "--axis", "rerun", "--set", "seed=1"],
        ["export", "run", "--to", "x", "--max-shard-size", "9" * 400],
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_work(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert arguments[-2].lstrip("-") in err or arguments[-1].lstrip("-") in err


def test_a_console_for_people_writes_no_escape_codes_into_a_file(run):
    @click.command()
    @json_option
    def colour(output: Output) -> None:
        output.console().print("[red]" + "long " * 40 + "[/red]")

    _, out, _ = run("colour", colour=colour)
    assert out == "long " * 40 + "\n"


def test_copied_recipes_are_never_overwritten(run, tmp_path: Path):
    folder = tmp_path / "new"
    code, out, _ = run("recipes", "copy", "toy", str(folder))
    assert code == 0
    assert f"mok train {folder / 'toy.toml'}" in out
    (folder / "toy.toml").write_text("seed = 1\n")
    code, _, err = run("recipes", "copy", "toy", str(folder))
    assert code == 2
    assert "exists already" in err
    assert (folder / "toy.toml").read_text() == "seed = 1\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_said_so(run, tmp_path: Path):
    tmp_path.chmod(0o555)
    code, _, err = run("recipes", "copy", "toy", str(tmp_path))
    assert code == 2
    assert "cannot be written" in err
