"""A mapping file as values: what ``load`` makes of the TOML, before any config is known."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconvert.mapping.layers import Selector


@dataclass(frozen=True, slots=True)
class Row:
    """One relation. ``place``: "group, row n" for messages. ``dtype``: contract on both sides, safetensors spelling.

    ``codec``: the computation that stands between the two numbers; None where they are the same bytes.
    """

    op: str
    hf: tuple[str, ...]
    mcore: tuple[str, ...]
    dims: tuple[str, ...]
    place: str
    source: str | None = None
    of: str | None = None
    experts: str | None = None
    when: str | None = None
    unless: str | None = None
    dtype: str | None = None
    reason: str | None = None
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where row groups are instantiated: once, or for each layer of ``each`` under the two prefixes."""

    rows: tuple[str, ...]
    each: str | None
    hf: str
    mcore: str


@dataclass(frozen=True, slots=True)
class MtpRule:
    """``count``: config keys in order of preference. ``present``: HF name prefix of MTP layer ``{i}``."""

    count: tuple[str, ...]
    present: str
    known_absent: str | None = None


@dataclass(frozen=True, slots=True)
class Unsupported:
    """megatron-core ``version`` cannot hold the model, where the config key ``when`` is set and ``unless`` is not."""

    version: str
    when: str | None
    unless: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Mapping:
    file: Path
    architecture: str
    evidence: tuple[str, ...]
    dims: MappingOf[str, str]
    defaults: MappingOf[str, Any]
    default_sources: MappingOf[str, str]
    layers: MappingOf[str, Selector]
    places: tuple[Place, ...]
    rows: MappingOf[str, tuple[Row, ...]]
    variants: MappingOf[str, tuple[str, ...]]
    mtp: MtpRule | None
    arguments: MappingOf[str, Any]
    unsupported: tuple[Unsupported, ...] = ()
