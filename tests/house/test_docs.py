"""What the documents claim exists: commands, options, make targets, paths, recipe keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mok.recipe import find, keys
from mok_cli.main import COMMANDS, cli
from tests.house import recipe_docs, scaling_docs

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

code_spans = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def code_lines(name: str) -> list[str]:
    """Every line of code blocks and every inline code of a document."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line.strip() for block, inline in code_spans.findall(text) for line in (block or inline).splitlines()]


def commands() -> Iterator[tuple[str, click.Command]]:
    """("recipes list", command) for each command there is, groups included."""
    context = click.Context(cli)

    def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield path, command
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                yield from walk(f"{path} {name}", child)

    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield from walk(name, command)


def check_command_line(line: str) -> None:
    """Fail unless `line` ("mok recipes check toy ...") names commands, options and recipes that there are."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = cli
    while words and isinstance(command, click.Group):
        if words[0].startswith("-"):
            break
        child = command.get_command(click.Context(command), words[0])
        assert child is not None, f"{line}: there is no command {words[0]}"
        command = child
        words = words[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options |= {"--help", "-h", "--version"}
    for i, word in enumerate(words):
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{line}: {command.name} has no option {word}"
        if word == "--set" and i + 1 < len(words) and words[i + 1] != "KEY=VALUE":
            key = words[i + 1].partition("=")[0]
            assert key in keys(), f"{line}: there is no key {key}"
    takes_recipe = [parameter.name for parameter in command.params if isinstance(parameter, click.Argument)][:1] == ["recipe"]
    if takes_recipe and words and re.fullmatch(r"[a-z0-9.-]+", words[0].removesuffix(".toml")) and not words[0].startswith("-"):
        find(words[0].removesuffix(".toml"))  # a file named like a shipped recipe is a copy of it


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_named_in_documents_exist(name):
    for line in code_lines(name):
        if re.match(r"(\$ )?(\.venv/bin/)?mok( |$)", line):
            check_command_line(re.sub(r"^(\$ )?(\.venv/bin/)?", "", line))


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_named_in_documents_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in code_lines(name):
        for command in line.split("&&"):
            if command.strip().startswith("make "):
                assert set(shlex.split(command, comments=True)[1:]) <= targets, line


@pytest.mark.parametrize("name", NAMES)
def test_paths_named_in_documents_exist(name):
    tops = {path.name for path in ROOT.iterdir()} - {"runs"}
    for line in code_lines(name):
        for path in re.findall(r"(?<![\w/.-])[\w.-]+/[\w./-]*", line):
            if path.partition("/")[0] in tops - {".venv"}:
                assert (ROOT / path.rstrip(".")).exists(), f"{path} in {line}"


@pytest.mark.parametrize("name", NAMES)
def test_links_between_documents_lead_somewhere(name):
    document = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_recipe_keys_named_in_documents_exist(name):
    sections = {key.partition(".")[0] for key in keys() if "." in key}
    for line in code_lines(name):
        for section, leaf in re.findall(r"(?<![\w./-])([a-z]+)\.([a-z_0-9]+)(?=[ =,]|$)", line):
            if section in sections and f"{section}.{leaf}" not in {"model.safetensors", "train.log"}:
                assert f"{section}.{leaf}" in keys(), line


def test_the_page_of_recipe_keys_is_up_to_date():
    assert recipe_docs.PAGE.read_text(encoding="utf-8") == recipe_docs.render(), "run python -m tests.house.recipe_docs"


def test_the_tables_of_the_cost_model_are_up_to_date():
    page = scaling_docs.PAGE.read_text(encoding="utf-8")
    assert page == scaling_docs.render(page), "run python -m tests.house.scaling_docs"


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_help_shows_two_examples_that_are_right_in_80_columns(path, command):
    page = command.get_help(click.Context(command, info_name=f"mok {path}", terminal_width=80, max_content_width=80))
    assert max(map(len, page.splitlines())) <= 80
    examples = [line.strip() for line in page.partition("Examples:")[2].splitlines() if line.strip().startswith("mok ")]
    assert len(examples) >= 2
    for example in examples:
        check_command_line(example)


def test_every_command_takes_json():
    for path, command in commands():
        if not isinstance(command, click.Group):
            assert any("--json" in parameter.opts for parameter in command.params), path


def test_the_list_of_commands_says_what_each_does():
    for path, command in commands():
        if path in COMMANDS:
            assert command.get_short_help_str(limit=80) == COMMANDS[path][1]
