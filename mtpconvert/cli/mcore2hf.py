"""``mtpconvert mcore2hf SRC DST``."""

from __future__ import annotations

from pathlib import Path

import click

from mtpconvert.cli.gate import ALL_ROWS, DROP_MTP, gate
from mtpconvert.cli.options import EXISTING, TARGET, conversion_options
from mtpconvert.cli.report import run_conversion
from mtpconvert.convert.result import Callbacks, Conversion
from mtpconvert.convert.to_hf import ToHf
from mtpconvert.convert.to_hf import mcore2hf as convert


@click.command()
@click.argument("src", type=EXISTING)
@click.argument("dst", type=TARGET)
@click.option("--reference", type=EXISTING, help="HF directory, or what hf2mcore wrote, that training started from.")
@click.option("--max-shard-size", default=None, help="Such as 5GB; default: the shards of the reference.")
@click.option(
    "--vocab-size",
    type=click.Choice(["from-config", "from-megatron"]),
    default="from-config",
    show_default=True,
    help="from-megatron keeps all of Megatron's rows and rewrites vocab_size in config.json.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bfloat16"]),
    default="keep",
    show_default=True,
    help="bfloat16 writes what the reference packs (FP8) as bf16 and removes quantization_config.",
)
@conversion_options
def mcore2hf(
    src: Path,
    dst: Path,
    reference: Path | None,
    max_shard_size: str | None,
    vocab_size: str,
    dtype: str,
    mtp: str,
    audit_level: str,
    overwrite: bool,
    mapping: Path | None,
    as_json: bool,
) -> None:
    """Convert the Megatron checkpoint SRC into the Hugging Face directory DST."""
    options = ToHf(
        reference=reference,
        mtp=mtp,
        max_shard_size=max_shard_size,
        vocab_size=vocab_size,
        overwrite=overwrite,
        mapping=mapping,
        dtype=dtype,
    )
    requests = [DROP_MTP] * (mtp == "drop") + [ALL_ROWS] * (vocab_size == "from-megatron")

    def run(callbacks: Callbacks) -> Conversion:
        return convert(src, dst, options, callbacks)

    run_conversion(run, gate(audit_level, requests), as_json=as_json)
