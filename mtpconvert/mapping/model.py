"""A mapping file as values: what ``load`` makes of the TOML, before any config is known."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpconvert.errors import ConfigError
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.kinds import Kinds, of_trunk
from mtpconvert.mapping.layers import Selector


def language_config(config: MappingOf[str, Any], text: str) -> dict[str, Any]:
    """The keys of the language model where the table ``text`` of ``config`` holds them, those of the top behind."""
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**config, **config[text], **outer}


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
    """``count``: config keys in order of preference, none where ``no_count`` says why. ``present``: HF name prefix of
    MTP layer ``{i}``, None where ``known_absent`` says that the family declares MTP and publishes none. ``default``:
    what readers take a missing key for, and which class says so. ``shared``: HF tensors that all MTP layers share."""

    count: tuple[str, ...]
    present: str | None
    known_absent: str | None = None
    no_count: str | None = None
    default: tuple[int, str] | None = None
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unsupported:
    """megatron-core ``version`` cannot hold the model, where the config key ``when`` is set and ``unless`` is not."""

    version: str
    when: str | None
    unless: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """Megatron names are those of another project's modules. ``why``: what stock megatron-core lacks. ``hf``: endings
    of the HF tensors that show it."""

    name: str
    why: str
    hf: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spelling:
    """Other prefixes of HF names. ``prefixes``: (the mapping's own, what stands in its place)."""

    prefixes: tuple[tuple[str, str], ...]
    source: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """``text``: key of the config that holds the language model's. ``passthrough``: prefixes of HF tensors of other
    parts of the model, which are set aside and come back. ``spellings``: how else the HF names may begin."""

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
    dialect: Dialect | None = None
    text: str | None = None
    passthrough: tuple[str, ...] = ()
    spellings: tuple[Spelling, ...] = ()
    kinds: Kinds = field(default_factory=dict)

    def scope(self, config: MappingOf[str, Any], symbols: MappingOf[str, int] | None = None) -> Scope:
        """Where names of the mapping are looked up: the config of the language model, where another one holds it.

        Whether embedding and head are tied is said at the top. Lists with an entry for each layer are cut to the
        trunk's. Raises ConfigError for a config without that part, or with such a list that is too short or strange.
        """
        table = config
        if self.text is not None:
            if not isinstance(config.get(self.text), dict):
                raise ConfigError(f"there is no table {self.text}", where=f"config.json: {self.text}")
            table = language_config(config, self.text)
        return Scope(of_trunk(table, self.kinds, self.config_key), self.defaults, dict(symbols or {}))

    def config_key(self, key: str) -> str:
        """Where config.json holds a key of the language model, dotted."""
        return key if self.text is None else f"{self.text}.{key}"

    def passes_through(self, name: str) -> bool:
        """Whether an HF tensor belongs to another part of the model (vision), which Megatron's GPTModel is not."""
        return name.startswith(self.passthrough) if self.passthrough else False
