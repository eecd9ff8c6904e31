"""``mtpconvert slice HF OUT``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from mtpconvert.cli.options import EXISTING, TARGET, json_option, mapping_option, overwrite_option
from mtpconvert.cli.output import mtp_json, mtp_line, print_json, print_notes, progress
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.slice import open_slice, slice_checkpoint
from mtpconvert.convert.slice_plan import SliceOptions, SlicePlan
from mtpconvert.tensors import size_words


@click.command()
@click.argument("hf", type=EXISTING)
@click.argument("out", type=TARGET)
@click.option("--layers", type=click.IntRange(1), required=True, help="Trunk layers to keep, the first ones.")
@click.option("--experts", type=click.IntRange(1), help="Routed experts to keep in each layer; default: all.")
@click.option("--max-shard-size", default="5GB", show_default=True)
@click.option("--dry-run", is_flag=True, help="Say what would be written; read headers only.")
@overwrite_option
@mapping_option
@json_option
def slice(  # noqa: A001 - the command's name
    hf: Path,
    out: Path,
    layers: int,
    experts: int | None,
    max_shard_size: str,
    dry_run: bool,
    overwrite: bool,
    mapping: Path | None,
    as_json: bool,
) -> None:
    """Write OUT: the first layers and experts of HF with their real values, MTP kept, config adjusted."""
    options = SliceOptions(layers, experts, max_shard_size, overwrite, mapping)
    if dry_run:
        _, plan = open_slice(hf, options)
    else:
        with ExitStack() as stack:
            callbacks = Callbacks(start=lambda total: stack.enter_context(progress(total)))
            plan = slice_checkpoint(hf, out, options, callbacks)
    if as_json:
        print_json(_document(plan, hf, out, dry_run))
        return
    print_notes(plan.notes)
    verb = "would hold" if dry_run else "holds"
    click.echo(f"{out} {verb} {len(plan.target):,} tensors, {size_words(plan.nbytes)}; {plan.left:,} of {hf} left out")
    for key, value in plan.config_changes.items():
        click.echo(f"config.json changed: {key} = {value!r}")
    click.echo(mtp_line(plan.mtp))


def _document(plan: SlicePlan, source: Path, target: Path, dry_run: bool) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "source": str(source),
        "target": str(target),
        "written": not dry_run,
        "architecture": plan.architecture,
        "tensors": len(plan.target),
        "bytes": plan.nbytes,
        "left_out": plan.left,
        "config_changes": plan.config_changes,
        "notes": plan.notes,
        "mtp": mtp_json(plan.mtp),
    }
