"""``mtpconvert hf2mcore SRC DST``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from mtpconvert.cli.gate import DROP_MTP, USE_TRUNK, gate
from mtpconvert.cli.options import EXISTING, TARGET, conversion_options, dialect_option
from mtpconvert.cli.report import run_conversion
from mtpconvert.convert.result import Callbacks, Conversion
from mtpconvert.convert.to_mcore import ToMcore
from mtpconvert.convert.to_mcore import hf2mcore as convert
from mtpconvert.errors import NotRepresentableError
from mtpconvert.mapping.dialect import DialectName
from mtpconvert.stores.torch_dist.writer import McoreVersion, Spec


@click.command()
@click.argument("src", type=EXISTING)
@click.argument("dst", type=TARGET)
@click.option(
    "--format", "format_", type=click.Choice(["torch_dist", "torch"]), default="torch_dist", show_default=True
)
@click.option("--tp", type=click.IntRange(1), default=1, help="Tensor-parallel size to launch with.")
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline-parallel size to launch with.")
@click.option("--vpp", type=click.IntRange(1), default=None, help="Layers per virtual pipeline stage.")
@click.option("--ep", type=click.IntRange(1), default=1, help="Expert-parallel size to launch with.")
@click.option("--etp", type=click.IntRange(1), default=1, help="Expert tensor-parallel size to launch with.")
@click.option("--spec", type=click.Choice(["te", "local"]), default="te", show_default=True, help="Who will load it.")
@click.option("--mcore-version", type=click.Choice(["0.16", "0.19"]), default="0.16", show_default=True)
@click.option("--iteration", default="release", show_default=True, help="A number, or release.")
@click.option("--make-vocab-size-divisible-by", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--mtp-copies",
    type=click.Choice(["require-equal", "use-trunk"]),
    default="require-equal",
    show_default=True,
    help="What to do with an embedding or head of an MTP layer that differs from the trunk's.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep"]),
    default="keep",
    help="FP8 and MXFP4 become bf16; every other byte is moved as it is.",
)
@dialect_option
@conversion_options
def hf2mcore(
    src: Path,
    dst: Path,
    format_: str,
    tp: int,
    pp: int,
    vpp: int | None,
    ep: int,
    etp: int,
    spec: Spec,
    mcore_version: McoreVersion,
    iteration: str,
    make_vocab_size_divisible_by: int,
    mtp_copies: str,
    dtype: str,
    dialect: DialectName,
    mtp: str,
    audit_level: str,
    overwrite: bool,
    mapping: Path | None,
    as_json: bool,
) -> None:
    """Convert the Hugging Face directory SRC into DST, which Megatron-LM's --load reads."""
    if format_ == "torch":
        raise NotRepresentableError(
            "the legacy per-rank format 'torch' cannot be written yet",
            next_step="use --format torch_dist: Megatron reads it at any TP, PP and EP",
        )
    options = ToMcore(
        spec=spec,
        mcore_version=mcore_version,
        iteration=iteration,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        etp=etp,
        mtp=mtp,
        mtp_copies=mtp_copies,
        overwrite=overwrite,
        mapping=mapping,
        dialect=dialect,
    )

    def run(callbacks: Callbacks) -> Conversion:
        return convert(src, dst, options, callbacks)

    requests = [DROP_MTP] * (mtp == "drop") + [USE_TRUNK] * (mtp_copies == "use-trunk")
    run_conversion(run, gate(audit_level, requests), as_json=as_json, say_more=_say_how_to_launch)


def _say_how_to_launch(result: Conversion) -> None:
    if result.dialect == "bridge":
        click.echo("Give it to Megatron-Bridge as pretrained_checkpoint of this model's own provider.")
        return
    if not result.launch_flags:
        return  # a note says why
    click.echo("Launch Megatron with these flags; --use-checkpoint-args does not restore them, and without them")
    click.echo("the model loads wrong and says nothing:")
    click.echo("  " + shlex.join(["--load", str(result.target), *result.launch_flags]))
    if not (result.target / "release").exists():
        click.echo("There is no optimizer here: add --finetune, or --no-load-optim --no-load-rng.")
