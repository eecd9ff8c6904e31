"""MTP counted: what the config declares, what the names say is present, and the refusal when the two disagree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.errors import ConfigError, MtpLostError, NotRepresentableError, some
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.model import MtpRule
from mtpconvert.tensors import TensorSpec

# Every spelling of the count that published configs use (transformers, vLLM and SGLang read these).
COUNT_KEYS = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers",
)  # fmt: skip
# Names outside the trunk's numbered layers under which MTP tensors are published.
_MTP_NAME = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER_NAME = re.compile(r"^(?:model\.(?:language_model\.)?|language_model\.model\.)layers\.(\d+)\.")
MCORE_MTP = "mtp."  # what Megatron's own names of MTP tensors begin with
_MCORE_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Declared:
    """What config.json says: under which key (dotted), and how many; ``count`` None where no key says anything.

    ``missing``: whether no such key is there at all, null included.
    """

    key: str | None
    count: int | None
    missing: bool = False


@dataclass(frozen=True, slots=True)
class MtpCount:
    """MTP three times: layers declared by the config, present in the source, written to the target."""

    key: str | None
    declared: int | None
    present: int
    written: int
    tensors: int  # written, on the target's side
    nbytes: int
    published_none: bool = False  # declared by a family that is known to publish none


def declared_mtp(config: Mapping[str, Any], rule: MtpRule | None) -> Declared:
    """The MTP layer count of a config: the mapping's keys in order of preference; any known key at any level where it
    has none, or there is no mapping.

    Raises ConfigError for a count that is neither a number nor null.
    """
    if rule is not None and rule.count:
        for key in rule.count:
            value = Scope(config).value(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(
                    f"'{key}' is {value!r}, no number of MTP layers",
                    where=f"config.json: {key}",
                    next_step="write a whole number there; with null the tensors decide",
                )
            return Declared(key, value)
        return Declared(rule.count[0], None, not any(_has(config, key) for key in rule.count))
    found = list(_count_keys(config, ""))
    for key, value in found:
        if value:
            return Declared(key, value)
    return Declared(found[0][0], 0) if found else Declared(None, None)


def _has(config: Mapping[str, Any], key: str) -> bool:
    """Whether the dotted key is there, null included."""
    *tables, last = key.split(".")
    found: Any = config
    for table in tables:
        found = found.get(table) if isinstance(found, Mapping) else None
    return isinstance(found, Mapping) and last in found


def readers_default(declared: Declared, rule: MtpRule | None) -> tuple[int, str] | None:
    """The count that readers of the family take for granted where its key is missing, and the class that says so."""
    return rule.default if rule is not None and declared.missing else None


def default_note(declared: Declared, rule: MtpRule | None) -> str | None:
    """A line for a count that readers take for granted."""
    default = readers_default(declared, rule)
    return default and f"config.json has no {declared.key}: readers take it for {default[0]} ({default[1]})"


def refuse_shared(count: int, rule: MtpRule | None, where: str) -> None:
    """Raise NotRepresentableError for MTP layers that have tensors in common, as no two of Megatron's have."""
    if rule is not None and rule.shared and count > 1:
        raise NotRepresentableError(
            f"{count} MTP layers share one projection and its norms in this layout ({some(list(rule.shared), 5)}); each"
            " MTP layer of Megatron has its own, so there is no place for what they share",
            where=where,
            next_step="--mtp drop leaves MTP out on purpose",
        )


def _count_keys(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, int]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _count_keys(value, f"{prefix}{key}.")
        elif key in COUNT_KEYS and isinstance(value, int) and not isinstance(value, bool):
            yield prefix + key, value


def present_in_hf(names: Iterable[str], rule: MtpRule | None, scope: Scope) -> dict[int, list[str]]:
    """HF tensors of each MTP layer that is there in any part. Where a mapping has no place for MTP, layer -1 holds all
    that look so, in any published layout."""
    layers: dict[int, list[str]] = {}
    trunk = scope.value("num_hidden_layers")
    if rule is None or rule.present is None:
        for name in names:
            if looks_like_mtp(name, trunk if isinstance(trunk, int) else None):
                layers.setdefault(-1, []).append(name)
        return layers
    pattern, offset = _prefix_pattern(rule.present, scope)
    for name in names:
        if (match := pattern.match(name)) and int(match[1]) >= offset:
            layers.setdefault(int(match[1]) - offset, []).append(name)
    return layers


def _prefix_pattern(present: str, scope: Scope) -> tuple[re.Pattern[str], int]:
    """``model.layers.{num_hidden_layers+i}.`` -> a pattern with the number as its group, and the number of layer 0."""
    before, _, rest = present.partition("{")
    inside, _, after = rest.partition("}")
    offset = scope.integer(inside.removesuffix("+i")) if inside != "i" else 0
    return re.compile(re.escape(before) + r"(\d+)" + re.escape(after)), offset


