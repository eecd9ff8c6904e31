"""Where megatron-core (0.16.1, 0.19.2) keeps a gated delta net, the linear attention of hybrid models.

Keys are relative to a layer, in torch_dist spelling: ``in_proj.weight`` and ``conv1d.weight`` are saved in a tensor
per part, so that a tensor-parallel rank's share of each is one chunk (``_split_tensor_factory``).
"""

from __future__ import annotations

from mtpconvert.audit.roles.megatron_facts import Facts
from mtpconvert.audit.roles.megatron_layout import Entry, Param, cut, same, spelled
from mtpconvert.tensors import Shape

_AT = "self_attention"


def delta_net(f: Facts) -> list[Entry]:
    """A gated delta net in the place of attention; only the Transformer Engine spec has one.

    Source: 0.16.1 ssm/gated_delta_net.py: GatedDeltaNet.__init__, .forward, .sharded_state_dict; 0.19.2
    ssm/gated_delta_net/common.py: _GDNBase and gdn.py: GatedDeltaNet, which do the same;
    experimental_attention_variant_module_specs.py: get_gated_delta_net_module_spec (no biases, norm in in_proj).
    """
    hidden, taps = f.hidden, f.maybe("linear_conv_kernel_dim") or 4
    keys: Shape = (f.maybe("linear_num_key_heads") or 16, f.maybe("linear_key_head_dim") or 128)
    values: Shape = (f.maybe("linear_num_value_heads") or 32, f.maybe("linear_value_head_dim") or 128)
    heads = values[0]

    def rows(part: str, name: str, *axes: int) -> Entry:
        return Entry(((same(f"{_AT}.in_proj.weight.{part}", name, axes, hidden),),))

    return [
        spelled("attn.input_norm", (hidden,), f"{_AT}.in_proj.layer_norm_weight", "input_layernorm.weight"),
        rows("query", "gdn.q", *keys),
        rows("key", "gdn.k", *keys),
        rows("value", "gdn.v", *values),
        rows("z", "gdn.z", *values),
        rows("beta", "gdn.b", heads),
        rows("alpha", "gdn.a", heads),
        _convolution("query", "gdn.conv.q", keys, taps),
        _convolution("key", "gdn.conv.k", keys, taps),
        _convolution("value", "gdn.conv.v", values, taps),
        spelled("gdn.a_log", (heads,), f"{_AT}.A_log"),
        spelled("gdn.dt_bias", (heads,), f"{_AT}.dt_bias"),
        spelled("gdn.norm", values[1:], f"{_AT}.out_norm.weight"),
        Entry(((same(f"{_AT}.out_proj.weight", "gdn.out", hidden, values),),)),
    ]


def _convolution(part: str, name: str, channels: Shape, taps: int) -> Entry:
    """One filter per channel: torch.nn.Conv1d with as many groups as channels keeps [channels, 1, taps].

    Padded by taps - 1 in front and cut at the sequence's end, the last tap reads the token itself.
    """
    shape = (*channels, taps)
    box = [slice(0, extent) for extent in (*channels, 1, taps)]
    return Entry(((Param(f"{_AT}.conv1d.weight.{part}", (channels, (1,), (taps,)), (cut(name, shape, *box),)),),))
