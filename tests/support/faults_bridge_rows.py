# ruff: noqa: E501 (the table)
"""Faults in mapping rows and in the op of the dialect of Megatron-Bridge: value heads of another size than key heads,
full and sliding layers, MTP layers that are like neither the last layer nor any other, joint norms, sandwich norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mtpconvert.mapping import ops
from mtpconvert.tensors import Block, Tile, whole
from tests.support.fault_model import Fault, exchanged, patched_op, replaced
from tests.support.faults_mapping import M0, T0
from tests.support.faults_ops import full, only

MIMO, MINIMAX, PANGU = ("mimo_v2",), ("minimax_m2",), ("pangu",)
WHY = "stock megatron-core has no such modules"
D0, D1 = "decoder.layers.0.", "decoder.layers.1."
QKV = "self_attention.linear_qkv.weight"
Op = Callable[..., Iterator[Any]]


def uneven(order: str) -> Op:
    """``qkv_interleave_uneven`` with its rows in another order."""

    def op(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
        groups, queries, head, value, *rest = dims
        sizes = dict(zip(hf, (queries * head, head, value), strict=True))
        total, at = sum(sizes.values()), 0
        shape, grid = (groups * total, *rest), (groups, total, *rest)
        names = [hf[0], hf[2], hf[1]] if order == "value first" else list(hf)
        for name in names:
            rows = sizes[name]
            source = (groups * rows, *rest)
            if order == "concatenated":
                end = at + groups * rows
                yield Tile(whole(name, source), Block(mcore[0], shape, shape, ((at, end), *full(rest))))
                at = end
                continue
            for group in range(groups):
                to = groups - 1 - group if order == "reversed" else group
                kept = rows - 1 if order == "a row lost" and name == hf[2] else rows
                here = Block(name, source, (groups, rows, *rest), ((group, group + 1), (0, kept), *full(rest)))
                yield Tile(here, Block(mcore[0], shape, grid, ((to, to + 1), (at, at + kept), *full(rest))))
            at += rows

    return op


def value_as_large_as_a_key(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    groups, queries, head, _, *rest = dims
    return ops.qkv_interleave(hf, mcore, (groups, queries, head, *rest), padded)


def shared_key(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    """A group's key is every other group's too."""
    for tile in ops.qkv_interleave_uneven(hf, mcore, dims, padded):
        if tile.hf.tensor == hf[1]:
            for group in range(dims[0]):
                box = ((group, group + 1), *tile.mcore.box[1:])
                here = Block(hf[1], tile.hf.shape, tile.hf.grid, ((0, 1), *tile.hf.box[1:]))
                yield Tile(here, Block(mcore[0], tile.mcore.shape, tile.mcore.grid, box))
        else:
            yield tile


def op(
    name: str, broken: Op, tensor: str | None = None, match: Callable[[str], bool] | None = None, **more: Any
) -> Fault:
    of = "qkv_interleave_uneven"
    plant = patched_op(of, only(broken, match, ops.OPS[of]) if match else broken)
    return Fault(name, "op", MIMO, tensor, plant=plant, mtp="MTP" in name, why_not=WHY, **more)


def row(
    name: str, families: tuple[str, ...], mapping: Callable[[str], str], tensor: str | None = None, **more: Any
) -> Fault:
    return Fault(name, "mapping row", families, tensor, mapping=mapping, mtp="MTP" in name, why_not=WHY, **more)


def in_mtp(name: str) -> bool:
    return name.startswith("mtp.")


def as_full(each: str) -> Callable[[str], str]:
    """The rows of full layers where those of sliding ones belong."""
    old = {"sliding": 'rows  = ["sliding_attention"]', "mtp": 'rows  = ["sliding_attention", "mtp_mlp"]'}[each]
    return replaced((old, old.replace("sliding", "full")))


BRIDGE_ROW_FAULTS = [
    op("values of another size: value first", uneven("value first"), D1 + QKV),
    op("values of another size: groups concatenated", uneven("concatenated"), D1 + QKV),
    op("values of another size: groups reversed", uneven("reversed"), D1 + QKV),
    op("values of another size: taken as large as keys", value_as_large_as_a_key, refused="CheckpointError"),
    op("values of another size: the last row of each value lost", uneven("a row lost"), refused="NotABijectionError"),
    op("values of another size: one key for all groups", shared_key, refused="NotABijectionError"),
    op("MTP: values of another size: value first", uneven("value first"), T0 + QKV, in_mtp),
    op("MTP: values of another size: groups reversed", uneven("reversed"), T0 + QKV, in_mtp),
    op("MTP: values of another size: groups concatenated", uneven("concatenated"), T0 + QKV, in_mtp),
    row("MiMo-V2: k and v exchanged", MIMO, exchanged('"self_attn.k_proj.weight"', '"self_attn.v_proj.weight"'), refused="CheckpointError"),
    row("MiMo-V2: groups of full and sliding layers exchanged", MIMO, exchanged('dims = ["G", "Q",', 'dims = ["W", "P",'), refused="CheckpointError"),
    row("MiMo-V2: sliding layers mapped as full ones", MIMO, as_full("sliding"), refused="UnmappedTensorError"),
    row("MiMo-V2: the first layers slide", MIMO, replaced(('sliding = \'where(layer_types == "sliding_attention") else where(hybrid_layer_pattern == 1)\'', 'sliding = ["0", "2"]')), refused="UnmappedTensorError"),
    row("MiMo-V2, MTP: layers mapped as full ones", MIMO, as_full("mtp"), refused="MtpLostError"),
    row("MiMo-V2, MTP: only two layers placed", MIMO, replaced(('mtp     = ["0", "mtp_layers"]', 'mtp     = ["0", "2"]')), refused="MtpLostError"),
    row("MiMo-V2, MTP: layers numbered from 1", MIMO, replaced(('"mtp.layers.{i}.transformer_layer."', '"mtp.layers.{i+1}.transformer_layer."'), ('"mtp.layers.{i}."', '"mtp.layers.{i+1}."')), M0 + "*", code="mtp-layer-missing"),
    row("MiMo-V2, MTP: enorm and hnorm exchanged", MIMO, exchanged('hf = "enorm.weight"', 'hf = "hnorm.weight"'), M0 + "enorm.weight"),
    row("MiMo-V2, MTP: halves of eh_proj exchanged", MIMO, replaced(('{ op = "rename", hf = "eh_proj.weight"', '{ op = "halves_swap", hf = "eh_proj.weight"')), M0 + "eh_proj.weight", words="halves exchanged"),
    row("MiMo-V2, MTP: norm of the MLP and the last norm exchanged", MIMO, exchanged('hf = "pre_mlp_layernorm.weight"', 'hf = "final_layernorm.weight"'), M0 + "final_layernorm.weight"),
    row("MiMo-V2, MTP: gate and up exchanged", MIMO, replaced(('mtp_mlp = [', 'mtp_mlp = [\n  { op = "gate_up_concat", hf = ["mlp.up_proj.weight", "mlp.gate_proj.weight"], mcore = "mlp.linear_fc1.weight", dims = ["F", "H"] },')), refused="NotABijectionError"),
    row("MiniMax-M2: w1 and w3 exchanged", MINIMAX, exchanged('{e}.w1.weight"', '{e}.w3.weight"'), D1 + "mlp.experts.experts.linear_fc1.weight", words="gate and up exchanged"),
    row("MiniMax-M2: joint norms exchanged", MINIMAX, exchanged('hf = "self_attn.q_norm.weight"', 'hf = "self_attn.k_norm.weight"'), refused="CheckpointError"),
    row("MiniMax-M2: norms taken per head", MINIMAX, replaced(('dims = ["G*Q*D"]', 'dims = ["D"]'), ('dims = ["G*D"]', 'dims = ["D"]')), refused="CheckpointError"),
    row("openPangu: norms of attention's output and of the MLP's input exchanged", PANGU, exchanged('hf = "post_attention_layernorm.weight"', 'hf = "pre_mlp_layernorm.weight"'), D1 + "pre_mlp_layernorm.weight"),
    row("openPangu: norms of the MLP's input and output exchanged", PANGU, exchanged('hf = "pre_mlp_layernorm.weight"', 'hf = "post_mlp_layernorm.weight"'), D1 + "pre_mlp_layernorm.weight"),
    row("openPangu, MTP: placed without the norm of attention's output", PANGU, replaced(('rows  = ["mla", "attention_out", "moe_mlp"]\neach  = "mtp"', 'rows  = ["mla", "moe_mlp"]\neach  = "mtp"')), refused="MtpLostError"),
]  # fmt: skip
