# ruff: noqa: E501 (the table)
"""Faults in Megatron checkpoints of the dialect of Megatron-Bridge: norms of outputs, joint norms of queries and keys,
values of a size of their own, layers with other key/value heads, sinks in some layers.

Each is planted in the tensors (or arguments) of a clean conversion; layers that share a key are taken apart first.
What each must be called was written down from what it does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtpconvert.audit.api import audit
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from tests.support.bridge_tables import write_bridge_case
from tests.support.fault_model import Models, Outcome, verdict
from tests.support.mcore_edit import Tensors, resaved

CASES = {
    "gemma2": "Gemma 2", "gemma3": "Gemma 3", "glm4": "GLM-4", "olmo2": "OLMo 2",
    "olmo2_heads": "OLMo 2, as many groups as heads", "minimax_m2": "MiniMax-M2", "mimo_v2": "MiMo-V2-Flash",
    "pangu": "openPangu-Ultra-MoE",
}  # fmt: skip
Change = Callable[[Tensors], Any]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class BridgeFault:
    """``tensor``: the name of the finding; ``words``: in its message."""

    name: str
    families: tuple[str, ...]
    change: Change
    tensor: str | None
    code: str = "bytes-differ"
    words: str = ""
    arguments: Arguments | None = None

    @property
    def mtp(self) -> bool:
        return "MTP" in self.name


def exchanged(one: str, two: str) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[two] = tensors[two], tensors[one]

    return change


def lost(end: str, start: str = "") -> Change:
    """Every tensor whose name ends (and starts) so."""

    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if name.endswith(end) and name.startswith(start)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


def put(name: str, value: Callable[[Tensors], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: value(tensors).contiguous()})


def renamed(one: str, two: str) -> Change:
    return lambda tensors: tensors.update({two: tensors.pop(one)})


def nothing(tensors: Tensors) -> None:
    """For faults in the arguments."""


def parts(qkv: torch.Tensor, groups: int) -> tuple[torch.Tensor, ...]:
    """Of MiMo-V2-Flash's tiny model, whose heads are of 12 dims, of values 10: queries, keys, values by group."""
    rows = qkv.unflatten(0, (groups, -1))
    return rows.split((rows.shape[1] - 12 - 10, 12, 10), 1)


