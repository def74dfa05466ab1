"""`mok bench`: how fast, against what, and whether the results were right."""

from __future__ import annotations

import click

from mok.errors import UsageError
from mok_cli.bench_exchange import exchange
from mok_cli.bench_layer import layer
from mok_cli.bench_tune import tune
from mok_cli.output import Output, examples, json_option

__all__ = ["bench"]


@click.group(epilog=examples("mok bench train --shape toy --against hf", "mok bench train --shape toy --json bench.json"))
def bench() -> None:
    """Measure speed, after checking that the result is right."""


@bench.command(epilog=examples("mok bench train --shape toy --against hf", "mok bench train --shape toy --rounds 10 --json"))
@click.option("--shape", default="toy", show_default=True, metavar="NAME", help="A shipped recipe, or the path of one.")
@click.option("--against", default="", metavar="NAME,...", help="Peers to time in the same run: hf.")
@click.option("--rounds", type=click.IntRange(min=2), default=8, show_default=True, help="Turns of each contestant.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Steps of a turn.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of a step; by default the recipe's.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, metavar="N", help="Time the sums over N ranks too.")
@click.option("--digests", is_flag=True, help="Time steps that take the digests of verify-determinism too.")
@click.option("--check/--no-check", default=True, show_default=True, help="Compare losses and gradients before timing.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@json_option
def train(
    shape: str,
    against: str,
    rounds: int,
    steps: int,
    tokens: int | None,
    nproc: int,
    digests: bool,
    check: bool,
    device: str,
    output: Output,
) -> None:
    """Whole training steps on random tokens: forward, backward, clipping, optimizer.

    No balance loss on either side, the same initial weights, the same tokens, blocks computed again on both sides or on none.
    "mok, one slice" is mok without the ordered sums that make other layouts give the same bits. With --digests, "mok, digests"
    is mok as mok verify-determinism watches it. With --nproc, N ranks also train, and their sums of gradients in the order of
    the contract are timed beside the backend's own all-reduce.
    """
    import dataclasses

    from mok import shapes
    from mok.bench.train import bench_train
    from mok.recipe import load
    from mok.train.device import choose_device

    same = ["moe.balance_loss=0", "moe.z_loss=0", "optim.schedule=constant", "optim.warmup_steps=0", "train.threads=0"]
    recipe = load(shape, same)
    if tokens is not None:
        sequences, rest = divmod(tokens, recipe.train.sequence_length)
        if rest:
            raise UsageError(
                f"--tokens {tokens}: not whole sequences of {recipe.train.sequence_length}; use a multiple of that"
            )
        recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, batch_size=sequences))
    if nproc > 1:
        from mok.bench.reduction import bench_reduction, layout_of

        layout_of(recipe, nproc)
    vocab_size = shapes.vocabulary(recipe)
    report = bench_train(
        recipe,
        [name for name in against.split(",") if name],
        vocab_size=vocab_size,
        rounds=rounds,
        steps=steps,
        check=check,
        device=choose_device(device),
        digests=digests,
    )
    output.line(f"{'':<16}{'ms/step':>9}{'spread':>8}{'tok/s':>9}{'dense':>7}{'MiB':>8}{'repeats':>9}{'error':>9}")
    for row in report.rows:
        error = "" if row.relative_error is None else f"{row.relative_error:.0e}"
        repeats = "yes" if row.bitwise_repeatable else "NO"
        output.line(
            f"{row.name:<16}{row.median_ms:>9.1f}{row.spread_ms:>8.1f}{row.tokens_per_s:>9,.0f}"
            f"{row.fraction_of_dense:>7.2f}{row.peak_bytes / 2**20:>8,.0f}{repeats:>9}{error:>9}"
        )
    first = report.rows[0]
    for name, ratio in first.ratio_to.items():
        output.line(f"mok is {ratio:.2f} times as fast as {name}")
    output.line(
        f"medians of {rounds * steps} steps, quartile spread, {report.environment['threads']} threads; a dense product ran at "
        f"{report.environment['dense_tflops']:.3g} TFLOP/s, of which a step's model operations are the share under dense"
    )
    results = {"rows": [dataclasses.asdict(row) for row in report.rows], "environment": report.environment}
    if nproc > 1:
        cost = bench_reduction(recipe, nproc, vocab_size=vocab_size, repeats=rounds * steps, device=device)
        output.line(
            f"{nproc} ranks ({cost.replicas} replicas of {cost.ep}): {cost.step_ms:.1f} ms a step; sums of "
            f"{cost.gradient_bytes / 2**20:,.1f} MiB of gradients take {cost.ordered_ms:.1f} ms in the order of the contract, "
            f"gathering the weights included, and {cost.all_reduce_ms:.1f} ms as {cost.backend}'s all-reduce: the order costs "
            f"{cost.share_of_step:.1%} of a step"
        )
        results["reduction"] = dataclasses.asdict(cost) | {"share_of_step": cost.share_of_step}
    output.report(results)


bench.add_command(exchange)
bench.add_command(layer)
bench.add_command(tune)
