"""What the numbers of transformers' feed-forward modules mean: gated MLP, experts, router, shared experts.

Sources (transformers 5.24.0): ``forward`` of ``LlamaMLP``, ``MistralMLP``, ``Qwen2MLP``, ``Qwen3MLP``,
``DeepseekV3MLP`` (``down(act(gate(x)) * up(x))``), ``Phi3MLP`` (``.chunk(2)``: gate, then up); the ``*MoE``,
``*SparseMoeBlock``, ``*TopkRouter`` and ``*Experts`` classes of the families that huggingface_families.py names
(``gate_up_proj`` is ``.chunk(2)``: gate, then up); conversion_mapping.py, "qwen2_moe" and "mixtral": one tensor per
expert on disk, stacked and joined in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.audit.roles.huggingface_attention import Module
from mtpconvert.audit.roles.huggingface_site import Piece, Site


def gated_mlp(*, bias: bool | str = False) -> Module:
    """``mlp.{gate,up,down}_proj``, with biases on all three or on none."""

    def place(site: Site) -> Iterator[Placement]:
        hidden, units = site.settings.count("hidden_size"), site.settings.count("intermediate_size")
        yield from _gated(site, "mlp.", "mlp", units, hidden)
        if site.settings.on(bias):
            yield site.whole("mlp.gate_proj.bias", "mlp.gate.bias", ((units,),))
            yield site.whole("mlp.up_proj.bias", "mlp.up.bias", ((units,),))
            yield site.whole("mlp.down_proj.bias", "mlp.down.bias", ((hidden,),))

    return place


def joined_mlp(site: Site) -> Iterator[Placement]:
    """``mlp.gate_up_proj`` (gate, then up) and ``mlp.down_proj``: ``Phi3MLP.forward``."""
    hidden, units = site.settings.count("hidden_size"), site.settings.count("intermediate_size")
    halves = [Piece("mlp.gate", units), Piece("mlp.up", units)]
    yield from site.split("mlp.gate_up_proj.weight", ((2 * units,), (hidden,)), 0, halves)
    yield site.whole("mlp.down_proj.weight", "mlp.down", ((hidden,), (units,)))


@dataclass(frozen=True)
class ExpertNames:
    """Names below the layer, each in all its spellings: that of published files first, then transformers' own.

    ``modules`` are spellings of the module, the others of what stands below it; {} is the number of an expert.
    """

    modules: tuple[str, ...] = ("mlp.",)
    router: tuple[str, ...] = ("gate.weight",)
    correction: tuple[str, ...] = ()
    gate: str = "experts.{}.gate_proj.weight"
    up: str = "experts.{}.up_proj.weight"
    down: str = "experts.{}.down_proj.weight"
    shared: tuple[str, ...] = ()
    mix: str | None = None


def experts(
    names: ExpertNames,
    *,
    count: str = "num_experts",
    units: str = "moe_intermediate_size",
    shared_count: str | None = None,
    shared_units: str | None = None,
    corrected: bool | str = True,
) -> Module:
    """Router, routed experts, and the shared experts joined into one MLP.

    ``count`` and ``units``: config keys of the number of experts and of the width of each. The shared experts are
    ``shared_count`` times as wide as a routed one (null or 0: none), or ``shared_units`` wide. ``corrected``: whether
    there is the correction that ``names`` may name. Experts are taken as stacked only where the stacked tensor is on
    disk.
    """

    def place(site: Site) -> Iterator[Placement]:
        settings = site.settings
        hidden, width, number = settings.count("hidden_size"), settings.count(units), settings.count(count)

        def spelt(tensors: tuple[str, ...]) -> str:
            return site.either(*(module + tensor for module in names.modules for tensor in tensors))

        yield site.whole(spelt(names.router), "router", ((number,), (hidden,)))
        if names.correction and settings.on(corrected):
            yield site.whole(spelt(names.correction), "router.correction", ((number,),))
        stacked = [module for module in names.modules if site.has(f"{module}experts.gate_up_proj")]
        if stacked:
            yield from _stacked(site, stacked[0], number, width, hidden)
        else:
            for role, tensor in (("gate", names.gate), ("up", names.up), ("down", names.down)):
                axes = ((hidden,), (width,)) if role == "down" else ((width,), (hidden,))
                module = next((m for m in names.modules if site.has(m + tensor.format(0))), names.modules[0])
                yield from site.members(module + tensor, f"expert.{role}", axes, number)

        wide = settings.count(shared_units) if shared_units else 0
        if shared_count:
            wide = width * (settings.optional(shared_count) or 0)
        if wide:
            first = spelt(tuple(f"{module}gate_proj.weight" for module in names.shared))
            yield from _gated(site, first.removesuffix("gate_proj.weight"), "shared", wide, hidden)
            if names.mix is not None:
                mix = Role(site.place, "shared.mix", (hidden,))
                yield site.cut(
                    names.modules[0] + names.mix, ((1,), (hidden,)), ((0, 1), (0, hidden)), mix, ((0, hidden),)
                )

    return place


def transposed_experts(site: Site) -> Iterator[Placement]:
    """gpt_oss/modeling_gpt_oss.py: ``GptOssTopKRouter``, ``GptOssExperts.forward`` and ``._apply_gate``.

    ``x @ gate_up_proj[e]``: columns are outputs, gate at even and up at odd ones; ``gated @ down_proj[e]``.
    """
    settings = site.settings
    hidden, units = settings.count("hidden_size"), settings.count("intermediate_size")
    count = settings.count("num_local_experts")
    yield site.whole("mlp.router.weight", "router", ((count,), (hidden,)))
    yield site.whole("mlp.router.bias", "router.bias", ((count,),))
    for parity, half in enumerate(("expert.gate", "expert.up")):
        side = (parity, parity + 1)
        box, part = ((0, count), (0, hidden), (0, units), side), ((0, count), (0, units), (0, hidden))
        role = Role(site.place, half, (count, units, hidden))
        weights = ((count,), (hidden,), (units, 2))
        yield site.cut("mlp.experts.gate_up_proj", weights, box, role, part, order=(0, 2, 1))
        role = Role(site.place, f"{half}.bias", (count, units))
        biases = ((count,), (units, 2))
        yield site.cut("mlp.experts.gate_up_proj_bias", biases, (*part[:2], side), role, part[:2])
    role = Role(site.place, "expert.down", (count, hidden, units))
    stored, part = ((0, count), (0, units), (0, hidden)), ((0, count), (0, hidden), (0, units))
    yield site.cut("mlp.experts.down_proj", ((count,), (units,), (hidden,)), stored, role, part, order=(0, 2, 1))
    yield site.whole("mlp.experts.down_proj_bias", "expert.down.bias", ((count,), (hidden,)))


def _stacked(site: Site, module: str, count: int, units: int, hidden: int) -> Iterator[Placement]:
    """The names in memory, which ``save_pretrained`` keeps for a model that was loaded from them."""
    halves = [Piece("expert.gate", units), Piece("expert.up", units)]
    yield from site.split(f"{module}experts.gate_up_proj", ((count,), (2 * units,), (hidden,)), 1, halves)
    yield site.whole(f"{module}experts.down_proj", "expert.down", ((count,), (hidden,), (units,)))


def _gated(site: Site, module: str, role: str, units: int, hidden: int) -> Iterator[Placement]:
    yield site.whole(f"{module}gate_proj.weight", f"{role}.gate", ((units,), (hidden,)))
    yield site.whole(f"{module}up_proj.weight", f"{role}.up", ((units,), (hidden,)))
    yield site.whole(f"{module}down_proj.weight", f"{role}.down", ((hidden,), (units,)))
