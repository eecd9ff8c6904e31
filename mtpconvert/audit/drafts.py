"""Kinds of draft parts, told by tensor names, else by the config: MTP layers, their variants, and what drafts besides.

Sources: vLLM 0.33.0 ``model_executor/models/*mtp*.py``, ``eagle.py``, ``medusa.py``; transformers 5.24
``models/gemma4_assistant``, ``models/step3p7``; facebook/multi-token-prediction (``extra_heads``); SafeAILab/EAGLE.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """``key``: for scripts; ``one``/``many``: what a part is called. ``shown_by``: each matches some tensor's name, and
    none of ``without`` does. ``named``: architectures and model types (shell patterns) whose config says as much where
    a telling tensor is lost; ``keys``: config keys that no other kind of model has.

    ``part``: the group ``k`` of a name is the number of its part; None where MTP layers are found by their own rules.
    ``whole``: the checkpoint holds nothing but the draft. ``counts``: dotted config keys that say how many parts there
    are, and ``beside``, how many of that number are no draft parts.
    """

    key: str
    one: str
    many: str
    shown_by: tuple[str, ...] = ()
    part: str | None = None
    whole: bool = False
    counts: tuple[str, ...] = ()
    beside: int = 0
    remark: str = ""
    without: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


_LAYER_COUNT = ("num_hidden_layers", "text_config.num_hidden_layers")
_MEDUSA = ("medusa_num_heads", "num_medusa_heads")
_LAYERS = r"^(?:layers\.(?P<k>\d+)\.|(?:model\.)?midlayer\.)"

# EAGLE-1 and 2: the first layer takes the projection as it is, and the target norms the last state.
_NO_EAGLE = (r"^(?:norm|lm_head)\.", r"\.input_layernorm\.", r"_feedforward_layernorm\.")

MTP = Kind("mtp", "MTP layer", "MTP layers")
# The first whose patterns all match. What drafts without MTP layers comes before what is special about MTP layers.
KINDS = (
    Kind("eagle3", "EAGLE-3 layer", "EAGLE-3 layers", (r"^(?:model\.)?midlayer\.|^d2t$|^t2d$",), _LAYERS, True,
         _LAYER_COUNT,
         named=("*Eagle3", "Eagle3*ForCausalLM", "*Eagle3Model", "Eagle3Speculator", "Peagle*", "eagle3")),
    Kind("eagle", "EAGLE layer", "EAGLE layers", (r"^fc\.weight$", r"^layers\.\d+\."), _LAYERS,
         True, _LAYER_COUNT,
         named=("*Eagle", "Eagle*ForCausalLM", "*EagleModel", "EAGLEModel", "EagleDeepSeek*", "EagleSpec*", "eagle")),
    Kind("eagle", "EAGLE layer", "EAGLE layers", (r"^layers\.\d+\.self_attn\.",), _LAYERS,
         True, _LAYER_COUNT, without=_NO_EAGLE),
    Kind("medusa", "Medusa head", "Medusa heads", (r"^(?:\w*medusa\w*\.)?\d+\.\d+\.(?:linear\.)?(?:weight|bias)$",),
         r"^(?:\w*medusa\w*\.)?(?P<k>\d+)\.\d+\.", counts=_MEDUSA,
         named=("Medusa*", "medusa"), keys=_MEDUSA),
    Kind("parallel-heads", "parallel head", "parallel heads", (r"(?:^|\.)extra_heads\.\d+\.",),
         r"(?:^|\.)extra_(?:heads|proj)\.(?P<k>\d+)\.", counts=("n_future_tokens",), beside=1,
         keys=("n_future_tokens",)),
    Kind("assistant", "assistant layer", "assistant layers",
         (r"(?:^|\.)pre_projection\.weight$", r"(?:^|\.)post_projection\.weight$"), r"^(?:\w+\.)*?layers\.(?P<k>\d+)\.",
         True, _LAYER_COUNT, named=("Gemma4*Assistant*", "gemma4_assistant", "gemma4_unified_assistant")),
    Kind("dspark", "DSpark stage", "DSpark stages", (r"(?:^|\.)mtp_dspark\.|\.markov_head\.",),
         r"(?:^|\.)mtp(?:_dspark)?\.(?:(?:layers\.)?(?P<k>\d+)\.)?"),
    Kind("mtp-own-heads", "MTP layer", "MTP layers", (r"\.shared_head\.output\.weight$",),
         remark="an output head of its own in each"),
    Kind("mtp-own-embedding", "MTP layer", "MTP layers", (r"(?:^|\.)mtp\.embed_tokens\.weight$",),
         remark="an embedding beside the trunk's"),
    Kind("mtp-trunk-norm", "MTP layer", "MTP layers", (r"(?:^|\.)mtp_(?:emb_norm|hidden_norm|linear_proj)\.\d+\.",),
         remark="no final norm of its own"),
    Kind("mtp-two-projections", "MTP layer", "MTP layers",
         (r"(?:^|\.)mtp\.(?:\d+\.(?:e_proj|h_proj)|fc_embedding|fc_hidden)\.",), remark="two projections in one sum"),
)  # fmt: skip
_ANY = re.compile("|".join(pattern.replace("(?P<k>", "(?:") for kind in KINDS for pattern in kind.shown_by))


def kind_of(names: Iterable[str], config: Mapping[str, Any] | None = None) -> Kind:
    """The kind of draft part that a checkpoint has: by its tensors' names, else by its ``config``, else ``MTP``."""
    names = [name for name in names if ".experts." not in name]  # experts show none of them
    if any(_ANY.search(name) for name in names):
        for kind in KINDS:
            if all(_some(pattern, names) for pattern in kind.shown_by) and not any(
                _some(pattern, names) for pattern in kind.without
            ):
                return kind
    return _said_by(config or {})


