"""`mok eval`: the loss of a trained model on held-out or other text."""

from __future__ import annotations

import click

from mok_cli.output import Output, examples, json_option

__all__ = ["evaluate"]


@click.command("eval", epilog=examples("mok eval runs/mine", "mok eval runs/mine --data some_text --batches 0"))
@click.argument("run", type=click.Path())
@click.option("--data", metavar="PATH", help="All text of this file or folder, in place of what the run held out.")
@click.option("--batches", type=click.IntRange(min=0), metavar="N", help="Batches to take, 0 for all [default: eval.batches].")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@json_option
def evaluate(run: str, data: str | None, batches: int | None, device: str, output: Output) -> None:
    """Loss of a trained model on text.

    RUN is a run folder or a checkpoint in one. The loss is given in nats per token and in bits per byte.
    """
    import dataclasses
    import math
    from pathlib import Path

    from mok.data.corpus import open_corpus
    from mok.train.device import choose_device
    from mok.train.saved import load_model, loss_on

    saved = load_model(Path(run), choose_device(device))
    config = saved.recipe.data
    if data is not None:
        config = dataclasses.replace(config, path=data, tokenizer=str(saved.run.folder / "tokenizer.json"))
    corpus = open_corpus(config)
    limit = saved.recipe.eval.batches if batches is None else batches
    total, tokens, num_bytes = loss_on(saved, corpus, everything=data is not None, max_batches=limit)
    loss, bits = total / tokens, total / math.log(2.0) / max(num_bytes, 1)
    what = data if data is not None else "held-out documents"
    output.line(f"step {saved.step} on {what}: loss {loss:.4f} nats, {bits:.4f} bits per byte, {tokens:,} tokens")
    output.report({"run": run, "step": saved.step, "data": what, "val/loss": loss, "val/bits_per_byte": bits, "tokens": tokens})
