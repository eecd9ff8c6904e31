"""``mtpconvert mappings list | show ARCH | check [FILE] | new HF``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mtpconvert.cli.options import EXISTING
from mtpconvert.cli.output import mtp_line, refuse_missing_folder, write_file
from mtpconvert.convert.arguments import check_rules
from mtpconvert.convert.configs import read_json
from mtpconvert.errors import ConfigError, MappingError, UsageError
from mtpconvert.mapping import catalogue
from mtpconvert.mapping.expand import expand, proven
from mtpconvert.mapping.model import Mapping
from mtpconvert.mapping.mtp import declared_mtp

MEGATRON_VOCAB_MULTIPLE = 128  # megatron/training/arguments.py: default of --make-vocab-size-divisible-by


@click.group()
def mappings() -> None:
    """List, show, check and draft the mapping files."""


@mappings.command("list")
def list_() -> None:
    """Architectures that can be converted."""
    for architecture in catalogue.architectures():
        mapping = catalogue.load(catalogue.file_of(architecture))
        mtp = "MTP" if mapping.mtp else "no MTP"
        click.echo(f"{architecture:28} {mtp}")


@mappings.command()
@click.argument("architecture")
def show(architecture: str) -> None:
    """Print the mapping file of ARCHITECTURE."""
    click.echo(catalogue.file_of(architecture).read_text(encoding="utf-8"), nl=False)


@mappings.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--config",
    "configs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A config.json to expand, instead of the samples that come with the tool; may be repeated.",
)
def check(file: Path | None, configs: tuple[Path, ...]) -> None:
    """Expand and prove every shipped mapping, or FILE, on a tiny and on a published full-size config.

    With --config, on those configs: by FILE, or by the shipped mapping of each config's architecture.
    """
    if configs:
        for path in configs:
            config = read_json(path)
            try:
                click.echo(_totals(catalogue.mapping_for(config, file), str(path), config))
            except ConfigError as error:
                error.where = str(path) if error.where is None else f"{path}, {error.where}"
                raise
        return
    for path in [file] if file else [catalogue.file_of(name) for name in catalogue.architectures()]:
        mapping = catalogue.load(path)
        for label, config in catalogue.sample_configs(mapping.architecture).items():
            try:
                click.echo(_totals(mapping, label, config))
            except ConfigError as error:  # the sample configs are right, so the mapping is not
                raise MappingError(error.what, where=error.where, next_step="correct the mapping file") from error


@mappings.command()
@click.argument("hf", type=EXISTING)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write it there, not to stdout.")
def new(hf: Path, output: Path | None) -> None:
    """Draft a mapping for the model in HF, from its headers: rows of all known mappings that fit its tensors."""
    from mtpconvert.convert.sketching import draft_of

    if output is not None:
        refuse_missing_folder(output)
        if output.exists():
            raise UsageError(f"{output} is there already", next_step="give another name, or remove it")
    draft = draft_of(hf)
    counts = draft.counts
    aside = f", {counts.aside:,} set aside" if counts.aside else ""
    placed = f"{counts.placed:,} of {counts.tensors:,} tensors placed{aside}, {counts.patterns} name patterns not"
    line = mtp_line(draft.mtp, writes=False)
    if output is None:
        click.echo(f"{placed}; {draft.verdict}", err=True)
        click.echo(f"{draft.text}# {line}")
    else:
        write_file(output, draft.text)
        click.echo(f"{output}: {placed}; {draft.verdict}")
        click.echo(line)


def _totals(mapping: Mapping, label: str, config: dict[str, Any]) -> str:
    """One line of what the mapping makes of ``config``. Raises MappingError, NotABijectionError, ConfigError."""
    try:
        check_rules(mapping.arguments)
    except MappingError as error:
        error.where = str(mapping.file)
        raise
    scope = mapping.scope(config)
    scope.symbols["mtp_layers"] = declared_mtp(config, mapping.mtp).count or 0
    vocab = scope.integer("vocab_size")
    padded = -(-vocab // MEGATRON_VOCAB_MULTIPLE) * MEGATRON_VOCAB_MULTIPLE
    expansion = expand(mapping, scope, padded, None)
    proof = proven(mapping, expansion)
    aliases = len(expansion.aliases)
    return (
        f"{mapping.architecture} {label}: {proof.tiles:,} tiles and {aliases} copies;"
        f" {proof.hf_tensors + aliases:,} HF and {proof.mcore_tensors:,} Megatron tensors;"
        f" {proof.elements:,} elements a side without the copies; a bijection"
    )
