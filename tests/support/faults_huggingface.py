# ruff: noqa: E501 (the table)
"""Faults in a Hugging Face directory against its unharmed original, after field reports (numbers in names)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.sabotage import (
    Harm,
    change_tensor,
    config,
    drop,
    edit_json,
    edit_shard,
    exchange,
    index,
    reindex,
    rename,
    shards,
)
from tests.support.tiny import INDEX, read_safetensors, write_safetensors

FAMILY = "deepseek_v3"
L3, L1 = "model.layers.3.", "model.layers.1."


class Fault(NamedTuple):
    """``tensor``: the one that must be named. ``words`` of the finding's message."""

    harm: Harm
    code: str
    tensor: str | None = None
    words: str = ""


def truncate(root: Path) -> None:
    path = shards(root)[1]
    path.write_bytes(path.read_bytes()[:-1])


def truncate_header(root: Path) -> None:
    path = shards(root)[1]
    path.write_bytes(path.read_bytes()[:40])


def long_header(root: Path) -> None:
    path = shards(root)[1]
    path.write_bytes((1 << 30).to_bytes(8, "little") + path.read_bytes()[8:])


def trailing(root: Path) -> None:
    path = shards(root)[0]
    path.write_bytes(path.read_bytes() + b"\0\0\0\0")


def header_twice(root: Path) -> None:
    path = shards(root)[0]
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    table = json.loads(blob[8 : 8 + length])
    name = next(name for name in table if name != "__metadata__")
    raw = (json.dumps(table)[:-1] + f', "{name}": {json.dumps(table[name])}}}').encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + blob[8 + length :])


def hole(root: Path) -> None:
    path = shards(root)[0]
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    table = json.loads(blob[8 : 8 + length])
    last = max((k for k in table if k != "__metadata__"), key=lambda k: table[k]["data_offsets"][0])
    start, stop = table[last]["data_offsets"]
    table[last]["data_offsets"] = [start + 8, stop + 8]
    raw = json.dumps(table).encode()
    path.write_bytes(
        len(raw).to_bytes(8, "little")
        + raw
        + blob[8 + length : 8 + length + start]
        + bytes(8)
        + blob[8 + length + start :]
    )


def stray(root: Path) -> None:
    write_safetensors(root / "model-00003-of-00004.safetensors", {"x": ("F32", (1,), bytes(4))})


def two_files(root: Path) -> None:
    name = L3 + "enorm.weight"
    write_safetensors(root / "mtp.safetensors", {name: read_safetensors(root)[name]})


def extra_norm(root: Path) -> None:
    edit_shard(shards(root)[2], lambda t: t.update({L3 + "main_norm.weight": t[L3 + "enorm.weight"]}))
    reindex(root)


def lost_shard_with_index(root: Path) -> None:
    shards(root)[2].unlink()
    reindex(root)


def ghost(table: dict[str, Any]) -> None:
    table["weight_map"][L3 + "eh_proj.weigth"] = table["weight_map"][L3 + "eh_proj.weight"]


