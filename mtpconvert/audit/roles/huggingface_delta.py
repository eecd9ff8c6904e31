"""What the numbers of transformers' gated delta net mean: the linear attention of Qwen3-Next and Qwen3.5.

Sources (transformers 5.24.0, models/): qwen3_next/modeling_qwen3_next.py, ``Qwen3NextGatedDeltaNet.__init__``,
``.fix_query_key_value_ordering`` and ``.forward``, ``Qwen3NextRMSNormGated`` (a plain scale beside zero-centred norms),
``torch_chunk_gated_delta_rule`` (key heads repeated by ``repeat_interleave``); qwen3_5_moe/modeling_qwen3_5_moe.py,
``Qwen3_5MoeGatedDeltaNet``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.audit.roles.huggingface_site import Settings, Site
from mtpconvert.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Heads of keys (queries too) and of values, and the dims of one of each."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def read(cls, settings: Settings) -> _Sizes:
        keys, values = settings.count("linear_num_key_heads"), settings.count("linear_num_value_heads")
        if not keys or values % keys:
            raise ConfigError(
                f"{values} value heads cannot share {keys} key heads evenly",
                where="config.json: linear_num_key_heads, linear_num_value_heads",
            )
        return cls(keys, values, settings.count("linear_key_head_dim"), settings.count("linear_value_head_dim"))

    def runs(self, prefix: str) -> list[tuple[str, int, int]]:
        """q, k and v one after the other, as (role, heads, dims)."""
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return [(f"{prefix}q", *keys), (f"{prefix}k", *keys), (f"{prefix}v", *values)]


def delta_net_by_key_head(site: Site) -> Iterator[Placement]:
    """Qwen3-Next: ``in_proj_qkvz`` and ``in_proj_ba`` by key head, each with its own value heads beside it."""
    sizes, hidden = _Sizes.read(site.settings), site.settings.count("hidden_size")
    shared = sizes.value_heads // sizes.key_heads
    width = 2 * sizes.key_dim + 2 * shared * sizes.value_dim
    axes = ((sizes.key_heads, width), (hidden,))
    for index, name in enumerate(("gdn.q", "gdn.k")):
        part = ((0, sizes.key_heads), (0, sizes.key_dim), (0, hidden))
        start = index * sizes.key_dim
        box = (part[0], (start, start + sizes.key_dim), part[2])
        role = Role(site.place, name, (sizes.key_heads, sizes.key_dim, hidden))
        yield site.cut("linear_attn.in_proj_qkvz.weight", axes, box, role, part)
    for index, name in enumerate(("gdn.v", "gdn.z")):
        role = Role(site.place, name, (sizes.value_heads, sizes.value_dim, hidden))
        for head in range(sizes.value_heads):
            group, member = divmod(head, shared)
            start = 2 * sizes.key_dim + (index * shared + member) * sizes.value_dim
            box = ((group, group + 1), (start, start + sizes.value_dim), (0, hidden))
            part = ((head, head + 1), (0, sizes.value_dim), (0, hidden))
            yield site.cut("linear_attn.in_proj_qkvz.weight", axes, box, role, part)
    for index, name in enumerate(("gdn.b", "gdn.a")):
        role = Role(site.place, name, (sizes.value_heads, hidden))
        for group in range(sizes.key_heads):
            box = ((group, group + 1), (index * shared, (index + 1) * shared), (0, hidden))
            axes = ((sizes.key_heads, 2 * shared), (hidden,))
            heads = (group * shared, (group + 1) * shared)
            yield site.cut("linear_attn.in_proj_ba.weight", axes, box, role, (heads, (0, hidden)))
    yield from _rest(site, sizes, hidden)


def delta_net_apart(site: Site) -> Iterator[Placement]:
    """Qwen3.5: ``in_proj_qkv`` holds all of q, then k, then v; z, b and a have projections of their own."""
    sizes, hidden = _Sizes.read(site.settings), site.settings.count("hidden_size")
    rows = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
    yield from site.heads("linear_attn.in_proj_qkv.weight", ((rows,), (hidden,)), sizes.runs("gdn."))
    values = (sizes.value_heads, sizes.value_dim)
    yield site.whole("linear_attn.in_proj_z.weight", "gdn.z", (values, (hidden,)))
    yield site.whole("linear_attn.in_proj_b.weight", "gdn.b", ((sizes.value_heads,), (hidden,)))
    yield site.whole("linear_attn.in_proj_a.weight", "gdn.a", ((sizes.value_heads,), (hidden,)))
    yield from _rest(site, sizes, hidden)


def _rest(site: Site, sizes: _Sizes, hidden: int) -> Iterator[Placement]:
    """What both keep alike; ``conv1d`` is by channel: all of q, then k, then v, whatever the projection's order."""
    channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
    taps = site.settings.count("linear_conv_kernel_dim")
    values = (sizes.value_heads, sizes.value_dim)
    yield from site.heads("linear_attn.conv1d.weight", ((channels,), (1,), (taps,)), sizes.runs("gdn.conv."))
    yield site.whole("linear_attn.A_log", "gdn.a_log", ((sizes.value_heads,),))
    yield site.whole("linear_attn.dt_bias", "gdn.dt_bias", ((sizes.value_heads,),))
    yield site.whole("linear_attn.norm.weight", "gdn.norm", ((sizes.value_dim,),))
    yield site.whole("linear_attn.out_proj.weight", "gdn.out", ((hidden,), values))
