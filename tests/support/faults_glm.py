# ruff: noqa: E501 (the table)
"""Faults where GLM-4.5 is not as the other families: MTP beside grouped q, k, v with biases, norms of q and k in MTP
layers, a rotary embedding of half of each head, experts behind both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.fault_model import GLM, Fault, exchanged, replaced
from tests.support.faults_executor import arguments
from tests.support.faults_mapping import D0, M0, T0, in_groups_of_mtp

WHY = "what GLM-4.5 alone of them has together"
M1 = "mtp.layers.1."
MTP_ROWS = 'rows  = ["attention", "attention_variants", "moe_mlp"]\neach  = "mtp"'


def k_and_v(kind: str) -> Callable[[str], str]:
    return replaced(
        (
            f'"self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"',
            f'"self_attn.v_proj.{kind}", "self_attn.k_proj.{kind}"',
        )
    )


def in_mtp_only(edit: Callable[[str], str]) -> Callable[[str], str]:
    return in_groups_of_mtp(edit, ("attention", "attention_variants"), MTP_ROWS)


def row(name: str, mapping: Callable[[str], str], tensor: str | None = None, **more: Any) -> Fault:
    return Fault(f"GLM: {name}", "mapping row", GLM, tensor, mapping=mapping, mtp="MTP" in name, why_not=WHY, **more)


def recorded(name: str, change: Callable[[dict[str, Any]], Any], argument: str) -> Fault:
    return Fault(
        f"GLM: {name}", "executor", GLM, plant=arguments(change), code="argument-mismatch", words=argument, why_not=WHY
    )


GLM_FAULTS = [
    row("biases of k and v exchanged", k_and_v("bias"), D0 + "self_attention.linear_qkv.bias", words="k and v exchanged"),
    row("q_norm and k_norm exchanged", exchanged('"self_attn.q_norm.weight"', '"self_attn.k_norm.weight"'), D0 + "self_attention.q_layernorm.weight", words="q_norm and k_norm exchanged"),
    row("MTP: k and v exchanged", in_mtp_only(k_and_v("weight")), T0 + "self_attention.linear_qkv.weight", words="k and v exchanged"),
    row("MTP: biases of k and v exchanged", in_mtp_only(k_and_v("bias")), T0 + "self_attention.linear_qkv.bias", words="k and v exchanged"),
    row("MTP: q_norm and k_norm exchanged", in_mtp_only(exchanged('"self_attn.q_norm.weight"', '"self_attn.k_norm.weight"')), T0 + "self_attention.q_layernorm.weight", words="q_norm and k_norm exchanged"),
    row("MTP: halves of eh_proj exchanged", replaced(('{ op = "rename",  hf = "eh_proj.weight"', '{ op = "halves_swap",  hf = "eh_proj.weight"')), M1 + "eh_proj.weight", words="halves exchanged"),
    row("MTP: layers numbered from 1", replaced(('"mtp.layers.{i}.transformer_layer."', '"mtp.layers.{i+1}.transformer_layer."'), ('"mtp.layers.{i}."', '"mtp.layers.{i+1}."')), M0 + "*", code="mtp-layer-missing"),
    row("MTP: only the first layer placed", replaced(('mtp   = ["0", "mtp_layers"]', 'mtp   = ["0", "1"]')), refused="MtpLostError"),
    recorded("all of each head recorded as rotated", lambda table: table.update(rotary_percent=1.0), "rotary_percent"),
    recorded("another rotary base recorded", lambda table: table.update(rotary_base=10000), "rotary_base"),
    recorded("experts' scale not recorded", lambda table: table.update(moe_router_topk_scaling_factor=None), "moe_router_topk_scaling_factor"),
]  # fmt: skip
