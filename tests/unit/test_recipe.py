"""Recipes: what is read, what is refused and in which words."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mok.config import Recipe
from mok.errors import RecipeError
from mok.recipe import dump_toml, keys, load, resolve, shipped


@pytest.fixture
def recipe_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problems_of(name_or_path: str, *overrides: str, **flags: int) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(name_or_path, overrides, **flags)
    return [str(problem) for problem in caught.value.problems]


def only_problem_of(name_or_path: str, *overrides: str, **flags: int) -> str:
    (problem,) = problems_of(name_or_path, *overrides, **flags)
    return problem


def test_an_empty_file_is_the_default_recipe(recipe_file):
    assert load(recipe_file("")) == Recipe()


def test_values_of_every_type_are_read(recipe_file):
    text = """
    seed = 7
    optim.lr = 1e-4        # dotted keys are TOML too
    [train]
    freeze = [
        "model.embed*",    # a ] in a comment
        "b]#",
    ]
    [model]
    tie_embeddings = true
    rope_theta = 500000    # an integer is a number
    [data]
    path = 'C:\\text'
    [moe]
    ep = "auto"
    """
    recipe = load(recipe_file(text))
    assert recipe.seed == 7
    assert recipe.optim.lr == 0.0001
    assert recipe.train.freeze == ("model.embed*", "b]#")
    assert recipe.model.tie_embeddings is True
    assert recipe.model.rope_theta == 500000.0
    assert isinstance(recipe.model.rope_theta, float)
    assert recipe.data.path == r"C:\text"
    assert recipe.moe.ep == "auto"


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("optim", "lerning_rate", "optim.lr"),
        ("moe", "num_expert", "moe.num_experts"),
        ("moe", "num-experts", "moe.num_experts"),
        ("model", "top_k", "moe.top_k"),
        ("", "lr", "optim.lr"),
        ("train", "step", "train.steps"),
    ],
)
def test_a_key_that_is_not_there_is_refused_with_the_nearest_one(recipe_file, section, key, meant):
    path = recipe_file(f"[{section}]\n{key} = 3\n" if section else f"\n{key} = 3\n")
    full = f"{section}.{key}" if section else key
    problem = only_problem_of(path)
    assert problem.startswith(f"{path}:2 {full}: there is no key {key}")
    assert problem.endswith(f"did you mean {meant}?")
    assert only_problem_of("toy", f"{full}=3").endswith(f"did you mean {meant}?")


def test_a_section_that_is_not_there_is_refused_once(recipe_file):
    problem = only_problem_of(recipe_file("[optimizer]\nlr = 1\neps = 2\n"))
    assert "mine.toml:1 [optimizer]" in problem
    assert problem.endswith("did you mean [optim]?")


def test_all_mistakes_are_reported_at_once(recipe_file):
    path = recipe_file(
        "[moe]\nnum_experts = 6\nep = 4\ntop_k = 9\nnum_expert = 1\n[optim]\nlr = 1e-4x\n[train]\nsteps = 0\ndtype = 'fp16'\n"
    )
    problems = problems_of(path, "log.every=0", "nothing")
    wheres = sorted(problem.partition(": ")[0].removeprefix(path) for problem in problems)
    lines = [":10 train.dtype", ":3 moe.ep", ":4 moe.top_k", ":5 moe.num_expert", ":7 optim.lr", ":9 train.steps"]
    assert wheres == sorted(["--set log.every=0", "--set nothing", *lines])


def test_scientific_notation_means_the_same_in_a_file_and_on_the_command_line(recipe_file):
    assert load(recipe_file("[optim]\nlr = 1e-4\n")).optim.lr == 1e-4
    assert load("toy", ["optim.lr=1e-4"]).optim.lr == 1e-4


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("optim.lr", '"1e-4"', '"1e-4" is a string, not a number; write 1e-4 without quotes'),
        ("optim.lr", "1e-4x", "1e-4x is not a TOML value"),
        ("train.steps", "1e3", "1000.0 is a number, not an integer; write 1000"),
        ("train.steps", "true", "true is a boolean, not an integer"),
        ("data.path", "no", "no is not a TOML value"),
        ("seed", "010", "010 is not a TOML value"),
        ("train.steps", "1:30", "1:30 is not a TOML value"),
        ("log.tensorboard", '"False"', '"False" is a string, not a boolean; write true or false'),
        ("log.tensorboard", "0", "0 is an integer, not a boolean; write true or false"),
        ("optim.lr", "nan", "nan is not a finite number"),
        ("optim.lr", "inf", "inf is not a finite number"),
        ("train.freeze", '"model.*"', "is not a list of strings"),
        ("moe.ep", '"many"', '"many" is neither a number nor auto'),
        ("moe.backend", '"megga"', "did you mean mega?"),
        ("data.path", "7", '7 is an integer, not a string; write "7"'),
        ("moe.top_k", "{}", "{} is a table, not an integer"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_as_it_was_written(recipe_file, key, text, words):
    section, _, leaf = key.rpartition(".")
    problem = only_problem_of(recipe_file(f"[{section}]\n{leaf} = {text}\n" if section else f"{leaf} = {text}\n"))
    assert words in problem
    assert f" {key}: " in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=1e-4x", '"1e-4x" is a string, not a number'),
        ("train.steps=1e3", "1000.0 is a number, not an integer; write 1000"),
        ("seed=010", '"010" is a string, not an integer'),
        ("train.steps=1:30", "is a string, not an integer"),
        ("train.steps=1\nseed = 2", "is a string, not an integer"),
        ("log.tensorboard=maybe", '"maybe" is a string, not a boolean; write true or false'),
        ("train.steps=", '"" is a string, not an integer'),
        ("data.path=\udcff", "is not valid UTF-8"),
        ("data.path=a\0b", "holds a zero character"),
        ("data.path=", "data.path=: is empty; write a file, a folder or stdlib"),
        ("data.tokenizer=", "is empty"),
        ("data.tokenizer=bpe:1000000000000", "has no size from 257"),
        (f"data.tokenizer=bpe:{'9' * 5000}", "has no size from 257"),
        ("train.threads=100000", "use a value at least 0 and at most 1024"),
        ("distributed.timeout_s=1e30", "use a value above 0 and at most"),
        ("moe.balance_loss=1e300", "1e+300 is 0 or infinity in fp32"),
        ("optim.eps=1e-300", "1e-300 is 0 or infinity in fp32"),
        ("model.max_positions=1", "1 is less than train.sequence_length"),
        ("model.rotary_fraction=1e-9", "rotates 0 of model.head_dim"),
        ("seed=\uff11", "is a string, not an integer; write a value like 0"),
    ],
)
def test_an_override_of_the_wrong_type_is_refused(override, words):
    assert words in only_problem_of("toy", override)


@pytest.mark.parametrize("text", ["False", "false", "0", "no", "off", "NO"])
def test_every_spelling_of_false_switches_off(recipe_file, text):
    path = recipe_file("[log]\ntensorboard = true\n")
    assert load(path).log.tensorboard is True
    assert load(path, [f"log.tensorboard={text}"]).log.tensorboard is False


def test_text_overrides_are_taken_as_they_are():
    recipe = load("toy", ["data.path=010", "sample.prompt=", "data.tokenizer=no", "train.freeze=a.*,b", "data.cache=x=y"])
    assert recipe.data.path == "010"
    assert recipe.sample.prompt == ""
    assert recipe.data.tokenizer == "no"
    assert recipe.data.cache == "x=y"
    assert recipe.train.freeze == ("a.*", "b")
    assert load("toy", ['train.freeze=["a,b"]']).train.freeze == ("a,b",)


def test_the_command_line_beats_the_file_which_beats_the_default_also_for_false_zero_and_empty(recipe_file):
    path = recipe_file("seed = 5\n[log]\ntensorboard = true\n[moe]\nbalance_loss = 0.0\n[sample]\nprompt = ''\n")
    from_file = resolve(path)
    assert from_file.recipe.moe.balance_loss == 0.0
    assert from_file.recipe.sample.prompt == ""
    assert from_file.origins["log.tensorboard"] == "mine.toml:3"
    assert from_file.origins["moe.top_k"] == "default"

    overridden = resolve(path, ["log.tensorboard=false", "optim.clip_norm=0"], seed=0)
    assert overridden.recipe.log.tensorboard is False
    assert overridden.recipe.optim.clip_norm == 0.0
    assert overridden.recipe.seed == 0
    assert overridden.origins["log.tensorboard"] == "--set"
    assert overridden.origins["seed"] == "--seed"


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70])
def test_a_negative_or_huge_seed_is_refused(seed):
    assert "--seed: " in only_problem_of("toy", seed=seed)
    assert f"--set seed={seed}: " in only_problem_of("toy", f"seed={seed}")


@pytest.mark.parametrize("key", ["moe.capacity_factor", "moe.drop_tokens", "moe.token_drop", "moe.expert_capacity"])
def test_a_capacity_or_drop_key_is_refused_by_name(recipe_file, key):
    assert "mok is dropless" in only_problem_of("toy", f"{key}=-1")
    assert "mok is dropless" in only_problem_of(recipe_file(f"{key} = 1.25\n"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["moe.num_experts=6", "moe.ep=4"], "4 ranks cannot share moe.num_experts = 6 evenly"),
        (["moe.top_k=9"], "9 is more than moe.num_experts = 8"),
        (["moe.top_k=0"], "0 is out of range; use a value at least 1"),
        (["moe.num_experts=0"], "0 is out of range"),
        (["model.hidden_size=100"], "100 is not a multiple of 16; use 96 or 112"),
        (["model.num_heads=3", "model.num_kv_heads=2"], "2 does not divide model.num_heads = 3"),
        (["optim.beta1=1"], "use a value at least 0 and below 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_the_rule_and_the_values(overrides, words):
    assert words in only_problem_of("toy", *overrides)


def test_a_rule_across_keys_points_at_the_line_that_broke_it(recipe_file):
    path = recipe_file("[moe]\nnum_experts = 4\n\ntop_k = 5\n")
    assert only_problem_of(path).startswith(f"{path}:4 moe.top_k: 5 is more than")


def test_a_repeated_key_names_both_lines(recipe_file):
    path = recipe_file("[optim]\nlr = 1.0\neps = 1e-8\nlr = 2.0\n")
    assert only_problem_of(path) == f"{path}:4 optim.lr: is given twice, first at {path}:2 optim.lr; keep one"


def test_a_repeated_section_names_both_lines(recipe_file):
    path = recipe_file("[moe]\nnum_experts = 4\n[log]\n[moe]\ntop_k = 1\n")
    assert only_problem_of(path) == f"{path}:4 [moe]: is given twice, first at {path}:1; merge the two"


def test_a_repeated_override_is_refused():
    assert "is given twice" in only_problem_of("toy", "seed=1", "seed=2")
    assert "is given twice" in only_problem_of("toy", "seed=1", seed=2)


def test_files_that_are_no_recipes(tmp_path: Path):
    assert "there is no such file" in only_problem_of(str(tmp_path / "none.toml"))
    assert "is a folder" in only_problem_of(str(tmp_path))
    assert "neither a shipped recipe nor a file" in only_problem_of("tiy")
    (tmp_path / "utf16.toml").write_text("seed = 1", encoding="utf-16")
    assert "cannot be read" in only_problem_of(str(tmp_path / "utf16.toml"))


def test_the_resolved_recipe_reads_back_equal(recipe_file):
    text = '[data]\npath = "a \\"b\\" \\u007f \\n ü"\n[train]\nfreeze = ["x", "y"]\n[moe]\nep = "auto"\n[optim]\nlr = 1e-30\n'
    resolved = resolve(recipe_file(text), ["seed=9"])
    written = dump_toml(resolved.recipe, resolved.origins)
    assert load(recipe_file(written)) == resolved.recipe
    assert "seed = 9  # --set" in written.splitlines()
    assert "lr = 1e-30  # mine.toml:8" in written.splitlines()
    assert {key for key, _ in flat(tomllib.loads(written))} == set(keys())


def flat(table, prefix=""):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_recipes_are_right(name):
    assert resolve(name).name == name