FAULTS: dict[str, Fault] = {
    # A: MTP dropped
    "all MTP (4)": Fault(drop(lambda n: n.startswith(L3)), "mtp-none-found", None, "config declares 1 MTP layer; 0 of 32 tensors present (expected under model.layers.3.)"),
    "MTP layer": Fault(drop(lambda n: n.startswith(L3)), "mtp-layer-missing", L3 + "*"),
    "one MTP tensor": Fault(drop(lambda n: n == L3 + "eh_proj.weight"), "mtp-tensor-missing", L3 + "eh_proj.weight"),
    "MTP experts": Fault(drop(lambda n: n.startswith(L3 + "mlp.experts.")), "mtp-tensor-missing", L3 + "mlp.experts.0.up_proj.weight"),
    "one MTP expert": Fault(drop(lambda n: n.startswith(L3 + "mlp.experts.2.")), "expert-set", L3 + "mlp.experts.*"),
    "MTP router bias (95)": Fault(drop(lambda n: n == L3 + "mlp.gate.e_score_correction_bias"), "mtp-tensor-missing", L3 + "mlp.gate.e_score_correction_bias"),
    "MTP copy of the head (49)": Fault(drop(lambda n: n == L3 + "shared_head.head.weight"), "mtp-tensor-missing", L3 + "shared_head.head.weight", "no numbers are lost"),
    # B: collateral loss
    "shard with MTP (20)": Fault(lost_shard_with_index, "trunk-lost-with-mtp", None, "trunk tensors were lost with its 32 MTP tensors"),
    "shard with MTP, named": Fault(lost_shard_with_index, "tensor-missing", "lm_head.weight"),
    "ghost entry (25)": Fault(index(ghost), "index-ghost", L3 + "eh_proj.weigth", "nearest name there: model.layers.3.eh_proj.weight"),
    # C: names
    "MTP renamed to the trunk's next layer (32)": Fault(rename(lambda n: n.replace(L3, "model.layers.4.")), "tensor-renamed", "model.layers.4.eh_proj.weight"),
    "unknown MTP tensor (35)": Fault(extra_norm, "mtp-tensor-unexpected", L3 + "main_norm.weight"),
    # D: counts
    "count 0 (40)": Fault(config(lambda c: c.update(num_nextn_predict_layers=0)), "mtp-count-mismatch", None, "says 0, 1 MTP layers are stored"),
    "count 2": Fault(config(lambda c: c.update(num_nextn_predict_layers=2)), "mtp-count-mismatch", None, "says 2"),
    "count null (10)": Fault(config(lambda c: c.update(num_nextn_predict_layers=None)), "mtp-count-null"),
    "count absent": Fault(config(lambda c: c.pop("num_nextn_predict_layers")), "mtp-count-changed", None, "was 1 and is (absent)"),
    "count nested": Fault(config(lambda c: c.update(text_config={"mtp_num_hidden_layers": 3})), "mtp-count-contradiction", None, "text_config.mtp_num_hidden_layers = 3"),
    "layers minus one": Fault(config(lambda c: c.update(num_hidden_layers=2)), "config-changed", None, "num_hidden_layers was 3 and is 2"),
    # E: MTP internals
    "MTP halves": Fault(change_tensor(L3 + "eh_proj.weight", lambda x: np.roll(x, x.shape[1] // 2, 1)), "bytes-differ", L3 + "eh_proj.weight", "halves exchanged"),
    "enorm and hnorm": Fault(exchange(L3 + "enorm.weight", L3 + "hnorm.weight"), "bytes-differ", L3 + "hnorm.weight", "enorm and hnorm exchanged"),
    "own head overwritten (52)": Fault(change_tensor(L3 + "shared_head.head.weight", lambda x: x[::-1]), "copy-differs", L3 + "shared_head.head.weight"),
    "MTP norm of the trunk": Fault(lambda root: edit_shard(shards(root)[2], lambda t: t.update({L3 + "shared_head.norm.weight": t["model.norm.weight"]})), "bytes-differ", L3 + "shared_head.norm.weight", "final_norm"),
    # G: files
    "shard lost (68)": Fault(lambda root: shards(root)[1].unlink(), "index-missing-file"),
    "shard lost, set": Fault(lambda root: shards(root)[1].unlink(), "shard-set-incomplete", None, "2 of 3"),
    "index lists less (8)": Fault(index(lambda t: t["weight_map"].pop(L3 + "enorm.weight")), "index-unlisted", L3 + "enorm.weight"),
    "index without metadata (70)": Fault(index(lambda t: t.pop("metadata")), "index-no-total-size"),
    "total_size wrong": Fault(index(lambda t: t["metadata"].update(total_size=7)), "index-total-size", None, "says 7"),
    "total_size null": Fault(index(lambda t: t["metadata"].update(total_size=None)), "index-no-total-size"),
    "index broken": Fault(lambda root: (root / INDEX).write_text("{") and None, "index-unreadable"),
    "index gone": Fault(lambda root: (root / INDEX).unlink(), "index-absent"),
    "stray shard (73)": Fault(stray, "file-stray"),
    "two shard sets": Fault(stray, "shard-set-incomplete", None, "another set"),
    "truncated (76)": Fault(truncate, "file-truncated"),
    "header truncated": Fault(truncate_header, "file-unreadable"),
    "header too long": Fault(long_header, "file-unreadable"),
    "trailing bytes (77)": Fault(trailing, "file-trailing", None, "4 bytes after"),
    "hole": Fault(hole, "file-layout", None, "hole of 8 bytes"),
    "name twice in a header": Fault(header_twice, "name-duplicate"),
    "name in two files (80)": Fault(two_files, "name-duplicate", L3 + "enorm.weight"),
    # H, I
    "gate and up": Fault(exchange("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"), "bytes-differ", "model.layers.0.mlp.up_proj.weight", "gate and up exchanged"),
    "experts": Fault(exchange(L1 + "mlp.experts.0.down_proj.weight", L1 + "mlp.experts.3.down_proj.weight"), "bytes-differ", L1 + "mlp.experts.3.down_proj.weight", "experts 0 and 3 exchanged"),
    "layers": Fault(exchange(L1 + "self_attn.o_proj.weight", "model.layers.2.self_attn.o_proj.weight"), "bytes-differ", L1 + "self_attn.o_proj.weight", "trunk layer 2"),
    "MTP for trunk": Fault(exchange("model.layers.2.self_attn.o_proj.weight", L3 + "self_attn.o_proj.weight"), "bytes-differ", L3 + "self_attn.o_proj.weight", "trunk layer 2"),
    "bit": Fault(change_tensor("model.norm.weight", lambda x: x ^ np.where(np.arange(x.size) == 5, 1, 0).astype(x.dtype)), "bytes-differ", "model.norm.weight", "one bit flipped"),
    "minus zero": Fault(change_tensor("model.norm.weight", lambda x: np.where(np.arange(x.size) == 5, 0x8000, x).astype(x.dtype)), "bytes-differ", "model.norm.weight", "one element changed"),
    # J: dtypes
    "bias rounded (97)": Fault(change_tensor(L1 + "mlp.gate.e_score_correction_bias", lambda x: x & np.uint32(0xFFFF0000)), "narrowed", L1 + "mlp.gate.e_score_correction_bias", "rounded to bfloat16"),
    "bias as bfloat16": Fault(change_tensor(L1 + "mlp.gate.e_score_correction_bias", lambda x: (x >> 16).astype("<u2"), "BF16"), "narrowed", L1 + "mlp.gate.e_score_correction_bias", "distinct values became"),
    "widened (101)": Fault(change_tensor("model.norm.weight", lambda x: x.astype("<u4") << 16, "F32"), "dtype-changed", "model.norm.weight", "0 of 36 values changed"),
    "all widened, config": Fault(config(lambda c: c.update(dtype="float32")), "dtype-config"),
    # L
    "rows fewer than vocab (118)": Fault(config(lambda c: c.update(vocab_size=120)), "vocab-rows", "lm_head.weight"),
    "head gone (115)": Fault(drop(lambda n: n == "lm_head.weight"), "head-missing"),
    "tied and different": Fault(config(lambda c: c.update(tie_word_embeddings=True)), "copy-differs", "lm_head.weight"),
    # N
    "tokenizer gone (134)": Fault(lambda root: (root / "tokenizer.json").unlink(), "side-file-missing", None, "tokenizer.json"),
    "generation config changed": Fault(lambda root: edit_json(root / "generation_config.json", lambda t: t.update(x=1)), "side-file-changed"),
    "code gone (133)": Fault(lambda root: (config(lambda c: c.update(auto_map={"AutoModel": "modeling_y.Model"}))(root)), "remote-code-missing", None, "modeling_y.py"),
    "layer list (136)": Fault(config(lambda c: c.update(layer_types=["full_attention"] * 7)), "layer-list-length", None, "7 entries"),
    "rope changed": Fault(config(lambda c: c["rope_parameters"].update(rope_theta=5.0)), "config-changed", None, "rope_parameters.rope_theta"),
    "config gone": Fault(lambda root: (root / "config.json").unlink(), "config-missing"),
    # O, G 74
    "prefix doubled (137)": Fault(rename(lambda n: n.replace("model.", "model.model.", 1)), "mass-mismatch", None, "'model.' was put in front of 98 names"),
    "segment repeated": Fault(rename(lambda n: n.replace("model.", "model.model.", 1)), "segment-repeated"),
    "one renamed (139)": Fault(rename(lambda n: n.replace("model.embed_tokens", "model.embed_token")), "tensor-renamed", "model.embed_token.weight"),
    "rows permuted (149)": Fault(change_tensor("lm_head.weight", lambda x: x[np.random.default_rng(1).permutation(len(x))]), "bytes-differ", "lm_head.weight", "permuted"),
    "router rows rotated": Fault(change_tensor(L1 + "mlp.gate.weight", lambda x: x[[2, 0, 1, 3]]), "bytes-differ", L1 + "mlp.gate.weight", "experts"),
    # F, K
    "fp8 config on plain weights (104)": Fault(config(lambda c: c.update(quantization_config={"quant_method": "fp8"})), "quant-stale-config", None, "remove quantization_config"),
}  # fmt: skip
