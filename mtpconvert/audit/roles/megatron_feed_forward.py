"""Where megatron-core keeps the feed-forward part: the gated MLP, the router, routed and shared experts.

Keys are relative to a layer, in torch_dist spelling. A gated ``linear_fc1`` holds gate rows, then up rows, of the
whole model: ``mlp.py: apply_swiglu_sharded_factory`` takes the tensor-parallel interleaving out on saving, or, with
``singleton_local_shards``, writes the halves under ``<key>_w`` (gate) and ``<key>_v`` (up).
"""

from __future__ import annotations

from mtpconvert.audit.roles.megatron_facts import Facts
from mtpconvert.audit.roles.megatron_layout import Entry, Layout, Param, cut, full, same, spelled, where
from mtpconvert.errors import ConfigError
from mtpconvert.tensors import Shape

_EXPERTS = "mlp.experts.experts"
_FUSED_NORM, _NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


def gated_mlp(f: Facts) -> list[Entry]:
    """A dense layer. Source: transformer/mlp.py: MLP.__init__, MLP.forward (``glu``: the first half is activated)."""
    hidden, units = f.hidden, f.need("ffn_hidden_size")
    bias = f.flag("add_bias_linear")
    biases = [
        Entry(_gate_and_up("mlp.linear_fc1.bias", "mlp.gate.bias", "mlp.up.bias", units), bias is True),
        Entry(((same("mlp.linear_fc2.bias", "mlp.down.bias", hidden),),), bias is True),
    ]
    return [
        spelled("mlp.norm", (hidden,), _FUSED_NORM, _NORM),
        Entry(_gate_and_up("mlp.linear_fc1.weight", "mlp.gate", "mlp.up", units, hidden)),
        Entry(((same("mlp.linear_fc2.weight", "mlp.down", hidden, units),),)),
        *([] if bias is False else biases),
    ]


def moe(f: Facts) -> list[Entry]:
    """A mixture-of-experts layer. Raises ConfigError for experts that work in a latent of their own.

    Source: transformer/moe/router.py: Router.__init__, .gating, TopKRouter.__init__ (expert_bias); moe/experts.py:
    SequentialMLP.sharded_state_dict and TEGroupedMLP.sharded_state_dict (experts numbered over the whole model);
    gpt_layer_specs.py (the norm stands apart in the TE spec; get_gpt_layer_local_spec saves it under the dense
    layer's fused name).
    """
    if latent := f.maybe("moe_latent_size"):
        raise ConfigError(
            f"moe_latent_size is {latent}: the experts work in a latent, between two projections that no role means",
            where="Megatron arguments: moe_latent_size",
            next_step="mtpconvert cannot audit latent experts yet; there is nothing to correct in the checkpoint",
        )
    hidden, experts = f.hidden, f.need("num_experts")
    correction = f.flag("moe_router_enable_expert_bias")
    return [
        spelled("mlp.norm", (hidden,), _NORM, _FUSED_NORM),
        spelled("router", (experts, hidden), "mlp.router.weight"),
        *where(f.flag("add_bias_linear"), same("mlp.router.bias", "router.bias", experts)),
        *where(correction, same("mlp.router.expert_bias", "router.correction", experts)),
        *_routed(f, experts),
        *_shared(f),
    ]


def _routed(f: Facts, experts: int) -> list[Entry]:
    """Experts on a leading axis of one tensor, or (``singleton_local_shards``) in a tensor each.

    Biases follow the weights (TEGroupedLinear._sharded_state_dict_grouped; MLP.sharded_state_dict of each expert).
    """
    hidden, units = f.hidden, f.maybe("moe_ffn_hidden_size") or f.need("ffn_hidden_size")
    bias = f.flag("add_bias_linear")
    weights = [
        Entry(_gates_and_ups("weight", experts, units, hidden)),
        Entry(_downs("weight", experts, hidden, units)),
    ]
    biases = [
        Entry(_gates_and_ups("bias", experts, units), bias is True),
        Entry(_downs("bias", experts, hidden), bias is True),
    ]
    return weights if bias is False else [*weights, *biases]


def _gates_and_ups(leaf: str, experts: int, units: int, *columns: int) -> tuple[Layout, Layout]:
    """``linear_fc1`` of all experts: gate rows, then up rows of each; or a tensor for each half of each."""
    suffix = "" if columns else ".bias"
    shape = (experts, units, *columns)
    names = f"expert.gate{suffix}", f"expert.up{suffix}"
    every, rows = slice(0, experts), [slice(0, extent) for extent in (units, *columns)]
    together = Param(
        f"{_EXPERTS}.linear_fc1.{leaf}",
        ((experts,), (2, units), *((c,) for c in columns)),
        tuple(cut(name, shape, every, slice(half, half + 1), *rows) for half, name in enumerate(names)),
    )
    return (together,), tuple(
        _single(f"linear_fc1.{leaf}{half}", name, shape, e) for e in range(experts) for half, name in zip(
            ("_w", "_v"), names, strict=True)
    )  # fmt: skip


def _downs(leaf: str, experts: int, *shape: int) -> tuple[Layout, Layout]:
    """``linear_fc2`` of all experts, or a tensor for each."""
    name = "expert.down" if leaf == "weight" else "expert.down.bias"
    together = same(f"{_EXPERTS}.linear_fc2.{leaf}", name, experts, *shape)
    return (together,), tuple(_single(f"linear_fc2.{leaf}", name, (experts, *shape), e) for e in range(experts))


def _single(leaf: str, name: str, shape: Shape, e: int) -> Param:
    """The tensor of expert ``e`` alone; ``shape`` is the role's."""
    own = shape[1:]
    whole = cut(name, shape, *(slice(0, extent) for extent in own), part=((e, e + 1), *full(own)))
    return Param(f"{_EXPERTS}.{e}.{leaf}", tuple((extent,) for extent in own), (whole,))


def _shared(f: Facts) -> list[Entry]:
    """Shared experts are one MLP, ``moe_shared_expert_intermediate_size`` wide in all; it never has biases.

    Source: moe/shared_experts.py: SharedExpertMLP.__init__, .forward (one sigmoid(gate_weight x) per token).
    """
    hidden, units = f.hidden, f.maybe("moe_shared_expert_intermediate_size")
    if units is None:
        return []
    stem = "mlp.shared_experts"
    mix = Param(f"{stem}.gate_weight", ((1,), (hidden,)), (
        cut("shared.mix", (hidden,), slice(0, 1), slice(0, hidden)),
    ))  # fmt: skip
    return [
        Entry(_gate_and_up(f"{stem}.linear_fc1.weight", "shared.gate", "shared.up", units, hidden)),
        Entry(((same(f"{stem}.linear_fc2.weight", "shared.down", hidden, units),),)),
        *where(f.flag("moe_shared_expert_gate"), mix),
    ]


def _gate_and_up(key: str, gate: str, up: str, units: int, *columns: int) -> tuple[Layout, Layout]:
    """Both in one tensor, gate rows first; or each in its own."""
    rest = [slice(0, extent) for extent in (units, *columns)]
    cuts = tuple(
        cut(name, (units, *columns), slice(half, half + 1), *rest) for half, name in enumerate((gate, up))
    )  # fmt: skip
    fused = Param(key, ((2, units), *((c,) for c in columns)), cuts)
    return (fused,), (same(f"{key}_w", gate, units, *columns), same(f"{key}_v", up, units, *columns))