def present_in_mcore(names: Iterable[str]) -> dict[int, list[str]]:
    """Megatron tensors of each MTP layer, by layer."""
    layers: dict[int, list[str]] = {}
    for name in names:
        if match := _MCORE_LAYER.match(name):
            layers.setdefault(int(match[1]), []).append(name)
    return layers


def homeless_in_mcore(found: Mapping[int, list[str]], rule: MtpRule | None) -> dict[int, list[str]]:
    """``found`` as it is, or, where a mapping has no place for MTP, all of it as layer -1."""
    if found and (rule is None or rule.present is None):
        return {-1: [name for names in found.values() for name in names]}
    return dict(found)


def looks_like_mtp(name: str, trunk_layers: int | None) -> bool:
    """Whether an HF name is that of an MTP tensor in any published layout."""
    if _MTP_NAME.search(name):
        return True
    layer = _LAYER_NAME.match(name)
    return layer is not None and trunk_layers is not None and int(layer[1]) >= trunk_layers


def agree(
    declared: Declared,
    present: Mapping[int, list[str]],
    rule: MtpRule | None,
    expected: Callable[[int], list[str]],
    where: str,
) -> tuple[int, str | None]:
    """The number of MTP layers to convert, and a note. ``expected``: the tensors that an MTP layer should have.

    Raises MtpLostError where config and tensors disagree, naming what is missing or surplus, NotRepresentableError for
    layers that share tensors.
    """
    if -1 in present or (rule is None and declared.count):
        names = present.get(-1, [])
        raise MtpLostError(
            f"this mapping has no place for MTP; config declares {declared.count or 0} MTP layers"
            f" (key {declared.key}) and {len(names)} MTP tensors are present: {some(names)}",
            where=where,
            next_step="a mapping with an [mtp] table is needed; --mtp drop leaves MTP out on purpose",
        )
    layers = len(present)
    if declared.count in (None, layers):
        refuse_shared(layers, rule, where)
    if sorted(present) != list(range(layers)):
        raise MtpLostError(
            f"MTP layers {sorted(present)} are present, which do not count from 0",
            where=where,
            next_step="the tensors of the layers between are missing from the checkpoint; find them",
        )
    if rule is None:
        return 0, None
    if declared.key is None:
        return layers, f"no config key counts the MTP layers ({rule.no_count}); the tensors decide: {layers} MTP layers"
    if declared.count is None:
        if layers == 0 and (default := readers_default(declared, rule)):
            raise MtpLostError(
                f"config.json has no {declared.key}, which readers take for {default[0]} ({default[1]}), and no MTP"
                " tensor is present",
                where=where,
                next_step=f'write "{declared.key}": 0 in config.json if the model has no MTP; else take the MTP'
                " tensors from the original checkpoint",
            )
        note = f"config gives no MTP count ({declared.key} is missing or null); the tensors decide: {layers} MTP layers"
        return layers, note
    if published_none(declared, layers, rule):
        return 0, f"config declares {declared.count} MTP layers, none is published: {rule.known_absent}"
    if declared.count != layers:
        raise MtpLostError(
            _disagreement(declared, present, expected), where=where, next_step=_remedy(declared.count > layers)
        )
    return layers, None


def published_none(declared: Declared, present: int, rule: MtpRule | None) -> bool:
    """Whether this is a family that declares MTP and publishes none, as this checkpoint does."""
    return rule is not None and rule.known_absent is not None and bool(declared.count) and present == 0


def mtp_count(
    rule: MtpRule | None, declared: Declared, present: int, written: int, specs: list[TensorSpec]
) -> MtpCount:
    """``specs``: the MTP tensors that ``written`` counts the layers of."""
    absent = published_none(declared, present, rule)
    nbytes = sum(spec.nbytes for spec in specs)
    return MtpCount(declared.key, declared.count, present, written, len(specs), nbytes, absent)


def _disagreement(declared: Declared, present: Mapping[int, list[str]], expected: Callable[[int], list[str]]) -> str:
    assert declared.count is not None
    layers = len(present)
    text = f"config declares {declared.count} MTP layers ({declared.key}), tensors of {layers} are present"
    if declared.count > layers:
        last = declared.count - 1
        which = f"layer {layers}" if last == layers else f"layers {layers} to {last}"
        names = some(expected(layers), 20)
        return f"{text}; every tensor of MTP {which} is missing, those of layer {layers} being {names}"
    surplus = [name for i in range(declared.count, layers) for name in present[i]]
    return f"{text}; surplus: {some(surplus, 20)}"


def _remedy(missing: bool) -> str:
    if missing:
        return (
            "some step before lost the MTP tensors (transformers' save_pretrained does): take them from the original"
            " checkpoint; or, to release without MTP, set the count to 0 in config.json"
        )
    return "correct the count in config.json, or leave the tensors out on purpose with --mtp drop"
