# ruff: noqa: E501 (the table)
"""Faults in rows of a mapping file: what a tired author, or a wrong note, would write."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.support.fault_model import (
    ALL,
    GQA,
    MLA,
    NO_EXPERTS,
    NO_GROUPS,
    NO_MTP,
    TIED,
    UNTIED,
    Fault,
    exchanged,
    replaced,
)

D0, D1 = "decoder.layers.0.", "decoder.layers.1."
M0 = "mtp.layers.0."
T0 = M0 + "transformer_layer."
GATE_UP = '["mlp.gate_proj.weight", "mlp.up_proj.weight"]'
MTP_PLACE = 'rows  = ["mla", "moe_mlp"]\neach  = "mtp"'


def without_mtp_table(text: str) -> str:
    begin = text.index("[mtp]\n")
    return text[:begin] + text[text.index("\n\n", begin) :]


def halves(hf: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf'"rename"(, *hf = "{re.escape(hf)}")', r'"halves_swap"\1', text)


def row_of(hf: str) -> Callable[[str], str]:
    """Without the row that maps the HF name ``hf``."""

    def edit(text: str) -> str:
        lines = [line for line in text.splitlines(keepends=True) if not (line.startswith("  {") and f'"{hf}"' in line)]
        return "".join(lines)

    return edit


def twice(hf: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        return "".join(
            line * (1 + (line.startswith("  {") and f'"{hf}"' in line)) for line in text.splitlines(keepends=True)
        )

    return edit


def in_mtp_only(edit: Callable[[str], str]) -> Callable[[str], str]:
    return in_groups_of_mtp(edit, ("mla", "moe_mlp"), MTP_PLACE)


def in_groups_of_mtp(edit: Callable[[str], str], groups: tuple[str, ...], place: str) -> Callable[[str], str]:
    """``edit`` applied to copies of the trunk's row ``groups``, which take their place in the MTP layers' ``place``."""

    def change(text: str) -> str:
        own, there = "", place
        for name in groups:
            group = re.search(rf"^{name} = \[\n.*?^\]\n", text, re.M | re.S)
            assert group is not None
            own += "own_" + group[0]
            there = there.replace(f'"{name}"', f'"own_{name}"')
        text = text.replace("\n[rows]\n", f"\n[rows]\n{edit(own)}", 1)
        return replaced((place, there))(text)

    return change


def row(
    name: str, families: tuple[str, ...], mapping: Callable[[str], str], tensor: str | None = None, **more: str
) -> Fault:
    return Fault(name, "mapping row", families, tensor, mapping=mapping, mtp="MTP" in name, **more)  # type: ignore[arg-type]


MAPPING_FAULTS = [
    row("gate and up exchanged", ALL, replaced((GATE_UP, '["mlp.up_proj.weight", "mlp.gate_proj.weight"]')), D0 + "mlp.linear_fc1.weight", words="gate and up exchanged"),
    row("gate twice", ALL, replaced((GATE_UP, '["mlp.gate_proj.weight", "mlp.gate_proj.weight"]')), refused="NotABijectionError"),
    row("input and feed-forward norms exchanged", GQA, exchanged('"input_layernorm.weight"', '"post_attention_layernorm.weight"'), D0 + "mlp.linear_fc1.layer_norm_weight", words="norm", why_not="the row below"),
    row("input and feed-forward norms exchanged, latent attention", MLA, exchanged('hf = "input_layernorm.weight"', 'hf = "post_attention_layernorm.weight"'), D0 + "input_layernorm.weight", words="norm", why_not="the row above"),
    row("k and v exchanged", GQA, replaced(('"self_attn.k_proj.weight", "self_attn.v_proj.weight"', '"self_attn.v_proj.weight", "self_attn.k_proj.weight"')), D0 + "self_attention.linear_qkv.weight", words="k and v exchanged", why_not=NO_GROUPS),
    row("q and k exchanged", GQA, replaced(('"self_attn.q_proj.weight", "self_attn.k_proj.weight"', '"self_attn.k_proj.weight", "self_attn.q_proj.weight"')), refused="CheckpointError", why_not=NO_GROUPS),
    row("biases of k and v exchanged", ("qwen2",), replaced(('"self_attn.k_proj.bias", "self_attn.v_proj.bias"', '"self_attn.v_proj.bias", "self_attn.k_proj.bias"')), D0 + "self_attention.linear_qkv.bias", words="k and v exchanged", why_not="no biases in these tiny models"),
    row("groups and heads exchanged", GQA, replaced(('dims = ["G", "Q", "D", "H"]', 'dims = ["Q", "G", "D", "H"]')), refused="CheckpointError", why_not=NO_GROUPS),
    row("q_norm and k_norm exchanged", ("qwen3",), exchanged('"self_attn.q_norm.weight"', '"self_attn.k_norm.weight"'), D0 + "self_attention.q_layernorm.weight", words="q_norm and k_norm exchanged", why_not="no norms of q and k, or of two sizes"),
    row("embedding and head exchanged", UNTIED, exchanged('"model.embed_tokens.weight", mcore', '"lm_head.weight",            mcore'), "output_layer.weight", words="embedding and head exchanged", why_not=TIED),
    row("head as a plain rename", UNTIED, replaced(('{ op = "pad_vocab", hf = "lm_head.weight"', '{ op = "rename", hf = "lm_head.weight"')), "output_layer.weight", code="vocab-rows", words="98 rows, padded_vocab_size is 128", why_not=TIED),
    row("halves of o_proj exchanged", ALL, halves("self_attn.o_proj.weight"), D0 + "self_attention.linear_proj.weight", words="exchanged"),
    row("halves of down exchanged", ALL, halves("mlp.down_proj.weight"), D0 + "mlp.linear_fc2.weight", words="halves exchanged"),
    row("another name on Megatron's side", ALL, replaced(('mcore = "mlp.linear_fc2.weight"', 'mcore = "mlp.linear_fc3.weight"')), D0 + "mlp.linear_fc2.weight", code="tensor-missing"),
    row("the row of the final norm lacking", ALL, row_of("model.norm.weight"), refused="UnmappedTensorError"),
    row("a row twice", ALL, twice("mlp.down_proj.weight"), refused="NotABijectionError"),
    row("dims of down exchanged", ALL, replaced(('mcore = "mlp.linear_fc2.weight",            dims = ["H", "F"]', 'mcore = "mlp.linear_fc2.weight", dims = ["F", "H"]')), refused="CheckpointError"),
    row("an unknown op", ALL, replaced(('op = "gate_up_concat", hf = ["mlp.gate_proj', 'op = "up_gate_concat", hf = ["mlp.gate_proj')), refused="MappingError"),
    row("one layer too few", GQA, replaced(('all = ["0", "num_hidden_layers"]', 'all = ["0", "num_hidden_layers-1"]')), refused="UnmappedTensorError", why_not="the row below"),
    row("one dense layer too few", MLA, replaced(('sparse = ["first_k_dense_replace"', 'sparse = ["first_k_dense_replace-1"')), refused="UnmappedTensorError", why_not="the row above"),
    row("the router's bias lacking", MLA, row_of("mlp.gate.e_score_correction_bias"), refused="MtpLostError", why_not=NO_EXPERTS),
    row("another dtype for the router's bias", MLA, replaced(('dtype = "float32"', 'dtype = "bfloat16"')), refused="CheckpointError", why_not=NO_EXPERTS),
    row("gate and up of experts exchanged", MLA, exchanged('"mlp.experts.{e}.gate_proj.weight"', '"mlp.experts.{e}.up_proj.weight"'), D1 + "mlp.experts.experts.linear_fc1.weight", words="gate and up exchanged", why_not=NO_EXPERTS),
    row("gate and up of the shared expert exchanged", MLA, exchanged('"mlp.shared_experts.gate_proj.weight"', '"mlp.shared_experts.up_proj.weight"'), D1 + "mlp.shared_experts.linear_fc1.weight", words="gate and up of the shared expert exchanged", why_not=NO_EXPERTS),
    row("halves of experts' down exchanged", MLA, replaced(('of = "rename",         experts', 'of = "gate_up_concat", experts')), refused="MappingError", why_not=NO_EXPERTS),
    row("one expert too few", MLA, replaced(('E  = "n_routed_experts"', 'E  = "n_routed_experts-1"')), refused="MtpLostError", why_not=NO_EXPERTS),
    # MTP alone
    row("MTP: halves of eh_proj exchanged, as MiMo has them", MLA, replaced(('{ op = "rename",  hf = "eh_proj.weight"', '{ op = "halves_swap",  hf = "eh_proj.weight"')), M0 + "eh_proj.weight", words="halves exchanged", why_not=NO_MTP),
    row("MTP: enorm and hnorm exchanged", MLA, exchanged('hf = "enorm.weight"', 'hf = "hnorm.weight"'), M0 + "enorm.weight", words="enorm and hnorm exchanged", why_not=NO_MTP),
    row("MTP: enorm and final norm exchanged", MLA, exchanged('hf = "enorm.weight"', 'hf = "shared_head.norm.weight"'), M0 + "enorm.weight", why_not=NO_MTP),
    row("MTP: norms turned in a ring", MLA, replaced(('hf = "enorm.weight"', 'hf = "X"'), ('hf = "hnorm.weight"', 'hf = "enorm.weight"'), ('hf = "shared_head.norm.weight"', 'hf = "hnorm.weight"'), ('hf = "X"', 'hf = "shared_head.norm.weight"')), M0 + "hnorm.weight", why_not=NO_MTP),
    row("MTP: gate and up of experts exchanged", MLA, in_mtp_only(exchanged('"mlp.experts.{e}.gate_proj.weight"', '"mlp.experts.{e}.up_proj.weight"')), T0 + "mlp.experts.experts.linear_fc1.weight", words="gate and up exchanged", why_not=NO_MTP),
    row("MTP: gate and up of the shared expert exchanged", MLA, in_mtp_only(exchanged('"mlp.shared_experts.gate_proj.weight"', '"mlp.shared_experts.up_proj.weight"')), T0 + "mlp.shared_experts.linear_fc1.weight", why_not=NO_MTP),
    row("MTP: input and feed-forward norms exchanged", MLA, in_mtp_only(exchanged('hf = "input_layernorm.weight"', 'hf = "post_attention_layernorm.weight"')), T0 + "input_layernorm.weight", why_not=NO_MTP),
    row("MTP: halves of o_proj exchanged", MLA, in_mtp_only(halves("self_attn.o_proj.weight")), T0 + "self_attention.linear_proj.weight", words="exchanged", why_not=NO_MTP),
    row("MTP: halves of the latent projection exchanged", MLA, in_mtp_only(halves("self_attn.q_a_proj.weight")), T0 + "self_attention.linear_q_down_proj.weight", words="halves exchanged", why_not=NO_MTP),
    row("MTP: another name on Megatron's side", MLA, replaced(('mcore = "eh_proj.weight"', 'mcore = "input_proj.weight"')), M0 + "eh_proj.weight", code="mtp-tensor-missing", why_not=NO_MTP),
    row("MTP: written as a trunk layer", MLA, replaced(('"mtp.layers.{i}.transformer_layer."', '"decoder.layers.{num_hidden_layers+i}."'), ('"mtp.layers.{i}."', '"decoder.layers.{num_hidden_layers+i}."')), M0 + "*", code="mtp-layer-missing", why_not=NO_MTP),
    row("MTP: layers numbered from 1", MLA, replaced(('"mtp.layers.{i}.transformer_layer."', '"mtp.layers.{i+1}.transformer_layer."'), ('"mtp.layers.{i}."', '"mtp.layers.{i+1}."')), M0 + "*", code="mtp-layer-missing", why_not=NO_MTP),
    row("MTP: the row of enorm lacking", MLA, row_of("enorm.weight"), refused="MtpLostError", why_not=NO_MTP),
    row("MTP: the router's bias lacking", MLA, in_mtp_only(row_of("mlp.gate.e_score_correction_bias")), refused="MtpLostError", why_not=NO_MTP),
    row("MTP: only the first layer placed", MLA, replaced(('mtp    = ["0", "mtp_layers"]', 'mtp    = ["0", "1"]')), refused="MtpLostError", why_not=NO_MTP),
    row("MTP: places lacking", MLA, replaced(('each  = "mtp"\nhf    = "model.layers.{num_hidden_layers+i}."\nmcore = "mtp.layers.{i}.transformer_layer."', 'each  = "moe"\nhf    = "model.layers.{i}."\nmcore = "decoder.layers.{i}."')), refused="NotABijectionError", why_not=NO_MTP),
    row("MTP: no [mtp] table", MLA, without_mtp_table, refused="MtpLostError", why_not=NO_MTP),
    row("MTP: looked for under another prefix", MLA, replaced(('present = "model.layers.{num_hidden_layers+i}."', 'present = "model.mtp_layers.{i}."')), refused="MtpLostError", why_not=NO_MTP),
    row("MTP: sources of the two copies exchanged", MLA, exchanged('source = "model.embed_tokens.weight", dims', 'source = "lm_head.weight",            dims'), refused="NotRepresentableError", why_not=NO_MTP),
]  # fmt: skip
