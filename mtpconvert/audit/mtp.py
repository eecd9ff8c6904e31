"""Which tensors belong to MTP layers, by name, for every published layout; and what the config says about their number.

Layouts (HF): ``model.layers.{N+i}.`` with N trunk layers (DeepSeek, GLM, Step, HY-V3, Ling), ``mtp.layers.{i}.`` beside
``mtp.fc`` (Qwen, EXAONE, Mellum), ``mtp.{i}.`` (DeepSeek-V4), ``model.mtp_layers.{i}.`` (MiMo, HY-V4),
``model.mtp.layers.{i}.`` (MiMo-V2, LongCat, Inkling, MiniMax-M3), ``model.mtp_block.{i}.``
(ERNIE). Megatron: ``mtp.layers.{i}.``. What drafts without being MTP (heads, EAGLE, assistants): ``drafts``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from mtpconvert.audit.drafts import MTP, Kind, counts_of, kind_of, parts_of
from mtpconvert.audit.readers.names import Stems, stems_of
from mtpconvert.audit.readers.side import Side

COUNT_KEYS = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers",
    "n_mtp_layers",
)  # fmt: skip
LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
# Model types that ship MTP layers without any count key (the loaders take constants).
UNDECLARED_IS_USUAL = frozenset({"qwen3_next", "mimo_v2_flash", "mimo_v2", "mimo_v2_pro"})
# Model types that declare MTP layers and are published without: MiniMaxAI/MiniMax-M2, ``num_mtp_modules`` 3.
PUBLISHED_WITHOUT = frozenset({"minimax_m2"})

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS = re.compile(
    r"^(?P<root>(?:(?:model|language_model|llm|backbone|transformer|text_model|module)\.)*layers\.|blk\.)(?P<n>\d+)\.",
    re.A,
)
_NUMBERED = re.compile(
    r"^(?P<prefix>(?:\w+\.)*?(?:mtp\.layers|mtp_layers|mtp_block|mtp_emb_norm|mtp_hidden_norm|mtp_linear_proj|mtp))\.(?P<k>\d+)\.",
    re.A,
)
_SHARED = re.compile(r"^(?P<prefix>(?:\w+\.)*?mtp)(?:\.|_)", re.A)
_MARKS = (".enorm.weight", ".eh_proj.weight", ".hnorm.weight")


@dataclass(frozen=True, slots=True)
class Count:
    """One count key of a config: where it stands, what it says, and that as a count (None: not a whole number >= 0)."""

    path: str
    key: str
    value: int | None
    said: Any


def count_keys(config: dict[str, Any] | None, path: str = "") -> Iterator[Count]:
    """Every count key at every nesting level, outermost first."""
    for key, value in (config or {}).items():
        if key in COUNT_KEYS:
            number = value if type(value) is int and value >= 0 else None
            yield Count(path + key, key, number, value)
    for key, value in (config or {}).items():
        if isinstance(value, dict) and key != "quantization_config":
            yield from count_keys(value, f"{path}{key}.")


def trunk_layers(config: dict[str, Any] | None) -> int | None:
    """The number of trunk layers, from the language model's own config where it is nested."""
    levels = [config or {}]
    levels = [config[name] for name in _TEXT if isinstance((config or {}).get(name), dict) and config] + levels
    for level in levels:
        for key in LAYER_KEYS:
            if isinstance(level.get(key), int):
                return int(level[key])
    return None


def side_kind(side: Side) -> Kind:
    """The kind of draft part that a side has, by its tensors' names and its config, else as the other side shows it."""
    own = kind_of(side.names.templates, side.config) if side.is_huggingface else MTP
    return own if own.part is not None or side.told_kind is None else side.told_kind


def tell_kinds(one: Side, two: Side) -> None:
    """Let each of two Hugging Face sides know the other's kind of draft part, where four names of five are common.

    A telling tensor may be the one that is lost; parts that no MTP layer has are then counted all the same.
    """
    if not (one.is_huggingface and two.is_huggingface):
        return
    here, there = side_kind(one), side_kind(two)
    if (here.part is None) == (there.part is None):
        return
    more = max(len(one.inventory), len(two.inventory))
    if 5 * len(one.inventory.keys() & two.inventory.keys()) >= 4 * more:
        one.told_kind, two.told_kind = there, here


def declared(side: Side) -> int | None:
    """MTP layers (draft parts of another kind) that config or arguments declare; None where no key says a number."""
    return declared_by(side.config if side.is_huggingface else side.arguments, side_kind(side))


def owed(side: Side, there: bool) -> int:
    """MTP layers that must be there; ``there``: whether any tensor of MTP is."""
    return 0 if not there and published_without(side) else declared(side) or 0


def published_without(side: Side) -> bool:
    """Whether the family declares MTP layers that nobody has seen."""
    return side.is_huggingface and str((side.config or {}).get("model_type", "")) in PUBLISHED_WITHOUT