def _some(pattern: str, names: Iterable[str]) -> bool:
    return any(map(re.compile(pattern).search, names))


def _said_by(config: Mapping[str, Any]) -> Kind:
    """The kind that the architecture, the model type or a key of the outermost level stands for."""
    architectures = config.get("architectures")
    words = [*(architectures if isinstance(architectures, list) else []), config.get("model_type")]
    for kind in KINDS:
        named = any(isinstance(word, str) and fnmatchcase(word, one) for word in words for one in kind.named)
        if named or any(isinstance(config.get(key), int) for key in kind.keys):
            return kind
    return MTP


def parts_of(names: Collection[str], kind: Kind) -> tuple[dict[int, list[str]], dict[int, str]]:
    """Tensors of a kind with numbered ``part``s, by part, and where each part stands.

    What has no number, and of a ``whole`` draft what is in no part (embedding, projection, head), belongs to part 0.
    """
    assert kind.part is not None  # the caller asks for such kinds only
    pattern = re.compile(kind.part)
    found: dict[int, list[str]] = {}
    prefixes: dict[int, str] = {}
    for name in names:
        match = pattern.search(name)
        if match is None and not kind.whole:
            continue
        number = int(match.groupdict()["k"] or 0) if match else 0
        found.setdefault(number, []).append(name)
        if match and (match["k"] is not None or number not in prefixes):
            prefixes[number] = name[: match.end() if match["k"] is None else match.end("k") + 1]
    return dict(sorted(found.items())), prefixes


def counts_of(config: Mapping[str, Any] | None, kind: Kind) -> list[tuple[str, int]]:
    """(config key, parts that it declares) for the keys of ``kind`` that hold a number."""
    found: list[tuple[str, int]] = []
    for path in kind.counts:
        value: Any = config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool):
            found.append((path, value - kind.beside))
    return found


def number_of(count: int, kind: Kind) -> str:
    """ "1 MTP layer", "5 Medusa heads"."""
    return f"{count} {kind.one if count == 1 else kind.many}"
