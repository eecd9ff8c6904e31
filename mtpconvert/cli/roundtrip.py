"""``mtpconvert roundtrip SRC``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from mtpconvert.cli.options import EXISTING, dialect_option, json_option, mapping_option
from mtpconvert.cli.output import mtp_json, mtp_line, print_json, print_notes, progress
from mtpconvert.convert.roundtrip import roundtrip as carry
from mtpconvert.convert.to_mcore import ToMcore
from mtpconvert.mapping.dialect import DialectName
from mtpconvert.tensors import size_words


@click.command()
@click.argument("src", type=EXISTING)
@dialect_option
@mapping_option
@json_option
def roundtrip(src: Path, dialect: DialectName, mapping: Path | None, as_json: bool) -> None:
    """Carry SRC to Megatron and back in a temporary directory, group by group, and compare every byte.

    Equal bytes show that nothing was lost; they do not show that it stood in the right place in between: audit does.
    """
    with ExitStack() as stack:
        result = carry(
            src, ToMcore(mapping=mapping, dialect=dialect), lambda total: stack.enter_context(progress(total))
        )
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "source": str(src),
                "equal": True,
                "groups": result.groups,
                "tensors": result.tensors,
                "bytes": result.nbytes,
                "notes": result.plan.notes,
                "mtp": mtp_json(result.plan.mtp),
            }
        )
        return
    print_notes(result.plan.notes)
    click.echo(
        f"{result.tensors:,} tensors, {size_words(result.nbytes)}, came back bit for bit, in {result.groups} groups"
    )
    click.echo(mtp_line(result.plan.mtp))
