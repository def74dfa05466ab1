"""`mok recipes`: what ships, what is in it, a copy to change, and whether a recipe is right."""

from __future__ import annotations

import click

from mok_cli.output import Output, examples, json_option

__all__ = ["recipes"]


@click.group(invoke_without_command=True, epilog=examples("mok recipes", "mok recipes copy toy ."))
@click.pass_context
def recipes(context: click.Context) -> None:
    """List, show, copy or check recipes.

    A recipe is a TOML file that says what a run is: model, data, steps, ranks. It states only what differs from the
    defaults, which docs/recipes.md lists. Without a command, the shipped ones are listed.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_recipes, output=Output())


@recipes.command("list", epilog=examples("mok recipes list", "mok recipes list --json"))
@json_option
def list_recipes(output: Output) -> None:
    """List the recipes that come with mok."""
    from mok.recipe import shipped

    found = {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in shipped().items()}
    for name, summary in found.items():
        output.line(f"{name}\n    {summary}")
    output.report({"recipes": [{"name": name, "summary": summary} for name, summary in found.items()]})


@recipes.command(epilog=examples("mok recipes show toy", "mok recipes show toy --set moe.num_experts=16"))
@click.argument("recipe")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@json_option
def show(recipe: str, overrides: tuple[str, ...], output: Output) -> None:
    """Show every value of RECIPE and where it came from."""
    from mok.recipe import dump_toml, resolve

    resolved = resolve(recipe, overrides)
    output.line(dump_toml(resolved.recipe, resolved.origins).rstrip())
    output.report({"name": resolved.name, "recipe": resolved.recipe.to_dict(), "origins": dict(resolved.origins)})


@recipes.command(epilog=examples("mok recipes copy toy .", "mok recipes copy small experiments/"))
@click.argument("name")
@click.argument("folder", type=click.Path(file_okay=False))
@json_option
def copy(name: str, folder: str, output: Output) -> None:
    """Copy the shipped recipe NAME into FOLDER, to change it there. Never overwrites."""
    from pathlib import Path

    from mok.errors import UsageError
    from mok.recipe import find

    source = find(name)
    target = Path(folder) / source.name
    if target.exists():
        raise UsageError(f"{target}: exists already; remove it or copy into another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror}); name a folder that is writable") from None
    output.line(f"{target}\nNext: mok train {target}")
    output.report({"path": str(target)})


@recipes.command(epilog=examples("mok recipes check toy", "mok recipes check mine.toml --world-size 8"))
@click.argument("path")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Price the run on N ranks.")
@json_option
def check(path: str, overrides: tuple[str, ...], world_size: int | None, output: Output) -> None:
    """Check the recipe at PATH and say what a run of it takes.

    Every mistake is reported at once. Needs no GPU and no data.
    """
    from mok.recipe import resolve
    from mok_cli.dry_run import price, show_price

    resolved = resolve(path, overrides)
    show_price(resolved, price(resolved.recipe, world_size), output)
