"""What the numbers of transformers' feed-forward modules mean: gated MLP, experts, router, shared experts.

Sources (transformers 5.24.0): ``forward`` of ``LlamaMLP``, ``MistralMLP``, ``Qwen2MLP``, ``Qwen3MLP``,
``DeepseekV3MLP`` (``down(act(gate(x)) * up(x))``); models/deepseek_v3/modeling_deepseek_v3.py, ``DeepseekV3MoE``,
``DeepseekV3TopkRouter``, ``DeepseekV3Experts.forward`` (``.chunk(2)``: gate, then up); conversion_mapping.py,
"qwen2_moe", which "deepseek_v3" uses: one tensor per expert on disk, stacked and joined in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface_attention import Module, switched_on
from mtpconvert.audit.roles.huggingface_site import Piece, Site


def gated_mlp(*, bias: bool | str) -> Module:
    """``mlp.{gate,up,down}_proj``, with biases on all three or on none."""

    def place(site: Site) -> Iterator[Placement]:
        hidden, units = site.settings.count("hidden_size"), site.settings.count("intermediate_size")
        yield from _gated(site, "mlp.", "mlp", units, hidden)
        if switched_on(site.settings, bias):
            yield site.whole("mlp.gate_proj.bias", "mlp.gate.bias", ((units,),))
            yield site.whole("mlp.up_proj.bias", "mlp.up.bias", ((units,),))
            yield site.whole("mlp.down_proj.bias", "mlp.down.bias", ((hidden,),))

    return place


def experts(site: Site) -> Iterator[Placement]:
    """Router with its correction bias, routed experts, and the shared experts joined into one MLP.

    ``n_shared_experts`` null or 0: none. Experts are taken as stacked only where the stacked tensor is on disk.
    """
    settings = site.settings
    hidden, units = settings.count("hidden_size"), settings.count("moe_intermediate_size")
    count, shared = settings.count("n_routed_experts"), settings.optional("n_shared_experts")

    yield site.whole("mlp.gate.weight", "router", ((count,), (hidden,)))
    yield site.whole("mlp.gate.e_score_correction_bias", "router.correction", ((count,),))
    if site.has("mlp.experts.gate_up_proj"):
        yield from _stacked(site, count, units, hidden)
    else:
        inward, outward = ((units,), (hidden,)), ((hidden,), (units,))
        yield from site.members("mlp.experts.{}.gate_proj.weight", "expert.gate", inward, count)
        yield from site.members("mlp.experts.{}.up_proj.weight", "expert.up", inward, count)
        yield from site.members("mlp.experts.{}.down_proj.weight", "expert.down", outward, count)
    if shared:
        yield from _gated(site, "mlp.shared_experts.", "shared", units * shared, hidden)


def _stacked(site: Site, count: int, units: int, hidden: int) -> Iterator[Placement]:
    """The names in memory, which ``save_pretrained`` keeps for a model that was loaded from them."""
    halves = [Piece("expert.gate", units), Piece("expert.up", units)]
    yield from site.split("mlp.experts.gate_up_proj", ((count,), (2 * units,), (hidden,)), 1, halves)
    yield site.whole("mlp.experts.down_proj", "expert.down", ((count,), (hidden,), (units,)))


def _gated(site: Site, module: str, role: str, units: int, hidden: int) -> Iterator[Placement]:
    yield site.whole(f"{module}gate_proj.weight", f"{role}.gate", ((units,), (hidden,)))
    yield site.whole(f"{module}up_proj.weight", f"{role}.up", ((units,), (hidden,)))
    yield site.whole(f"{module}down_proj.weight", f"{role}.down", ((hidden,), (units,)))
