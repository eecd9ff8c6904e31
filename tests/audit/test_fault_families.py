# ruff: noqa: E501 (the table)
"""Faults seeded in what the families of ``tests/support/family_tables.py`` have beside those of the fault table: their
own rows and ops. Each is a bijection, so the converter does it; the auditor must name the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtpconvert import audit
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from mtpconvert.mapping import ops
from mtpconvert.tensors import Block, Tile
from tests.support.family_tables import CASES, write_case
from tests.support.fault_model import exchanged, patched_op, replaced, stacked, written_out
from tests.support.scratch import memory

__all__ = ["memory"]

D0, D2, M0 = "decoder.layers.0.", "decoder.layers.2.", "mtp.layers.0."
T0 = M0 + "transformer_layer."
QKV, EXPERTS = "self_attention.linear_qkv.weight", "mlp.experts.experts.linear_fc1.weight"

Edit = Callable[[str], str]
Op = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Harm:
    """``edit`` of the mapping's text, or the op ``of`` replaced by ``op``; the Megatron tensor that is wrong then."""

    case: str
    tensor: str
    edit: Edit = str
    of: str = ""
    op: Op | None = None


def halves_of_rows(hf: Sequence[str], mcore: Sequence[str], dims: Any, padded: int) -> Iterator[Any]:
    """``rename`` with the two halves of the first axis exchanged; what cannot be halved as it is."""
    rows, *rest = dims
    if rows % 2:
        return ops.rename(hf, mcore, dims, padded)
    grid, whole = (2, rows // 2, *rest), tuple((0, size) for size in (rows // 2, *rest))
    return (
        Tile(
            Block(hf[0], dims, grid, ((half, half + 1), *whole)),
            Block(mcore[0], dims, grid, ((1 - half, 2 - half), *whole)),
        )
        for half in (0, 1)
    )


def only(match: str, broken: Op, real: Op) -> Op:
    return lambda hf, mcore, dims, padded: (broken if match in mcore[0] else real)(hf, mcore, dims, padded)


def keys_and_values_exchanged(hf: Sequence[str], mcore: Sequence[str], dims: Any, padded: int) -> Iterator[Any]:
    """Of the fused tensor: its last two parts in the other order."""
    *queries, keys, values = ops.fused_qkv_interleave(hf, mcore, dims, padded)
    return iter([*queries, Tile(keys.hf, values.mcore), Tile(values.hf, keys.mcore)])


def groups_reversed(hf: Sequence[str], mcore: Sequence[str], dims: Any, padded: int) -> Iterator[Any]:
    *queries, keys, values = ops.fused_qkv_interleave(hf, mcore, dims, padded)
    other = reversed(queries)
    return iter([*(Tile(a.hf, b.mcore) for a, b in zip(queries, other, strict=True)), keys, values])


def as_stored(hf: Sequence[str], mcore: Sequence[str], dims: Any, padded: int) -> Iterator[Any]:
    """Rows of fc1 as they alternate in the file, as ``moe_mlp_glu_interleave_size`` would have them."""
    experts, units, *rest = dims
    return (
        ops.transposed(hf, mcore, (experts, 2 * units, *rest), padded)
        if rest
        else ops.rename(hf, mcore, (experts, 2 * units), padded)
    )


def up_first(hf: Sequence[str], mcore: Sequence[str], dims: Any, padded: int) -> Iterator[Any]:
    gate, up = ops.gate_up_alternate(hf, mcore, dims, padded)
    return iter([Tile(gate.hf, up.mcore, gate.perm), Tile(up.hf, gate.mcore, up.perm)])


def renamed(match: str) -> dict[str, Any]:
    return {"of": "rename", "op": only(match, halves_of_rows, ops.OPS["rename"])}


HARMS = [
    Harm("Qwen3-MoE", D0 + "self_attention.q_layernorm.weight", exchanged("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    Harm("Qwen3-MoE", D0 + EXPERTS, exchanged("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")),
    Harm("Qwen3-MoE", D0 + "mlp.router.weight", **renamed("mlp.router.weight")),
    Harm("Qwen2-MoE", D0 + "mlp.shared_experts.linear_fc1.weight", exchanged("shared_expert.gate_proj", "shared_expert.up_proj")),
    Harm("Qwen2-MoE", D0 + "self_attention.linear_qkv.bias", exchanged("self_attn.k_proj.bias", "self_attn.v_proj.bias")),
    Harm("Mixtral", D0 + EXPERTS, exchanged("{e}.w1.weight", "{e}.w3.weight")),
    Harm("DeepSeek-V2", D2 + "mlp.shared_experts.linear_fc1.weight", exchanged("shared_experts.gate_proj", "shared_experts.up_proj")),
    Harm("DeepSeek-V2-Lite", D0 + "self_attention.linear_q_proj.weight", **renamed("linear_q_proj")),
    Harm("GLM-4.7-Flash", M0 + "enorm.weight", exchanged('hf = "enorm.weight"', 'hf = "hnorm.weight"')),
    Harm("GLM-4.7-Flash", M0 + "eh_proj.weight", replaced(('{ op = "rename",  hf = "eh_proj.weight"', '{ op = "halves_swap",  hf = "eh_proj.weight"'))),
    Harm("MiMo", M0 + "eh_proj.weight", replaced(('op = "halves_swap"', 'op = "rename"'))),
    Harm("MiMo", M0 + "enorm.weight", exchanged("token_layernorm.weight", "hidden_layernorm.weight")),
    Harm("MiMo", T0 + QKV, exchanged("self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    Harm("Ling 2.0", D0 + QKV, of="fused_qkv_interleave", op=keys_and_values_exchanged),
    Harm("Ling 2.0", T0 + QKV, of="fused_qkv_interleave", op=groups_reversed),
    Harm("Ling 2.0", M0 + "eh_proj.weight", replaced(('op = "rename", hf = "eh_proj.weight"', 'op = "halves_swap", hf = "eh_proj.weight"'))),
    Harm("Ling 2.0", M0 + "hnorm.weight", exchanged('hf = "hnorm.weight"', 'hf = "final_layernorm.weight"')),
    Harm("Ling 2.0", T0 + "mlp.router.expert_bias", **renamed("mtp.layers.0.transformer_layer.mlp.router.expert_bias")),
    Harm("HY-V3", T0 + "mlp.shared_experts.linear_fc1.weight", exchanged("shared_mlp.gate_proj", "shared_mlp.up_proj")),
    Harm("HY-V3", M0 + "final_layernorm.weight", exchanged('hf = "enorm.weight"', 'hf = "final_layernorm.weight"')),
    Harm("HY-V3", T0 + "self_attention.q_layernorm.weight", exchanged("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    Harm("Qwen3-Next", D0 + "self_attention.out_norm.weight", replaced((', codec = "minus_one"', ""))),
    Harm("Qwen3.5", D0 + "self_attention.out_norm.weight", replaced((', codec = "minus_one"', ""))),
    Harm("Phi-3", D0 + QKV, of="fused_qkv_interleave", op=keys_and_values_exchanged),
    Harm("Phi-3", D0 + QKV, of="fused_qkv_interleave", op=lambda hf, mcore, dims, padded: ops.rename(hf, mcore, (dims[0] * (dims[1] + 2) * dims[2], dims[3]), padded)),
    Harm("Phi-3", D0 + "mlp.linear_fc1.weight", **renamed("mlp.linear_fc1.weight")),
    Harm("gpt-oss", D0 + EXPERTS, of="gate_up_alternate", op=as_stored),
    Harm("gpt-oss", D0 + EXPERTS, of="gate_up_alternate", op=up_first),
    Harm("gpt-oss", D0 + "mlp.experts.experts.linear_fc1.bias", of="gate_up_alternate", op=up_first),
    Harm("gpt-oss", D0 + "self_attention.core_attention.softmax_offset", **renamed("softmax_offset")),
    Harm("gpt-oss", D0 + "mlp.router.bias", **renamed("mlp.router.bias")),
    Harm("gpt-oss", D0 + "self_attention.linear_proj.bias", **renamed("linear_proj.bias")),
    Harm("gpt-oss", D0 + "mlp.experts.experts.linear_fc2.bias", **renamed("linear_fc2.bias")),
]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    names = sorted({harm.case for harm in HARMS})
    return {name: write_case(name, root / str(number)) for number, name in enumerate(names)}


@pytest.mark.parametrize("harm", HARMS, ids=[f"{n}: {harm.case}, {harm.tensor}" for n, harm in enumerate(HARMS)])
def test_the_auditor_names_the_tensor(harm: Harm, sources: dict[str, Path], memory: Path) -> None:
    clean = written_out(CASES[harm.case].architecture)
    mapping = memory / "mapping.toml"
    mapping.write_text(harm.edit(clean), encoding="utf-8")
    assert harm.op is not None or mapping.read_text() != clean
    with patched_op(harm.of, harm.op)() if harm.op is not None else patched_op("rename", ops.OPS["rename"])():
        hf2mcore(sources[harm.case], memory / "out", ToMcore(mapping=mapping), Callbacks(gate=None))
    found = {
        finding.tensor
        for finding in audit(sources[harm.case], memory / "out").findings
        if finding.code == "bytes-differ"
    }
    assert found & {harm.tensor, stacked(harm.tensor)}, found
