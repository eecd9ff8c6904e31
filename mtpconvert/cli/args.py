"""``mtpconvert args HF``."""

from __future__ import annotations

from pathlib import Path

import click

from mtpconvert.cli.options import EXISTING, dialect_option, mapping_option
from mtpconvert.cli.output import print_notes
from mtpconvert.convert.config_arguments import ArgsOptions, arguments_of, shell, yaml
from mtpconvert.convert.configs import read_config, read_json
from mtpconvert.mapping.dialect import DialectName


@click.command()
@click.argument("hf", type=EXISTING)
@click.option("--format", "format_", type=click.Choice(["shell", "yaml"]), default="shell", show_default=True)
@click.option("--spec", type=click.Choice(["te", "local"]), default="te", show_default=True, help="Who will run it.")
@click.option("--mcore-version", type=click.Choice(["0.16", "0.19"]), default="0.16", show_default=True)
@click.option(
    "--tp", type=click.IntRange(1), default=1, help="Tensor-parallel size; counts for the vocabulary padding."
)
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline-parallel size.")
@click.option("--ep", type=click.IntRange(1), default=1, help="Expert-parallel size.")
@click.option("--etp", type=click.IntRange(1), default=1, help="Expert tensor-parallel size.")
@click.option("--make-vocab-size-divisible-by", type=click.IntRange(1), default=128, show_default=True)
@dialect_option
@mapping_option
def args(
    hf: Path,
    format_: str,
    spec: str,
    mcore_version: str,
    tp: int,
    pp: int,
    ep: int,
    etp: int,
    make_vocab_size_divisible_by: int,
    dialect: DialectName,
    mapping: Path | None,
) -> None:
    """Print the Megatron-LM flags of a model, from its config.json alone (HF: its directory, or the file).

    They describe the model whole, for a launch without --use-checkpoint-args. The run's own (sequence length, batch,
    tokenizer, optimizer) are not among them.
    """
    config = read_json(hf) if hf.is_file() else read_config(hf)
    options = ArgsOptions(spec, mcore_version, make_vocab_size_divisible_by, tp, pp, ep, etp, mapping, dialect)
    result = arguments_of(config, options)
    print_notes(result.notes)
    click.echo(f"# {result.architecture}, for megatron-core {mcore_version} with --spec {spec}; by mtpconvert args")
    click.echo(shell(result) if format_ == "shell" else yaml(result))
    count = "nothing" if result.mtp.declared is None else result.mtp.declared
    none = ", published none" if result.mtp.published_none else ""
    click.echo(f"# MTP layers: declared {count}{none}, to be launched with: {result.mtp.present}")
