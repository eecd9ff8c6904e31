"""Where megatron-core keeps the feed-forward part: the gated MLP, the router, routed and shared experts.

Keys are relative to a layer, in torch_dist spelling. A gated ``linear_fc1`` holds gate rows, then up rows, of the
whole model: ``mlp.py: apply_swiglu_sharded_factory`` takes the tensor-parallel interleaving out on saving, or, with
``singleton_local_shards``, writes the halves under ``<key>_w`` (gate) and ``<key>_v`` (up).
"""

from __future__ import annotations

from mtpconvert.audit.roles.megatron_facts import Facts
from mtpconvert.audit.roles.megatron_layout import Entry, Layout, Param, cut, full, same, spelled

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
    """A mixture-of-experts layer.

    Source: transformer/moe/router.py: Router.__init__, TopKRouter.__init__ (expert_bias); moe/experts.py:
    SequentialMLP.sharded_state_dict and TEGroupedMLP.sharded_state_dict (experts numbered over the whole model);
    moe/shared_experts.py: SharedExpertMLP.__init__; gpt_layer_specs.py (the norm stands apart in the TE spec;
    get_gpt_layer_local_spec saves it under the dense layer's fused name).
    """
    hidden, experts = f.hidden, f.need("num_experts")
    correction = f.flag("moe_router_enable_expert_bias")
    return [
        spelled("mlp.norm", (hidden,), _NORM, _FUSED_NORM),
        spelled("router", (experts, hidden), "mlp.router.weight"),
        *([] if correction is False else
          [spelled("router.correction", (experts,), "mlp.router.expert_bias", required=correction is True)]),
        *_routed(f, experts),
        *_shared(f),
    ]  # fmt: skip


def _routed(f: Facts, experts: int) -> list[Entry]:
    """Experts on a leading axis of one tensor, or (``singleton_local_shards``) in a tensor each."""
    hidden, units = f.hidden, f.maybe("moe_ffn_hidden_size") or f.need("ffn_hidden_size")
    stem = "mlp.experts.experts"
    every, columns, rows = slice(0, experts), slice(0, hidden), slice(0, units)
    together = Param(f"{stem}.linear_fc1.weight", ((experts,), (2, units), (hidden,)), (
        cut("expert.gate", (experts, units, hidden), every, slice(0, 1), rows, columns),
        cut("expert.up", (experts, units, hidden), every, slice(1, 2), rows, columns),
    ))  # fmt: skip

    def single(e: int, leaf: str, name: str, *shape: int) -> Param:
        part = ((e, e + 1), *full(shape))
        role_shape = (experts, *shape)
        key = f"{stem}.{e}.{leaf}"
        return Param(
            key, tuple((x,) for x in shape), (cut(name, role_shape, *(slice(0, x) for x in shape), part=part),)
        )

    gates_and_ups: Layout = tuple(
        single(e, leaf, name, units, hidden)
        for e in range(experts)
        for leaf, name in (("linear_fc1.weight_w", "expert.gate"), ("linear_fc1.weight_v", "expert.up"))
    )
    downs: Layout = tuple(single(e, "linear_fc2.weight", "expert.down", hidden, units) for e in range(experts))
    stacked_down = same(f"{stem}.linear_fc2.weight", "expert.down", experts, hidden, units)
    return [Entry(((together,), gates_and_ups)), Entry(((stacked_down,), downs))]


def _shared(f: Facts) -> list[Entry]:
    """Shared experts are one MLP, ``moe_shared_expert_intermediate_size`` wide in all."""
    hidden, units = f.hidden, f.maybe("moe_shared_expert_intermediate_size")
    if units is None:
        return []
    stem = "mlp.shared_experts"
    return [
        Entry(_gate_and_up(f"{stem}.linear_fc1.weight", "shared.gate", "shared.up", units, hidden)),
        Entry(((same(f"{stem}.linear_fc2.weight", "shared.down", hidden, units),),)),
    ]


def _gate_and_up(key: str, gate: str, up: str, units: int, *columns: int) -> tuple[Layout, Layout]:
    """Both in one tensor, gate rows first; or each in its own."""
    rest = [slice(0, extent) for extent in (units, *columns)]
    cuts = tuple(
        cut(name, (units, *columns), slice(half, half + 1), *rest) for half, name in enumerate((gate, up))
    )  # fmt: skip
    fused = Param(key, ((2, units), *((c,) for c in columns)), cuts)
    return (fused,), (same(f"{key}_w", gate, units, *columns), same(f"{key}_v", up, units, *columns))