def joined(*rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(rows, 1).flatten(0, 1)


def value_first(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = parts(qkv, 4)
    return joined(q, v, k)


def value_of_a_keys_size(qkv: torch.Tensor) -> torch.Tensor:
    """As if a group were its queries, a key and a value of 11 dims each."""
    q, k, v = parts(qkv, 4)
    return joined(q, k[:, :11], v, k[:, 11:])


def in_two_groups(qkv: torch.Tensor) -> torch.Tensor:
    """The rows of a sliding layer, in twice as large groups: queries of two, keys of two, values of two."""
    q, k, v = parts(qkv, 4)
    return joined(*(part.unflatten(0, (2, 2)).flatten(1, 2) for part in (q, k, v)))


def concatenated(qkv: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten(0, 1) for part in parts(qkv, 4)])


D0, D1, D2 = (f"decoder.layers.{n}." for n in range(3))
T0 = "mtp.layers.0.transformer_layer."
AFTER_ATTENTION, AFTER_MLP, AFTER_MOE = (
    "self_attention.linear_proj.post_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight",
    "post_mlp_layernorm.weight",
)
BEFORE_ATTENTION, BEFORE_MLP = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
Q_NORM, K_NORM, QKV = (
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_qkv.weight",
)
SINKS = "self_attention.core_attention.softmax_offset"
SANDWICHED, DENSE, JOINT, MIMO, PANGU = (
    ("gemma3", "glm4"),
    ("gemma2", "olmo2"),
    ("olmo2", "minimax_m2"),
    ("mimo_v2",),
    ("pangu",),
)


def fault(name: str, families: tuple[str, ...], change: Change, tensor: str | None, **more: Any) -> BridgeFault:
    return BridgeFault(name, families, change, tensor, **more)


def recorded(name: str, families: tuple[str, ...], **arguments: Any) -> BridgeFault:
    (argument,) = arguments
    return BridgeFault(name, families, nothing, None, "argument-mismatch", argument, arguments)


BRIDGE_FAULTS = [
    fault("norms of the two outputs exchanged", DENSE, exchanged(D1 + AFTER_ATTENTION, D1 + AFTER_MLP), D1 + AFTER_ATTENTION),
    fault("norms of attention's input and output exchanged", SANDWICHED, exchanged(D1 + BEFORE_ATTENTION, D1 + AFTER_ATTENTION), D1 + AFTER_ATTENTION),
    fault("norms of the MLP's input and output exchanged", SANDWICHED, exchanged(D1 + BEFORE_MLP, D1 + AFTER_MLP), D1 + AFTER_MLP),
    fault("norm of attention's output for that of the MLP's input", SANDWICHED, exchanged(D1 + BEFORE_MLP, D1 + AFTER_ATTENTION), D1 + BEFORE_MLP),
    fault("output norm of another layer", DENSE, put(D1 + AFTER_MLP, lambda t: t[D2 + AFTER_MLP]), D1 + AFTER_MLP, words="trunk layer 2"),
    fault("output norm lost in one layer", DENSE, lost(D1 + AFTER_ATTENTION), D1 + AFTER_ATTENTION, code="tensor-missing"),
    fault("output norms of attention lost in every layer", ("glm4", "olmo2"), lost(AFTER_ATTENTION), "(attn.output_norm of trunk layer 2)", code="tensor-missing"),
    fault("output norms of the MLP lost in every layer", ("glm4", "olmo2"), lost(AFTER_MLP), "(mlp.output_norm of trunk layer 0)", code="tensor-missing"),
    fault("input norm lost in one layer", SANDWICHED, lost(D1 + BEFORE_MLP), D1 + BEFORE_MLP, code="tensor-missing"),
    fault("input norms lost in every layer", ("glm4",), lost(BEFORE_ATTENTION), "(attn.input_norm of trunk layer 1)", code="tensor-missing"),
    fault("an input norm in a layer that norms outputs alone", ("olmo2",), put(D1 + BEFORE_ATTENTION, lambda t: t[D1 + AFTER_ATTENTION]), D1 + BEFORE_ATTENTION, code="tensor-unexpected"),
    fault("output norm at the place of an input norm", ("olmo2",), renamed(D1 + AFTER_ATTENTION, D1 + BEFORE_ATTENTION), D1 + AFTER_ATTENTION, code="tensor-missing"),
    fault("output norm one more", ("gemma2",), put(D1 + AFTER_ATTENTION, lambda t: t[D1 + AFTER_ATTENTION] + 1), D1 + AFTER_ATTENTION),
    recorded("zero-centred norms not recorded", ("gemma2", "gemma3"), apply_layernorm_1p=False),
    recorded("pairs of halves recorded", ("glm4",), rotary_interleaved=False),
    # norms of all queries and all keys
    fault("dims and heads of a joint norm exchanged", JOINT, put(D1 + Q_NORM, lambda t: t[D1 + Q_NORM].unflatten(0, (6, -1)).T.flatten()), D1 + Q_NORM),
    fault("heads of a joint norm reversed", JOINT, put(D1 + K_NORM, lambda t: t[D1 + K_NORM].unflatten(0, (2, -1)).flip(0).flatten()), D1 + K_NORM),
    fault("joint norm of another layer", JOINT, put(D1 + K_NORM, lambda t: t[D0 + K_NORM]), D1 + K_NORM, words="trunk layer 0"),
    fault("joint norm cut to one head in one layer", JOINT, put(D1 + Q_NORM, lambda t: t[D1 + Q_NORM].unflatten(0, (6, -1))[0]), D1 + Q_NORM, code="role-overlap"),
    fault("joint norms cut to one head in every layer", JOINT, lambda t: t.update({n: v.unflatten(0, (6 if "q_layer" in n else 2, -1))[0].clone() for n, v in t.items() if n.endswith((Q_NORM, K_NORM))}), "(attn.q_norm.joint of trunk layer 1)", code="tensor-missing"),
    fault("joint norm lost in one layer", JOINT, lost(D1 + K_NORM), D1 + K_NORM, code="tensor-missing"),
    fault("joint norms of queries and keys exchanged", ("olmo2_heads",), exchanged(D1 + Q_NORM, D1 + K_NORM), D1 + Q_NORM, words="q_norm.joint and attn.k_norm.joint exchanged"),
    # values of another size, key/value heads by layer, sinks in some layers
    fault("value before key", MIMO, put(D1 + QKV, lambda t: value_first(t[D1 + QKV])), D1 + QKV),
    fault("value cut as large as a key", MIMO, put(D1 + QKV, lambda t: value_of_a_keys_size(t[D1 + QKV])), D1 + QKV),
    fault("groups of a sliding layer as large as a full one's", MIMO, put(D1 + QKV, lambda t: in_two_groups(t[D1 + QKV])), D1 + QKV),
    fault("qkv of a sliding layer concatenated", MIMO, put(D1 + QKV, lambda t: concatenated(t[D1 + QKV])), D1 + QKV),
    fault("a full layer's key/value heads in a sliding layer", MIMO, put(D1 + QKV, lambda t: t[D0 + QKV]), D1 + QKV, code="shape-mismatch"),
    fault("half a group in a sliding layer", MIMO, put(D1 + QKV, lambda t: t[D1 + QKV][:-11]), D1 + QKV, code="role-overlap"),
    fault("sinks of another layer", MIMO, put(D1 + SINKS, lambda t: t[D2 + SINKS]), D1 + SINKS, words="trunk layer 2"),
    fault("sinks lost in one layer", MIMO, lost(D1 + SINKS), "(attn.sink of trunk layer 1)", code="tensor-missing"),
    fault("sinks in a layer that has none", MIMO, put(D0 + SINKS, lambda t: t[D1 + SINKS]), D0 + SINKS, code="tensor-unexpected"),
    recorded("values as large as keys recorded", MIMO, v_head_dim=12),
    fault("MTP: value before key", MIMO, put(T0 + QKV, lambda t: value_first(t[T0 + QKV])), T0 + QKV),
    fault("MTP: a full layer's groups", MIMO, put(T0 + QKV, lambda t: in_two_groups(t[T0 + QKV])), T0 + QKV),
    fault("MTP: sinks of a trunk layer", MIMO, put(T0 + SINKS, lambda t: t[D1 + SINKS]), T0 + SINKS, words="trunk layer 1"),
    fault("MTP: sinks lost", MIMO, lost(T0 + SINKS), "(attn.sink of MTP layer 0)", code="mtp-tensor-missing"),
    # experts, latent attention
    fault("norms of attention's and the experts' output exchanged", PANGU, exchanged(D1 + AFTER_ATTENTION, D1 + AFTER_MOE), D1 + AFTER_MOE),
    fault("norms of the experts' input and output exchanged", PANGU, exchanged(D1 + "pre_mlp_layernorm.weight", D1 + AFTER_MOE), D1 + AFTER_MOE),
    fault("norm of the experts' output lost in one layer", PANGU, lost(D1 + AFTER_MOE), D1 + AFTER_MOE, code="tensor-missing"),
    fault("norm of the experts' output under a dense layer's name", PANGU, renamed(D1 + AFTER_MOE, D1 + AFTER_MLP), D1 + AFTER_MOE, code="tensor-missing"),
    fault("norm of a dense output under the experts' name", PANGU, renamed(D0 + AFTER_MLP, D0 + AFTER_MOE), D0 + AFTER_MOE, code="role-unknown"),
    fault("MTP: norms of the two outputs exchanged", PANGU, exchanged(T0 + AFTER_ATTENTION, T0 + AFTER_MOE), T0 + AFTER_MOE),
    fault("MTP: norm of an output and the last norm exchanged", PANGU, exchanged(T0 + AFTER_MOE, "mtp.layers.0.final_layernorm.weight"), T0 + AFTER_MOE),
    fault("MTP: norm of the experts' output lost", PANGU, lost(T0 + AFTER_MOE), T0 + AFTER_MOE, code="mtp-tensor-missing"),
]  # fmt: skip


def plant(models: Models, family: str, fault: BridgeFault) -> Outcome:
    """Both levels of the audit of the source against its changed conversion; headers of the first family."""
    source, clean = _sides(models, family)
    folder = models.folder()
    before: Tensors = {}

    def change(tensors: Tensors) -> None:
        _take_apart(tensors)
        before.update(tensors)
        fault.change(tensors)
        same = tensors.keys() == before.keys() and all(tensors[name] is before[name] for name in tensors)
        assert not same or fault.arguments is not None, "no fault"

    harmed = resaved(clean, folder / "release", change)
    if fault.arguments is not None:
        common = torch.load(harmed / "common.pt", weights_only=False)
        vars(common["args"]).update(fault.arguments)
        torch.save(common, harmed / "common.pt")
    first = family == fault.families[0]
    seen = audit(source, harmed, level="headers").verdict() == "fail" if first else None
    found = verdict(audit(source, harmed), fault)
    shutil.rmtree(folder)
    return Outcome(headers=seen, bits=found)


def _sides(models: Models, family: str) -> tuple[Path, Path]:
    """A tiny source and the iteration of its clean conversion, made once."""
    source, target = models.root / family, models.root / f"{family}-bridge"
    if not source.exists():
        write_bridge_case(CASES[family], source, fill="normal")
        hf2mcore(source, target, ToMcore(dialect="bridge"), Callbacks(gate=None))
    return source, target / "release"


def _take_apart(tensors: Tensors) -> None:
    """Layers under one key, in a key each."""
    for name in [name for name in tensors if name.startswith("decoder.layers.") and not name[15].isdigit()]:
        for layer, tensor in enumerate(tensors.pop(name)):
            tensors[f"decoder.layers.{layer}.{name.removeprefix('decoder.layers.')}"] = tensor.contiguous()
