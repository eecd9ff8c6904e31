# ruff: noqa: E501 (the table)
"""Faults in the tensors of a Megatron checkpoint, each with the cause that must be named.

The unharmed Megatron side is hand-written arithmetic (tests/support/handmade.py); what each fault must be called was
written down from what the fault does, before the auditor saw it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.support.handmade import Arrays

Mutate = Callable[[Arrays, dict[str, Any]], Any]


class Fault(NamedTuple):
    """``cause``: words of the finding on ``tensor``."""

    families: str
    mutate: Mutate
    code: str
    tensor: str
    cause: str = ""


def swap(one: str, two: str) -> Mutate:
    def mutate(a: Arrays, c: dict[str, Any]) -> None:
        a[one], a[two] = a[two], a[one]

    return mutate


def put(name: str, change: Callable[[np.ndarray, dict[str, Any]], np.ndarray]) -> Mutate:
    def mutate(a: Arrays, c: dict[str, Any]) -> None:
        a[name] = np.ascontiguousarray(change(a[name].copy(), c))

    return mutate


def drop(start: str) -> Mutate:
    def mutate(a: Arrays, c: dict[str, Any]) -> None:
        for name in [name for name in a if name.startswith(start)]:
            del a[name]

    return mutate


def groups(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    per = c["num_attention_heads"] // c["num_key_value_heads"]
    return x.reshape(c["num_key_value_heads"], per + 2, -1, *x.shape[1:])


def kv_exchanged(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    g = groups(x, c)
    per = g.shape[1] - 2
    return g[:, [*range(per), per + 1, per]].reshape(x.shape)


def concatenated(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    g = groups(x, c)
    per = g.shape[1] - 2
    return np.concatenate(
        [
            g[:, :per].reshape(-1, *x.shape[1:]),
            g[:, per].reshape(-1, *x.shape[1:]),
            g[:, per + 1].reshape(-1, *x.shape[1:]),
        ]
    )


def group_order(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return groups(x, c)[::-1].reshape(x.shape)


def halves(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return np.roll(x, x.shape[-1] // 2, axis=-1)


def row_halves(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return np.roll(x, x.shape[0] // 2, axis=0)


def expert_halves(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return np.roll(x, x.shape[1] // 2, axis=1)


def experts(*order: int) -> Callable[[np.ndarray, dict[str, Any]], np.ndarray]:
    return lambda x, c: x[list(order)]


def bf16(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return (((x.astype(np.uint64) + 0x7FFF + ((x >> 16) & 1)) >> 16) << 16).astype("<u4")


def cast(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return (bf16(x, c) >> 16).astype("<u2")


def flip(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    x.reshape(-1)[x.size // 2] ^= 4
    return x


def stopped(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    x.reshape(-1)[x.size // 2 :] = 0
    return x


def dropped_row(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return np.concatenate([x[:1], x[2:], x[-1:]])


def interleaved(ranks: int) -> Callable[[np.ndarray, dict[str, Any]], np.ndarray]:
    return lambda x, c: x.reshape(2, ranks, -1, x.shape[-1]).swapaxes(0, 1).reshape(x.shape)


def up_as_gate(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    half = len(x) // 2
    return np.concatenate([x[half:], x[half:]])


def mla(name: str) -> str:
    return f"decoder.layers.1.self_attention.{name}"


GQA, MLA, ALL = "qwen3 qwen2 llama", "deepseek_v3", "deepseek_v3 qwen3 qwen2 llama"
UNTIED = "deepseek_v3 qwen3 llama"
D1, M0 = "decoder.layers.1.", "mtp.layers.0."
T0 = M0 + "transformer_layer."
QKV, FC1, FC2 = (
    D1 + "self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
)
EX1, EX2 = D1 + "mlp.experts.experts.linear_fc1.weight", D1 + "mlp.experts.experts.linear_fc2.weight"
T1, T2 = T0 + "mlp.experts.experts.linear_fc1.weight", T0 + "mlp.experts.experts.linear_fc2.weight"

FAULTS: dict[str, Fault] = {
    # fused layouts
    "k and v": Fault(GQA, put(QKV, kv_exchanged), "bytes-differ", QKV, "k and v exchanged"),
    "qkv concatenated": Fault(GQA, put(QKV, concatenated), "bytes-differ", QKV, "query groups concatenated instead of interleaved"),
    "bias concatenated": Fault("qwen2", put(QKV[:-6] + "bias", concatenated), "bytes-differ", QKV[:-6] + "bias", "query groups concatenated"),
    "bias k and v": Fault("qwen2", put(QKV[:-6] + "bias", kv_exchanged), "bytes-differ", QKV[:-6] + "bias", "k and v exchanged"),
    "groups reversed": Fault(GQA, put(QKV, group_order), "bytes-differ", QKV),
    "qkv rows rotated": Fault(GQA, put(QKV, lambda x, c: np.roll(x, 1, 0)), "bytes-differ", QKV),
    "gate and up": Fault(ALL, put(FC1, row_halves), "bytes-differ", FC1, "gate and up exchanged"),
    "gate and up by 2 ranks": Fault(ALL, put(FC1, interleaved(2)), "bytes-differ", FC1, "interleaved by 2 tensor-parallel ranks"),
    "gate from up": Fault(ALL, put(FC1, up_as_gate), "bytes-differ", FC1, "holds the values of mlp.up"),
    "o_proj square transposed": Fault("qwen2 ", put(D1 + "self_attention.linear_proj.weight", lambda x, c: x.T), "bytes-differ", D1 + "self_attention.linear_proj.weight", "transposed"),
    "fc2 of another layer": Fault(GQA, lambda a, c: a.update({D1 + "mlp.linear_fc2.weight": a[FC2]}), "bytes-differ", D1 + "mlp.linear_fc2.weight", "trunk layer 0"),
    "layers exchanged": Fault(GQA, swap(FC2, D1 + "mlp.linear_fc2.weight"), "bytes-differ", FC2, "exchanged with trunk layer 1"),
    "columns of down halves": Fault(ALL, put(FC2, halves), "bytes-differ", FC2, "halves exchanged"),
    "final norm and input norm": Fault(GQA, swap("decoder.final_layernorm.weight", D1 + "self_attention.linear_qkv.layer_norm_weight"), "bytes-differ", "decoder.final_layernorm.weight", "attn.input_norm"),
    "norms of a layer": Fault(GQA, swap(D1 + "self_attention.linear_qkv.layer_norm_weight", D1 + "mlp.linear_fc1.layer_norm_weight"), "bytes-differ", D1 + "mlp.linear_fc1.layer_norm_weight", "input norm and feed-forward norm exchanged"),
    "q_norm and k_norm": Fault("qwen3", swap(D1 + "self_attention.q_layernorm.weight", D1 + "self_attention.k_layernorm.weight"), "bytes-differ", D1 + "self_attention.q_layernorm.weight", "q_norm and k_norm exchanged"),
    "embedding and head": Fault(UNTIED, swap("embedding.word_embeddings.weight", "output_layer.weight"), "bytes-differ", "output_layer.weight", "embedding and head exchanged"),
    "embedding rows rotated": Fault(ALL, put("embedding.word_embeddings.weight", lambda x, c: np.concatenate([x[3:98], x[:3], x[98:]])), "bytes-differ", "embedding.word_embeddings.weight", "rotated by 3"),
    "embedding shifted": Fault(ALL, put("embedding.word_embeddings.weight", lambda x, c: np.roll(x, -3, 0)), "bytes-differ", "embedding.word_embeddings.weight", "3 rows too early"),
    "embedding row dropped": Fault(ALL, put("embedding.word_embeddings.weight", dropped_row), "bytes-differ", "embedding.word_embeddings.weight", "1 row too early"),
    # latent attention
    "kv_up halves": Fault(MLA, put(mla("linear_kv_up_proj.weight"), row_halves), "bytes-differ", mla("linear_kv_up_proj.weight")),
    "latent and rope": Fault(MLA, put(mla("linear_kv_down_proj.weight"), lambda x, c: np.roll(x, c["qk_rope_head_dim"], 0)), "bytes-differ", mla("linear_kv_down_proj.weight")),
    "rope interleaved": Fault(MLA, put(mla("linear_kv_down_proj.weight"), lambda x, c: np.concatenate([x[:-6], x[-6:].reshape(2, 3, -1).swapaxes(0, 1).reshape(6, -1)])), "bytes-differ", mla("linear_kv_down_proj.weight"), "interleaved"),
    "heads exchanged": Fault(MLA, put(mla("linear_q_up_proj.weight"), lambda x, c: x.reshape(4, 16, -1)[[1, 0, 2, 3]].reshape(x.shape)), "bytes-differ", mla("linear_q_up_proj.weight"), "heads 0 and 1 exchanged"),
    "latent norm lost": Fault(MLA, drop(mla("linear_kv_up_proj.layer_norm_weight")), "tensor-missing", mla("linear_kv_up_proj.layer_norm_weight")),
    # experts
    "experts exchanged": Fault(MLA, put(EX1, experts(0, 2, 1, 3)), "bytes-differ", EX1, "experts 1 and 2 exchanged"),
    "experts reversed": Fault(MLA, put(EX2, experts(3, 2, 1, 0)), "bytes-differ", EX2, "experts 0/3 and 1/2 exchanged"),
    "experts by local number": Fault(MLA, put(EX1, experts(0, 1, 0, 1)), "bytes-differ", EX1, "experts misplaced"),
    "experts off by one": Fault(MLA, put(EX1, experts(1, 2, 3, 0)), "bytes-differ", EX1, "rotated by 1"),
    "expert gate and up": Fault(MLA, put(EX1, expert_halves), "bytes-differ", EX1, "gate and up exchanged"),
    "shared expert gate and up": Fault(MLA, put(D1 + "mlp.shared_experts.linear_fc1.weight", row_halves), "bytes-differ", D1 + "mlp.shared_experts.linear_fc1.weight", "gate and up of the shared expert exchanged"),
    "last expert wins": Fault(MLA, put(EX2, experts(3, 3, 3, 3)), "bytes-differ", EX2, "misplaced"),
    "expert never written": Fault(MLA, put(EX2, lambda x, c: np.concatenate([x[:2], 0 * x[2:3], x[3:]])), "bytes-differ", EX2, "zeroed"),
    "router bias lost": Fault(MLA, drop(D1 + "mlp.router.expert_bias"), "tensor-missing", D1 + "mlp.router.expert_bias"),
    "router bias zero": Fault(MLA, put(D1 + "mlp.router.expert_bias", lambda x, c: 0 * x), "bytes-differ", D1 + "mlp.router.expert_bias", "zeroed"),
    "router bias rounded": Fault(MLA, put(D1 + "mlp.router.expert_bias", bf16), "narrowed", D1 + "mlp.router.expert_bias", "rounded to bfloat16"),
    "router bias as bfloat16": Fault(MLA, put(D1 + "mlp.router.expert_bias", cast), "narrowed", D1 + "mlp.router.expert_bias"),
    "router rows": Fault(MLA, put(D1 + "mlp.router.weight", experts(1, 0, 2, 3)), "bytes-differ", D1 + "mlp.router.weight", "experts 0 and 1 exchanged"),
    # MTP alone
    "mtp halves": Fault(MLA, put(M0 + "eh_proj.weight", halves), "bytes-differ", M0 + "eh_proj.weight", "halves exchanged"),
    "mtp eh_proj rows": Fault(MLA, put(M0 + "eh_proj.weight", lambda x, c: np.roll(x, 1, 0)), "bytes-differ", M0 + "eh_proj.weight", "rotated"),
    "mtp half twice": Fault(MLA, put(M0 + "eh_proj.weight", lambda x, c: np.tile(x[:, : x.shape[1] // 2], 2)), "bytes-differ", M0 + "eh_proj.weight", "holds the values of mtp.proj.embedding"),
    "mtp enorm and hnorm": Fault(MLA, swap(M0 + "enorm.weight", M0 + "hnorm.weight"), "bytes-differ", M0 + "enorm.weight", "enorm and hnorm exchanged"),
    "mtp norm from trunk": Fault(MLA, lambda a, c: a.update({M0 + "final_layernorm.weight": a["decoder.final_layernorm.weight"]}), "bytes-differ", M0 + "final_layernorm.weight", "final_norm"),
    "mtp dropped": Fault(MLA, drop("mtp."), "mtp-layer-missing", M0 + "*"),
    "mtp experts dropped": Fault(MLA, drop(T1), "mtp-tensor-missing", T1),
    "mtp enorm dropped": Fault(MLA, drop(M0 + "enorm"), "mtp-tensor-missing", M0 + "enorm.weight"),
    "mtp router bias dropped": Fault(MLA, drop(T0 + "mlp.router.expert_bias"), "mtp-tensor-missing", T0 + "mlp.router.expert_bias"),
    "mtp router bias rounded": Fault(MLA, put(T0 + "mlp.router.expert_bias", bf16), "narrowed", T0 + "mlp.router.expert_bias", "rounded to bfloat16"),
    "mtp experts exchanged": Fault(MLA, put(T1, experts(3, 1, 2, 0)), "bytes-differ", T1, "experts 0 and 3 exchanged"),
    "mtp gate and up": Fault(MLA, put(T1, expert_halves), "bytes-differ", T1, "gate and up exchanged"),
    "mtp experts from trunk": Fault(MLA, lambda a, c: a.update({T2: a[EX2]}), "bytes-differ", T2, "trunk layer 1"),
    "mtp and last trunk layer": Fault(MLA, swap(T2, "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"), "bytes-differ", T2, "exchanged with trunk layer 2"),
    "mtp zeroed": Fault(MLA, put(M0 + "eh_proj.weight", lambda x, c: 0 * x), "bytes-differ", M0 + "eh_proj.weight", "zeroed"),
    "mtp norm ones": Fault(MLA, put(M0 + "hnorm.weight", lambda x, c: np.full_like(x, 0x3F80)), "bytes-differ", M0 + "hnorm.weight", "same number"),
    "mtp bit": Fault(MLA, put(T0 + "self_attention.linear_proj.weight", flip), "bytes-differ", T0 + "self_attention.linear_proj.weight", "one bit flipped"),
    "mtp copy stopped": Fault(MLA, put(M0 + "eh_proj.weight", stopped), "bytes-differ", M0 + "eh_proj.weight", "stopped early"),
    "mtp extra tensor": Fault(MLA, lambda a, c: a.update({M0 + "main_norm.weight": a[M0 + "enorm.weight"]}), "role-unknown", M0 + "main_norm.weight"),
    # the executor
    "one bit": Fault(ALL, put(FC2, flip), "bytes-differ", FC2, "one bit flipped"),
    "short copy": Fault(ALL, put(FC2, stopped), "bytes-differ", FC2, "stopped early"),
    "negated": Fault(ALL, put(FC2, lambda x, c: x ^ 0x8000), "bytes-differ", FC2, "negated"),
    "byte order": Fault(ALL, put(FC2, lambda x, c: x.byteswap()), "bytes-differ", FC2, "byte order reversed"),
    "tensor dropped": Fault(ALL, drop(FC2), "tensor-missing", FC2),
    "layer dropped": Fault(ALL, drop(D1), "layer-set", ""),
    "shape": Fault(ALL, put(FC2, lambda x, c: x[:, :-2]), "role-overlap", FC2),
}  # fmt: skip