def declared_by(source: dict[str, Any] | None, kind: Kind) -> int | None:
    """The same for a config, or Megatron's arguments, alone."""
    if kind.counts:
        return max((count for _, count in counts_of(source, kind)), default=None)
    values = [count.value for count in count_keys(source) if count.value is not None]
    if not values:
        return None
    repeated = any((source or {}).get(key) for key in ("mtp_use_repeated_layer", "mtp_share_layers"))
    return min(max(values), 1) if repeated else max(values)


@dataclass(slots=True)
class MtpLayers:
    """Names of MTP tensors by layer (what all share, ``mtp.fc``, counts to layer 0), and the prefix of each layer.

    Where ``kind`` is no MTP they are those of its parts: heads, or layers of a draft model.
    """

    names: dict[int, list[str]]
    prefix: dict[int, str]
    kind: Kind = MTP

    @property
    def layers(self) -> int:
        return len(self.names)

    def all_names(self) -> set[str]:
        return {name for names in self.names.values() for name in names}


def mtp_layers(side: Side) -> MtpLayers:
    """Sort the MTP tensors of a side by layer."""
    if side.is_huggingface:
        return layers_of(side.inventory, side.config or {}, side_kind(side), side.names.stems)
    if side.kind == "gguf":
        return layers_of(side.inventory, side.arguments or {}, MTP, side.names.stems)
    return layers_of(side.inventory, None, MTP, side.names.stems)


def layers_of(
    names: Collection[str], config: dict[str, Any] | None, kind: Kind, stems: Stems | None = None
) -> MtpLayers:
    """Sort the draft tensors among ``names`` by layer, or by part; ``config`` None: the names are Megatron's.

    ``stems``: of the names, where they are known. A layer's number stands in the stem.
    """
    if kind.part is not None:
        return MtpLayers(*parts_of(names, kind), kind)
    prefixes = dict[int, str]()
    found: dict[int, list[str]] = {}
    trunk = trunk_layers(config)
    marked = _marked_layers(names) if config is not None and trunk is None else set()
    pattern = (config or {}).get("mtp_hybrid_override_pattern")
    flat = len(pattern) if isinstance(pattern, str) and pattern else 1
    for members in (stems_of(names) if stems is None else stems).values():
        layer, prefix = _layer_of(members[0], trunk, marked)
        if layer is None:
            continue
        layer //= flat if prefix.endswith("mtp.layers.") or flat == 1 else 1
        found.setdefault(layer, []).extend(members)
        if prefix and (layer not in prefixes or (len(prefix) < len(prefixes[layer]) and prefix in prefixes[layer])):
            prefixes[layer] = prefix if flat > 1 else _numbered(prefix, members[0])
    return MtpLayers(dict(sorted(found.items())), prefixes, kind)


def _numbered(prefix: str, name: str) -> str:
    """The prefix with the layer's number as it stands in the name: ``model.layers.61.``."""
    rest = name[len(prefix) :].split(".", 1)
    return f"{prefix}{rest[0]}." if rest[0].isdigit() else prefix


def _layer_of(name: str, trunk: int | None, marked: set[int]) -> tuple[int | None, str]:
    """(MTP layer, prefix up to its number), (None, "") for the trunk."""
    if match := _LAYERS.match(name):
        number = int(match["n"])
        if trunk is not None and number >= trunk:
            return number - trunk, match["root"]
        if trunk is None and number in marked:
            return sorted(marked).index(number), match["root"]
        return None, ""
    if "mtp" not in name:
        return None, ""
    if match := _NUMBERED.match(name):
        return int(match["k"]), match["prefix"] + "."
    if match := _SHARED.match(name):
        return 0, match["prefix"] + "."
    return None, ""


def _marked_layers(names: Collection[str]) -> set[int]:
    """Layers that hold a joining projection or its norms: MTP layers, whatever the config says."""
    return {int(match["n"]) for name in names if name.endswith(_MARKS) and (match := _LAYERS.match(name)) is not None}


def expected_prefix(side: Side, other: MtpLayers | None = None) -> str:
    """Where MTP layer 0 would stand on this side."""
    if side.kind == "gguf":
        return f"blk.{trunk_layers(side.arguments)}."
    if not side.is_huggingface:
        return "mtp.layers.0."
    if other is not None and 0 in other.prefix:
        return other.prefix[0]
    root = next((match["root"] for name in side.inventory if (match := _LAYERS.match(name))), "model.layers.")
    trunk = trunk_layers(side.config)
    model_type = str((side.config or {}).get("model_type", ""))
    keys = {count.key for count in count_keys(side.config)}
    if "mtp_num_hidden_layers" in keys or model_type.startswith(("qwen3_next", "qwen3_5")):
        return "mtp."
    return f"{root}{trunk}." if trunk is not None else "mtp."
