"""Names: what the specs and versions of megatron-core call a tensor, and its canonical name.

Canonical is the torch_dist key that a Transformer Engine GPTModel asks for, layer index written out. The rules look at
the siblings of a tensor in its layer, since one key can be canonical in one kind of layer and a dialect in another.
Sources: megatron/core/models/gpt/gpt_layer_specs.py (sharded_state_dict_keys_map of the local spec, for every GQA
layer, MoE ones too; none for MLA), multi_token_prediction.py:sharded_state_dict (``transformer_layer``),
transformer/mlp.py and moe/experts.py (``singleton_local_shards``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mtpconvert.errors import CheckpointError, NotRepresentableError, some

_LAYER = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)(.+)")
_MTP_INNER = re.compile(r"(mtp\.layers\.\d+\.)(transformer_layer|mtp_model_layer)\.(.+)")
_HYBRID = re.compile(r"decoder\.final_norm\.|.*\.mixer\.|mtp\.layers\.\d+\.mtp_model_layer\.layers\.")
_WRAPPERS = ("module.", "model.")
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_SINGLE_EXPERT = re.compile(r"(.+\.experts\.experts)\.(\d+)\.(.+)")
_GATED_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")


class Rule(NamedTuple):
    """In a layer that has all the names ``needs`` and none of ``without``, ``local``... is called ``canonical``..."""

    local: str
    canonical: str
    needs: tuple[str, ...]
    without: tuple[str, ...] = ()


_ROUTER, _MLA, _DENSE = "mlp.router.weight", "self_attention.linear_kv_up_proj.weight", "mlp.linear_fc1.weight"
_QKV, _Q_UP = "self_attention.linear_qkv.weight", "self_attention.linear_q_up_proj.weight"

# MLA keeps its q and kv norms apart in the local spec, and in every layer of a DSA model.
_MLA_NORMS = (
    Rule("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_", needs=(_MLA, _Q_UP)),
    Rule("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_", needs=(_MLA,)),
)
_READING = (
    Rule("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", needs=(_ROUTER,), without=(_DENSE,)),
    Rule("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", needs=(_DENSE,), without=(_ROUTER,)),
    Rule("input_layernorm.", "self_attention.linear_qkv.layer_norm_", needs=(_QKV,)),  # written before the key map
    *_MLA_NORMS,
)
_WRITING = (  # read from right to left
    Rule("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", needs=(_ROUTER, _QKV)),
    Rule("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", needs=(_DENSE, _MLA)),
    *_MLA_NORMS,
)
_INDEXER = ".self_attention.core_attention.indexer."
_TE_ONLY = re.compile(r".*(\.core_attention\.indexer\.|\.self_attention\.in_proj\.|\.self_attention\.A_log$)")


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Per-layer names as stored -> canonical. Raises CheckpointError when two spellings of MTP are mixed."""
    inner = {name: _MTP_INNER.fullmatch(name) for name in names}
    spellings = {match[2] for match in inner.values() if match}
    if len(spellings) > 1:
        raise CheckpointError(
            "MTP layers are stored both as transformer_layer and as mtp_model_layer",
            where=some(sorted(name for name, match in inner.items() if match and match[2] == "mtp_model_layer"), 2),
            next_step="keep the tensors of one megatron-core version only",
        )
    spelled = {name: f"{match[1]}transformer_layer.{match[3]}" if match else name for name, match in inner.items()}
    # Layers of a DSA model that share an indexer have none of their own, so the whole model decides.
    dsa = any(_INDEXER in name for name in spelled)
    renamed = _by_layer(spelled.values(), [rule for rule in _READING if not (dsa and rule in _MLA_NORMS)])
    return {name: renamed[canonical] for name, canonical in spelled.items()}


def local_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical names -> the keys that a GPTModel of the local spec asks a torch_dist checkpoint for.

    Raises NotRepresentableError for modules that have no local spec (DSA, gated delta net).
    """
    names = list(names)
    foreign = [name for name in names if _TE_ONLY.match(name)]
    if foreign:
        raise NotRepresentableError(
            f"megatron-core has no local layer spec for {some(foreign, 2)}",
            where=foreign[0],
            next_step="convert with --spec te",
        )
    return _by_layer(names, [Rule(rule.canonical, rule.local, rule.needs, rule.without) for rule in _WRITING])


def _by_layer(names: Iterable[str], rules: Sequence[Rule]) -> dict[str, str]:
    """Each name with the first fitting rule applied; ``local`` is what a rule replaces."""
    names = list(names)
    layers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if match := _LAYER.fullmatch(name):
            layers[match[1]].add(match[2])
    fitting = {
        layer: [r for r in rules if siblings.issuperset(r.needs) and siblings.isdisjoint(r.without)]
        for layer, siblings in layers.items()
    }
    renamed = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        rule = next((r for r in fitting[match[1]] if match[2].startswith(r.local)), None) if match else None
        renamed[name] = f"{match[1]}{rule.canonical}{match[2].removeprefix(rule.local)}" if match and rule else name
    return renamed


def refuse_hybrid(names: Iterable[str], arguments: Mapping[str, object]) -> None:
    """Raise NotRepresentableError for what a HybridModel or MambaModel saved: its layers are no GPT layers."""
    tensor = next((name for name in names if _HYBRID.match(name)), None)
    patterns = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern", "is_hybrid_model")
    argument = next((key for key in patterns if arguments.get(key)), None)
    if tensor is None and argument is None:
        return
    raise NotRepresentableError(
        "this is a hybrid model's checkpoint, which is not converted",
        where=tensor or f"args.{argument} = {arguments[argument or '']!r}",
        next_step="convert a GPTModel's checkpoint",
    )


def stripped(names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The wrapper prefix ("module.", "model.", "module.module." ...) that all names share, and name -> rest."""
    rest = {name: name for name in names}
    prefix = ""
    while rest and (wrapper := next((w for w in _WRAPPERS if all(r.startswith(w) for r in rest.values())), None)):
        prefix += wrapper
        rest = {name: text.removeprefix(wrapper) for name, text in rest.items()}
    return prefix, rest


def unstacked(name: str) -> str | None:
    """What follows the layer index of a key that stacks all layers; None for any other key."""
    match = _STACKED.fullmatch(name)
    return match[1] if match else None


def singleton(name: str) -> tuple[str, int | None, str | None]:
    """Name of the whole tensor, expert number and half ("w" gate, "v" up) of a ``singleton_local_shards`` key."""
    expert = half = None
    if match := _SINGLE_EXPERT.fullmatch(name):
        name, expert = f"{match[1]}.{match[3]}", int(match[2])
    if match := _GATED_HALF.fullmatch(name):
        name, half = match[1], match[2]
    return name, expert, half
