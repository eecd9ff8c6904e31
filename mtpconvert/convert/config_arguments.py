"""Megatron arguments and flags from a config.json alone: what ``mtpconvert args`` prints. Reads no weights."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtpconvert.convert.argument_names import Plain
from mtpconvert.convert.argument_rules import Facts, megatron_arguments, moe_layers
from mtpconvert.convert.launch_flags import launch_flags, without_flag
from mtpconvert.convert.stacked import is_stacked
from mtpconvert.errors import MappingError
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.mapping.dialect import DialectName, check_dialect, dialect_notes
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.expand import expand
from mtpconvert.mapping.model import Mapping as MappingFile
from mtpconvert.mapping.mtp import (
    MtpCount,
    declared_mtp,
    default_note,
    mtp_count,
    readers_default,
    refuse_shared,
)
from mtpconvert.mapping.plan import default_notes, vocab_multiple
from mtpconvert.mapping.versions import refuse_version
from mtpconvert.stores.torch_dist.dialects import local_names

_SIZES = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}
_DTYPES = {"bfloat16": "--bf16", "float16": "--fp16", "float32": None}
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class ArgsOptions:
    """Options of ``args`` under the names of its flags."""

    spec: str = "te"
    mcore_version: str = "0.16"
    make_vocab_size_divisible_by: int = 128
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    mapping: Path | None = None
    dialect: DialectName = "stock"


@dataclass
class ConfigArguments:
    """``flags``: (flag, value or None) in the order of Megatron's groups."""

    architecture: str
    arguments: dict[str, Plain]
    flags: list[tuple[str, str | None]]
    mtp: MtpCount
    notes: list[str] = field(default_factory=list)


def arguments_of(config: dict[str, Any], options: ArgsOptions) -> ConfigArguments:
    """The arguments that a conversion of a model with this config would write, and the flags for a launch without it.

    MTP layers are those that the config declares. Raises NotRepresentableError, ConfigError, MappingError.
    """
    mapping = mapping_for(config, options.mapping)
    if not mapping.arguments:
        raise MappingError(
            "the mapping has no [arguments], from which the flags are derived",
            where=str(mapping.file),
            next_step="write them: docs/mapping-format.md, Arguments",
        )
    refuse_version(mapping, config, options.mcore_version)
    check_dialect(mapping, options.dialect, options.spec)
    declared = declared_mtp(config, mapping.mtp)
    absent = mapping.mtp is not None and mapping.mtp.known_absent is not None
    default = readers_default(declared, mapping.mtp)
    layers = 0 if absent else default[0] if default else declared.count or 0
    refuse_shared(layers, mapping.mtp, "config.json")
    scope = mapping.scope(config, {"mtp_layers": layers})
    vocab = scope.integer("vocab_size")
    multiple = vocab_multiple(options.make_vocab_size_divisible_by, options.tp)
    padded = -(-vocab // multiple) * multiple
    facts = Facts(
        vocab_size=vocab,
        padded_vocab_size=padded,
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
        moe_layer_freq=_moe_layer_freq(mapping, scope, padded, options.spec),
        spec=options.spec,
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        etp=options.etp,
    )
    fresh = mapping.scope(config, {"mtp_layers": layers})
    arguments = megatron_arguments(mapping.arguments, fresh, facts)
    dtype, notes = _dtype(config)
    notes += dialect_notes(mapping)
    if note := default_note(declared, mapping.mtp):
        notes.append(note)
    elif declared.count is None and mapping.mtp is not None:
        missing = declared.key or mapping.mtp.no_count
        notes.append(f"config.json gives no MTP count ({missing}): no MTP layers here; tensors may say otherwise")
    if absent and declared.count:
        notes.append(f"config.json declares {declared.count} MTP layers, none is published")
    notes += [*default_notes(fresh, mapping), *without_flag(arguments, options.mcore_version)]
    words = launch_flags(arguments, version=options.mcore_version, complete=True)
    flags = [*_pairs(words), *_sizes(arguments), *([(dtype, None)] if dtype else [])]
    count = mtp_count(mapping.mtp, declared, layers, layers, [])
    return ConfigArguments(mapping.architecture, arguments, flags, count, notes)


def _moe_layer_freq(mapping: MappingFile, scope: Scope, padded: int, spec: str) -> int | list[int] | None:
    """As the checkpoint would be laid out: 1 where all layers are stacked under one key.

    Routers tell which layers have experts, so the experts themselves, nearly all tensors there are, are left out.
    Raises NotRepresentableError for layers of ``spec`` that megatron-core has not.
    """
    without = {group: tuple(row for row in rows if row.experts is None) for group, rows in mapping.rows.items()}
    expansion = expand(replace(mapping, rows=without), scope, padded, None)
    if spec == "local":
        local_names(expansion.mcore)
    experts = moe_layers(expansion.mcore, scope.integer("num_hidden_layers"))
    return 1 if experts is not None and is_stacked(expansion.mcore) else experts


def _dtype(config: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The flag for ``dtype`` (transformers 5) or ``torch_dtype`` (before), at the top or under ``text_config``."""
    text = config.get("text_config")
    levels = [config, *([text] if isinstance(text, Mapping) else [])]
    found = [str(level[key]) for level in levels for key in ("dtype", "torch_dtype") if level.get(key) is not None]
    if not found:
        return None, ["config.json gives no dtype: no --bf16 or --fp16 here"]
    name = found[0].removeprefix("torch.")
    if name not in _DTYPES:
        return None, [f"config.json gives the dtype {name!r}, for which Megatron has no flag"]
    return _DTYPES[name], []


def _sizes(arguments: Mapping[str, Plain]) -> Iterator[tuple[str, str | None]]:
    for argument, flag in _SIZES.items():
        if arguments[argument] != 1:
            yield flag, str(arguments[argument])


def _pairs(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Flags with their values from a list of words."""
    for at, word in enumerate(words):
        if word.startswith("--"):
            value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else None
            yield word, value


def shell(result: ConfigArguments) -> str:
    """A bash array, one flag a line."""
    lines = [flag if value is None else f"{flag} {shlex.quote(value)}" for flag, value in result.flags]
    return "\n".join(["MODEL_ARGS=(", *(f"    {line}" for line in lines), ")"])


def yaml(result: ConfigArguments) -> str:
    """One mapping of flag names without dashes to values; flags without a value are true."""
    return "\n".join(f"{flag.removeprefix('--')}: {_yaml(value)}" for flag, value in result.flags)


def _yaml(value: str | None) -> str:
    """YAML 1.1 takes 1e-06 for text; it wants a point in the number."""
    if value is None:
        return "true"
    match = _NUMBER.fullmatch(value)
    if match is None:
        return json.dumps(value)
    return value.replace("e", ".0e") if match[2] and not match[1] else value
