"""Where megatron-core keeps the feed-forward part: the gated MLP, the router, routed and shared experts.

Keys are relative to a layer, in torch_dist spelling. A gated ``linear_fc1`` holds gate rows, then up rows, of the
whole model: ``mlp.py: apply_swiglu_sharded_factory`` takes the tensor-parallel interleaving out on saving, or, with
``singleton_local_shards``, writes the halves under ``<key>_w`` (gate) and ``<key>_v`` (up).

Norms of the output, which stock megatron-core has no module for, are where Megatron-Bridge's modules have them.
"""

from __future__ import annotations

from mtpconvert.audit.roles.megatron_facts import Facts
from mtpconvert.audit.roles.megatron_layout import Cut, Entry, Layout, Param, cut, full, same, spelled, where
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
        _norm(f, _FUSED_NORM, _NORM),
        Entry(_gate_and_up("mlp.linear_fc1.weight", "mlp.gate", "mlp.up", units, hidden)),
        Entry(((same("mlp.linear_fc2.weight", "mlp.down", hidden, units),),)),
        # Bridge's common/te_layers.py: TERowParallelLinearLayerNorm
        _output_norm(f, "mlp.linear_fc2.post_layernorm.weight"),
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
        _norm(f, _NORM, _FUSED_NORM),
        spelled("router", (experts, hidden), "mlp.router.weight"),
        *where(f.flag("add_bias_linear"), same("mlp.router.bias", "router.bias", experts)),
        *where(correction, same("mlp.router.expert_bias", "router.correction", experts)),
        *_routed(f, experts),
        *_shared(f),
        # Bridge's gemma/modeling_gemma4.py: Gemma4DenseTransformerLayer._forward_mlp, which norms experts' output too
        _output_norm(f, "post_mlp_layernorm.weight"),
    ]


def _norm(f: Facts, *keys: str) -> Entry:
    """Of what the feed-forward part reads. Bridge's post-norm layers have none (exaone/exaone4/exaone4_provider.py)."""
    return spelled("mlp.norm", (f.hidden,), *keys, required=f.seen.mlp_before)


def _output_norm(f: Facts, key: str) -> Entry:
    """Of what the feed-forward part gives, before the residual."""
    return spelled("mlp.output_norm", (f.hidden,), key, required=f.seen.mlp_after)


def _routed(f: Facts, experts: int) -> list[Entry]:
    """Experts on a leading axis of one tensor, or (``singleton_local_shards``) in a tensor each.

    Biases follow the weights (TEGroupedLinear._sharded_state_dict_grouped; MLP.sharded_state_dict of each expert).
    """
    hidden, units = f.hidden, f.maybe("moe_ffn_hidden_size") or f.need("ffn_hidden_size")
    bias = f.flag("add_bias_linear")
    halves = _alternating if f.expert_blocks else _gates_and_ups
    weights = [
        Entry(halves(f, "weight", experts, units, hidden)),
        Entry(_downs("weight", experts, hidden, units)),
    ]
    biases = [
        Entry(halves(f, "bias", experts, units), bias is True),
        Entry(_downs("bias", experts, hidden), bias is True),
    ]
    return weights if bias is False else [*weights, *biases]


def _gates_and_ups(_f: Facts, leaf: str, experts: int, units: int, *columns: int) -> tuple[Layout, ...]:
    """``linear_fc1`` of all experts: gate rows, then up rows of each; or a tensor for each half of each."""
    names = _halves(leaf)
    shape = (experts, units, *columns)
    every, rows = slice(0, experts), [slice(0, extent) for extent in (units, *columns)]
    together = Param(
        f"{_EXPERTS}.linear_fc1.{leaf}",
        ((experts,), (2, units), *((c,) for c in columns)),
        tuple(cut(name, shape, every, slice(half, half + 1), *rows) for half, name in enumerate(names)),
    )
    apart = tuple(
        _single(f"linear_fc1.{leaf}{half}", name, shape, e)
        for e in range(experts)
        for half, name in zip(("_w", "_v"), names, strict=True)
    )
    return (together,), apart


def _alternating(f: Facts, leaf: str, experts: int, units: int, *columns: int) -> tuple[Layout, ...]:
    """``linear_fc1`` of all experts with ``moe_mlp_glu_interleave_size`` (0.19.2): blocks of gate and up in turn.

    A tensor-parallel rank holds [gate block, up block, gate block, ...] of its units
    (TEGroupedMLP._remove_glu_interleaving). Saving takes the first half of its rows for gate and the second for up
    all the same (mlp.py: apply_swiglu_sharded_factory), so what a saved row is depends on the number of ranks.
    With ``singleton_local_shards`` nothing is placed. Raises ConfigError for units that no blocks make up.
    """
    size, ranks = f.expert_blocks, f.expert_ranks
    own = units // ranks
    if units % ranks or own % size:
        raise ConfigError(
            f"{units} units of an expert are no whole blocks of {size} on each of {ranks} tensor-parallel ranks",
            where="Megatron arguments: moe_mlp_glu_interleave_size, expert_tensor_parallel_size",
            next_step="look at the args in common.pt (or common_state) of the checkpoint",
        )
    blocks = own // size
    rest = [slice(0, extent) for extent in (size, *columns)]

    def block(rank: int, at: int) -> Cut:
        half, there = divmod(at, blocks)
        pair, kind = divmod(at, 2)
        start = rank * own + pair * size
        part = ((0, experts), (start, start + size), *full(columns))
        box = (slice(0, experts), *(slice(x, x + 1) for x in (half, rank, there)), *rest)
        return cut(_halves(leaf)[kind], (experts, units, *columns), *box, part=part)

    axes = ((experts,), (2, ranks, blocks, size), *((c,) for c in columns))
    cuts = tuple(block(rank, at) for rank in range(ranks) for at in range(2 * blocks))
    return ((Param(f"{_EXPERTS}.linear_fc1.{leaf}", axes, cuts),),)


def _halves(leaf: str) -> tuple[str, str]:
    suffix = "" if leaf == "weight" else ".bias"
    return f"expert.gate{suffix}", f"expert.up{suffix}"


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
