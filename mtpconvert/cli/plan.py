"""``mtpconvert plan SRC``."""

from __future__ import annotations

from pathlib import Path

import click

from mtpconvert.cli.options import EXISTING, dialect_option, json_option, mapping_option, mtp_option
from mtpconvert.cli.output import mtp_line, print_json, print_notes
from mtpconvert.convert.sources import detect_source
from mtpconvert.convert.to_hf import ToHf
from mtpconvert.convert.to_hf import open_source as open_mcore
from mtpconvert.convert.to_mcore import ToMcore
from mtpconvert.convert.to_mcore import open_source as open_hf
from mtpconvert.mapping.dialect import DialectName
from mtpconvert.tensors import size_words


@click.command()
@click.argument("src", type=EXISTING)
@click.option("--reference", type=EXISTING, help="For a Megatron SRC without hf_assets: the HF directory it came from.")
@mtp_option
@dialect_option
@mapping_option
@json_option
def plan(
    src: Path, reference: Path | None, mtp: str, dialect: DialectName, mapping: Path | None, as_json: bool
) -> None:
    """Say what would move where. Reads headers only and writes nothing."""
    if detect_source(src).kind == "hf":
        result = open_hf(src, ToMcore(mtp=mtp, mapping=mapping, dialect=dialect)).plan
    else:
        result = open_mcore(src, ToHf(reference=reference, mtp=mtp, mapping=mapping)).plan
    if as_json:
        print_json({**result.document(), "sha256": result.digest()})
        return
    print_notes(result.notes)
    proof = result.proof
    click.echo(f"{result.direction}, {result.architecture}, by {result.mapping_file}")
    click.echo(
        f"{proof.tiles:,} tiles between {len(result.hf):,} HF and {len(result.mcore):,} Megatron tensors,"
        f" {proof.elements:,} elements, {size_words(result.nbytes)}; proven a bijection"
    )
    click.echo(
        f"{len(result.copies)} copies, {len(result.asides)} tensors set aside, {len(result.dropped)} dropped,"
        f" {proof.filled:,} elements of vocabulary padding"
    )
    click.echo(f"sha256 {result.digest()}")
    click.echo(mtp_line(result.mtp))
