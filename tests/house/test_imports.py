"""What may import what, and what an import pulls in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "triton", "rich", "transformers", "tokenizers", "safetensors"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("mok", "mok_cli")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def test_imports_go_one_way():
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def heavy_modules_after(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    report = (
        f"import atexit, sys; atexit.register(lambda: sys.stderr.write('\\nloaded: ' + ' '.join({HEAVY!r} & set(sys.modules))))"
    )
    command = [sys.executable, "-c", f"{report}\n{code}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return set(result.stderr.rpartition("loaded: ")[2].split())


def test_the_check_of_loaded_modules_can_fail():
    assert heavy_modules_after("import numpy") == {"numpy"}


@pytest.mark.parametrize("code", ["import mok", "import mok.errors, mok.config, mok.recipe, mok.shapes"])
def test_the_package_and_recipes_need_no_torch(code):
    assert heavy_modules_after(code) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["no-such-command"],
        ["recipes", "list"],
        ["recipes", "check", "toy"],
        ["recipes", "show", "toy", "--set", "moe.num_expert=3"],
        ["recipes", "check", "no-such-recipe"],
    ],
)
def test_help_and_recipe_errors_leave_torch_unloaded(arguments):
    assert heavy_modules_after(f"from mok_cli.main import main\nmain({arguments!r})") == set()


def test_every_commands_help_leaves_torch_unloaded():
    code = """
from mok_cli.main import COMMANDS, cli
from click.testing import CliRunner
for name in COMMANDS:
    assert CliRunner().invoke(cli, [name, "--help"]).exit_code == 0, name
"""
    assert heavy_modules_after(code) == set()


def test_completion_leaves_torch_unloaded():
    code = """
import os
os.environ.update(_MOK_COMPLETE="bash_complete", COMP_WORDS="mok recipes ", COMP_CWORD="2")
from mok_cli.main import main
main([])
"""
    assert heavy_modules_after(code) == set()


def test_no_import_touches_a_gpu():
    code = f"""
import importlib, torch
def refuse(*_, **__):
    raise AssertionError("an import started CUDA")
torch.cuda.init = torch.cuda._lazy_init = refuse
for name in {[name for name in MODULES if not name.endswith("__main__")]!r}:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_layer_works_where_triton_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None
import torch, mok
layer = mok.MoE(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
layer(torch.randn(5, 16)).sum().backward()
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def declared(tree: ast.Module) -> set[str] | None:
    """The names in `__all__`, or None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def defined(tree: ast.Module) -> set[str]:
    """Names bound at the top level, under conditions and by imports too, and those that `__getattr__` answers for."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if "__getattr__" in names:
        names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names


def imports_within(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) for each `from mok... import name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in ("mok", "mok_cli"):
            yield from ((node.module, alias.name) for alias in node.names)


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_what_it_owns(name):
    assert ast.get_docstring(TREES[name])


@pytest.mark.parametrize("name", sorted(MODULES))
def test_all_names_what_is_there(name):
    assert (declared(TREES[name]) or set()) <= defined(TREES[name])


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_declared_names_are_imported_from_elsewhere(name):
    for module, imported in imports_within(TREES[name]):
        if f"{module}.{imported}" in MODULES:
            continue
        public = declared(TREES[module])
        assert public is None or imported in public or imported == "__version__", f"{module}.{imported} is not in its __all__"
