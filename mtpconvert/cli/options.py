"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mtpconvert.mapping.dialect import DIALECTS

Function = TypeVar("Function", bound=Callable[..., Any])

EXISTING = click.Path(path_type=Path)
TARGET = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
mapping_option = click.option("--mapping", type=EXISTING, help="Mapping file to use instead of the shipped one.")
dialect_option = click.option(
    "--dialect",
    type=click.Choice(DIALECTS),
    default="stock",
    show_default=True,
    help="In whose names to write: bridge for models that only Megatron-Bridge has modules for.",
)
mtp_option = click.option(
    "--mtp",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    help="drop is the only way to lose MTP.",
    show_default=True,
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace the target once the new one is complete.")
audit_option = click.option(
    "--audit",
    "audit_level",
    type=click.Choice(["bits", "headers", "none"]),
    default="bits",
    show_default=True,
    help="Audit the result before it gets its final name.",
)


def conversion_options(function: Function) -> Function:
    """What ``hf2mcore`` and ``mcore2hf`` both take."""
    for option in (json_option, mapping_option, overwrite_option, audit_option, mtp_option):
        function = option(function)
    return function
