"""`mok export`: a run as a folder that other programs load."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import click

from mok.errors import UsageError
from mok_cli.output import Output, examples, json_option

__all__ = ["export"]

UNIT_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@click.command(
    epilog=examples("mok export runs/toy-1 --to my-model", "mok export runs/toy-1 --to my-model --dtype bf16 --verify")
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to write; new or empty.")
@click.option("--arch", metavar="NAME", help="qwen3_moe, glm4_moe, mixtral or olmoe; default: the first that fits.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), help="Default: the dtype of training.")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Largest file, like 5GB or 500MiB.")
@click.option("--allow-nan", is_flag=True, help="Export NaN or infinite weights too.")
@click.option("--verify", is_flag=True, help="Reload with transformers and compare logits.")
@json_option
def export(
    run: Path, to: Path, arch: str | None, dtype: str | None, max_shard_size: str, allow_nan: bool, verify: bool, output: Output
) -> None:
    """Write a run as a Hugging Face model.

    RUN is a run folder, or one checkpoint in it. The folder has safetensors with one
    tensor per expert, config, tokenizer, a model card and checksums, as transformers
    and programs that read its models expect them.
    """
    max_shard_bytes = _num_bytes(max_shard_size)

    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from mok.export import export as export_run
    from mok.export import open_run
    from mok.export_verify import verify_export

    opened = open_run(run)
    console = output.console()
    columns = (TextColumn("exporting"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("export", total=None)
        report = export_run(
            opened,
            to,
            family=arch,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            allow_nan=allow_nan,
            wrote=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for notice in report.notices:
        output.line(f"warning: {notice}")
    output.line(
        f"{report.folder}: {report.family}, {report.dtype}, step {report.step}: {report.num_shards} shard(s), "
        f"{report.num_tensors} tensors, {report.num_parameters:,} parameters, {report.num_bytes:,} bytes"
    )
    if report.kept_fp32:
        output.line(f"kept in fp32: {', '.join(report.kept_fp32)}")
    facts = asdict(report) | {"folder": str(report.folder)}
    verdict = verify_export(to, opened.recipe, report.dtype) if verify else None
    if verdict is not None:
        output.line(f"verify: {verdict}")
        facts["verify"] = asdict(verdict)
    output.report(facts)
    if verdict is not None:
        verdict.require()
    output.line(f"Next: transformers.AutoModelForCausalLM.from_pretrained({str(to)!r})")


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower(), re.ASCII)
    if match is None or (size := int(float(match[1]) * UNIT_BYTES[match[2] or ""])) < 1:
        raise UsageError(f"--max-shard-size {text}: not a size; write for example 5GB, 500MB or 2GiB")
    return size
