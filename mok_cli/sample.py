"""`mok sample`: text from a trained model."""

from __future__ import annotations

import click

from mok_cli.output import FiniteFloat, Output, examples, json_option

__all__ = ["sample"]


@click.command(epilog=examples("mok sample runs/mine", 'mok sample runs/mine --prompt "class " --tokens 200 --temperature 0.5'))
@click.argument("run", type=click.Path())
@click.option("--prompt", metavar="TEXT", help="Text to continue [default: sample.prompt of the recipe].")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Tokens to write [default: sample.tokens].")
@click.option("--temperature", type=FiniteFloat(min=0), metavar="X", help="0 is greedy [default: sample.temperature].")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Another seed, other text [default: seed of the recipe].")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@json_option
def sample(
    run: str,
    prompt: str | None,
    tokens: int | None,
    temperature: float | None,
    seed: int | None,
    device: str,
    output: Output,
) -> None:
    """Write text with a trained model.

    RUN is a run folder or a checkpoint in one.
    """
    from pathlib import Path

    from mok.errors import UsageError
    from mok.train.device import choose_device
    from mok.train.sampling import printable, sample_text
    from mok.train.saved import load_model

    try:
        (prompt or "").encode()
    except UnicodeEncodeError:
        raise UsageError(f"--prompt {prompt!r}: is not valid UTF-8; give text") from None
    saved = load_model(Path(run), choose_device(device))
    default = saved.recipe.sample
    prompt = default.prompt if prompt is None else prompt
    text = sample_text(
        saved.model,
        saved.tokenizer,
        prompt,
        default.tokens if tokens is None else tokens,
        default.temperature if temperature is None else temperature,
        saved.recipe.seed if seed is None else seed,
        saved.step,
        saved.window,
    )
    output.line(printable(text))
    output.report({"run": run, "step": saved.step, "prompt": prompt, "text": text})
