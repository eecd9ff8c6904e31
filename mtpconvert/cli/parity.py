"""``mtpconvert parity HF [MCORE]``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from mtpconvert.cli.options import EXISTING, json_option
from mtpconvert.cli.output import print_json

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}


@click.command()
@click.argument("hf", type=EXISTING)
@click.argument("mcore", type=EXISTING, required=False)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="float32", show_default=True)
@click.option("--require-mtp", is_flag=True, help="Exit with 10 unless MTP was compared.")
@click.option("--tokens", help="Token ids to run, separated by commas or spaces.")
@click.option("--text", help="Text to run, through the checkpoint's own tokenizer.")
@click.option("--sequences", type=click.IntRange(1), default=2, show_default=True, help="Of random tokens.")
@click.option("--length", type=click.IntRange(3), default=64, show_default=True, help="Of each.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1; auto: cuda where there is one.")
@json_option
def parity(
    hf: Path,
    mcore: Path | None,
    dtype: str,
    require_mtp: bool,
    tokens: str | None,
    text: str | None,
    sequences: int,
    length: int,
    seed: int,
    device: str,
    as_json: bool,
) -> int:
    """Run the real transformers and the real megatron-core on the same tokens and say where they part.

    Without MCORE, HF is converted for the purpose. Megatron's model is built from the checkpoint's own args; its load
    unpickles files, so give it a checkpoint that you trust. Exit code 1: they differ. 10: not run, and why.
    """
    from mtpconvert.evidence.parity import ParityOptions
    from mtpconvert.evidence.parity import parity as compare
    from mtpconvert.evidence.parity_report import document, lines
    from mtpconvert.evidence.transformers_model import choose_device

    if tokens is not None and text is not None:
        raise click.UsageError("--tokens and --text exclude each other")
    options = ParityOptions(
        dtype=_DTYPES[dtype],
        device=choose_device(device),
        sequences=sequences,
        length=length,
        seed=seed,
        tokens=None if tokens is None else _numbers(tokens),
        text=text,
        require_mtp=require_mtp,
    )
    report = compare(hf, mcore, options, _say)
    if as_json:
        print_json(document(report))
    else:
        for line in lines(report):
            click.echo(line)
    return report.exit_code


def _numbers(text: str) -> list[int]:
    words = [word for word in re.split(r"[,\s]+", text) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise click.UsageError("--tokens takes numbers, separated by commas or spaces")
    return [int(word) for word in words]


def _say(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(text, err=True)
