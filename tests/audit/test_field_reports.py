"""Public bug reports (classes A to Q, an offline tool's share of them): the smallest input that shows each, and the
right verdict. Numbers are those of the collection; those in the fault table's names (``"ghost entry (25)"``) count too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.report_model import Report
from mtpconvert.audit.waivers import Waiver
from mtpconvert.errors import CheckpointError
from tests.support.faults_huggingface import FAULTS
from tests.support.handmade import Arrays, megatron_args, megatron_arrays, read_arrays, write_torch_dist
from tests.support.sabotage import change_tensor, config, drop, edit_json, exchange, index, rename
from tests.support.tiny import read_safetensors, write_safetensors, write_tiny

CLASSES = {
    "A": (1, 19), "B": (20, 27), "C": (28, 39), "D": (40, 46), "E": (47, 60), "F": (61, 66), "G": (67, 81),
    "H": (82, 87), "I": (88, 94), "J": (95, 102), "L": (112, 120), "N": (133, 136), "O": (137, 141), "Q": (148, 152),
}  # fmt: skip
L3, EXPERTS = "model.layers.3.", "model.layers.1.mlp.experts."
Q0_MTP = ["mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight",
          "mtp.layers.0.self_attn.o_proj.weight"]  # fmt: skip
Q0_TRUNK = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
            *(f"model.layers.{n}.self_attn.o_proj.weight" for n in range(2))]  # fmt: skip


def q0(root: Path, count: Any = 1, *, shards: int = 1) -> Path:
    """Qwen style: prefixed MTP, its count under text_config; MTP spread over all shards."""
    root.mkdir(parents=True)
    names = [name for pair in zip(Q0_TRUNK, Q0_MTP, strict=True) for name in pair]
    weight_map = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = {n: ("BF16", (4, 4), bytes([names.index(n) + 1, 0x3C] * 16)) for n in names[shard::shards]}
        write_safetensors(root / file, mine)
        weight_map |= dict.fromkeys(mine, file)
    table = {"metadata": {"total_size": 32 * len(names)}, "weight_map": weight_map}
    if shards > 1:
        (root / "model.safetensors.index.json").write_text(json.dumps(table))
    text = {"num_hidden_layers": 2, "mtp_num_hidden_layers": count, "vocab_size": 4}
    (root / "config.json").write_text(json.dumps({"architectures": ["XForCausalLM"], "text_config": text}))
    return root


def copy(left: Path) -> Path:
    return Path(shutil.copytree(left, left.with_name("right")))


def m0(tmp: Path, harm: Callable[[Path], None], **more: Any) -> Report:
    """DeepSeek style, experts and inline MTP; ``harm`` done to a copy."""
    left = write_tiny("deepseek_v3", tmp / "left", **more)
    right = copy(left)
    harm(right)
    return audit(left, right)


def megatron(tmp: Path, family: str, change: Callable[[Arrays, dict[str, Any]], Any], **more: Any) -> Report:
    left = write_tiny(family, tmp / "left", **more)
    table = json.loads((left / "config.json").read_text())
    arrays, arguments = (
        megatron_arrays(read_arrays(left), table, rows=128),
        megatron_args(table, 128) | {"vocab_size": 98},
    )
    change(arrays, table)
    write_torch_dist(tmp / "right", arrays, arguments)
    return audit(left, tmp / "right")


def respelt(arrays: Arrays, only: str = "") -> None:
    for name in [name for name in arrays if "transformer_layer" in name and only in name]:
        arrays[name.replace("transformer_layer", "mtp_model_layer")] = arrays.pop(name)


def says(report: Report, code: str, words: str = "", severity: str = "error") -> None:
    found = [f for f in report.findings if f.code == code and words in f"{f.tensor} {f.message}"]
    assert found, [(f.code, f.tensor, f.message) for f in report.findings]
    assert found[0].severity.label == severity


def clean(report: Report) -> None:
    assert report.tensors > 0
    assert report.verdict("warning") == "pass", [f.message for f in report.failing("warning")]


# ---- A: MTP dropped


def report_5(tmp: Path) -> None:
    """Fine-tuned Qwen without ``mtp.*`` beside a nested count."""
    left = q0(tmp / "left")
    drop(lambda n: n.startswith("mtp."), fix_index=False)(copy(left))
    report = audit(left, tmp / "right", level="headers")
    says(report, "mtp-none-found", "config declares 1 MTP layer; 0 of 5 tensors present (expected under mtp.)")


def report_8(tmp: Path) -> None:
    """A source that cannot be listed is no source with 0 MTP tensors; a tensor that the index lacks is seen."""
    left = q0(tmp / "left", shards=3)
    with pytest.raises(CheckpointError):
        audit(tmp / "hub" / "id", left)
    index(lambda t: t["weight_map"].pop("mtp.fc.weight"))(copy(left))
    report = audit(left, tmp / "right")
    says(report, "index-unlisted", "mtp.fc.weight")
    assert report.mtp.right["tensors"] == 5


def report_10(tmp: Path) -> None:
    left = q0(tmp / "left", None, shards=3)
    report = audit(left, left)
    says(report, "mtp-count-null", "text_config.mtp_num_hidden_layers is null; the names say 1", "warning")
    assert report.mtp.right["layers"] == 1


def report_17(tmp: Path) -> None:
    """Dropped by request: an accepted waiver, shown."""
    left = write_tiny("deepseek_v3", tmp / "left")
    right = copy(left)
    drop(lambda n: n.startswith(L3))(right)
    edit_json(right / "config.json", lambda t: t.update(num_nextn_predict_layers=0))
    codes = {"mtp-layer-missing": L3 + "*", "mtp-tensor-missing": L3 + "*", "mtp-count-changed": None}
    report = audit(left, right, waivers=[Waiver(c, t, "DROPPED BY REQUEST") for c, t in codes.items()])
    assert report.verdict() == "pass"
    assert sum(f.waived_by == "DROPPED BY REQUEST" for f in report.findings) == 34


# ---- B: collateral loss


def report_22(tmp: Path) -> None:
    """The named waiver is for MTP; the trunk tensors of the lost shard still fail."""

    def harm(right: Path) -> None:
        sorted(right.glob("*.safetensors"))[-1].unlink()
        drop(lambda n: False)(right)

    report = m0(tmp, harm)
    says(report, "trunk-lost-with-mtp", "were lost with its 32 MTP tensors")
    says(report, "tensor-missing", "model.norm.weight")


def report_23(tmp: Path) -> None:
    """MTP in every shard: all of them are lost. One line says so, not thousands."""
    left = q0(tmp / "left", shards=3)
    right = copy(left)
    for path in right.glob("*.safetensors"):
        write_safetensors(path, {})
    index(lambda t: t.update(weight_map={}, metadata={"total_size": 0}))(right)
    report = audit(left, right)
    says(report, "nothing-compared")
    assert sum(f.code == "trunk-lost-with-mtp" for f in report.findings) == 3


def report_26(tmp: Path) -> None:
    """All three MTP layers are gone, not only the first."""
    report = megatron(
        tmp, "deepseek_v3", lambda a, c: [a.pop(n) for n in list(a) if n.startswith("mtp.")], mtp_layers=3
    )
    lost = [f.tensor for f in report.findings if f.code == "mtp-layer-missing"]
    assert lost == ["mtp.layers.0.*", "mtp.layers.1.*", "mtp.layers.2.*"]


# ---- C: names


def report_28(tmp: Path) -> None:
    """Either spelling is read; both in one checkpoint are ambiguous."""
    clean(megatron(tmp / "a", "deepseek_v3", lambda a, c: respelt(a)))
    says(megatron(tmp / "b", "deepseek_v3", lambda a, c: respelt(a, "linear_proj")), "spelling-mixed")


def report_34(tmp: Path) -> None:
    left = write_tiny("deepseek_v3", tmp / "left")
    rename(lambda n: n.replace("model.", "model.language_model.", 1))(left)
    report = audit(left, left)
    assert report.mtp.right == {"layers": 1, "tensors": 32, "bytes": 47828}
    assert report.mtp.layers[0].prefix == "model.language_model.layers.3."


def report_37(tmp: Path) -> None:
    """Layer 0 written twice: the second layer holds the first one's numbers."""

    def harm(right: Path) -> None:
        tensors = read_safetensors(right)
        for name in [n for n in tensors if n.startswith("model.layers.4.")]:
            value = np.frombuffer(tensors[name.replace("layers.4.", "layers.3.")][2], "<u2")
            if tensors[name][0] == "BF16":
                change_tensor(name, lambda x, v=value: v.reshape(x.shape))(right)

    says(m0(tmp, harm, mtp_layers=2), "bytes-differ", "holds the values of MTP layer 0")


# ---- D: counts


def report_41(tmp: Path) -> None:
    """One stored layer applied twice: the count may be either, if the config says that the layer is repeated."""
    left = q0(tmp / "left", 2)
    says(audit(left, left), "mtp-count-mismatch", "says 2, 1 MTP layers are stored")
    edit_json(left / "config.json", lambda t: t.update(mtp_use_repeated_layer=True))
    clean(audit(left, shutil.copytree(left, tmp / "copy")))


def report_43(tmp: Path) -> None:
    left = q0(tmp / "left", 3)
    says(audit(left, left), "mtp-count-mismatch", "text_config.mtp_num_hidden_layers says 3, 1 MTP layers are stored")


# ---- E: inside MTP


def report_50(tmp: Path) -> None:
    """With copies of embedding and head or without: both are whole; a lost copy is said to lose no numbers."""
    clean(m0(tmp / "a", lambda right: None, copies=False))
    copies = (L3 + "embed_tokens.weight", L3 + "shared_head.head.weight")
    says(m0(tmp / "b", drop(lambda n: n in copies)), "mtp-tensor-missing", "no numbers are lost")


def report_56(tmp: Path) -> None:
    """[embedding ; hidden] on both sides: the same order is right, the paper's is not."""
    clean(megatron(tmp / "a", "deepseek_v3", lambda a, c: None))
    name = "mtp.layers.0.eh_proj.weight"
    turned = megatron(
        tmp / "b", "deepseek_v3", lambda a, c: a.update({name: np.roll(a[name], a[name].shape[1] // 2, 1)})
    )
    says(turned, "bytes-differ", "halves exchanged")


def report_58(tmp: Path) -> None:
    """Transposed: a shape when it is oblong, only bytes when it is square."""
    says(m0(tmp / "a", change_tensor(L3 + "eh_proj.weight", lambda x: x.T)), "shape-mismatch", "transposed")
    sizes = {"num_attention_heads": 4, "v_head_dim": 9}  # o_proj [36, 36]
    square = m0(tmp / "b", change_tensor(L3 + "self_attn.o_proj.weight", lambda x: x.T), config_overrides=sizes)
    says(square, "bytes-differ", "transposed")


# ---- F: quantisation


def report_61(tmp: Path) -> None:
    """The exclude list names the layer and forgets ``mtp.fc``."""
    left = q0(tmp / "left")
    packed = {n: v for n, v in read_safetensors(left).items() if n.startswith("mtp.")}
    for n in range(2):
        packed[f"model.layers.{n}.self_attn.o_proj.weight_packed"] = ("U8", (4, 2), bytes(range(1, 9)))
        packed[f"model.layers.{n}.self_attn.o_proj.weight_scale"] = ("F32", (1,), bytes(4))
    write_safetensors(left / "model.safetensors", packed)
    scheme = {"quant_method": "modelopt", "exclude": ["mtp.layers.0*"]}
    config(lambda c: c.update(quantization_config=scheme))(left)
    says(audit(left, left), "quant-mtp-plain", '"mtp.fc"')


def report_64(tmp: Path) -> None:
    left = q0(tmp / "left")
    tensors = {n: v for n, v in read_safetensors(left).items() if not n.startswith("model.layers.")}
    tensors["model.layers.0.self_attn.o_proj.weight_packed"] = ("U8", (4, 2), bytes(range(1, 9)))
    write_safetensors(left / "model.safetensors", tensors)
    config(lambda c: c.update(quantization_config={"quant_method": "modelopt"}))(left)
    says(audit(left, left), "quant-mtp-plain", "mtp.layers.0")


# ---- H: fused layouts


def grouped(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return x.reshape(c["num_key_value_heads"], -1, c.get("head_dim", 6), *x.shape[1:])


def report_82(tmp: Path) -> None:
    """Right without groups, wrong with them; and the two halves of fc1 by two ranks."""
    qkv, fc1 = "decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"

    def concatenate(a: Arrays, c: dict[str, Any]) -> None:
        g = grouped(a[qkv], c)
        a[qkv] = np.concatenate([part.reshape(-1, g.shape[-1]) for part in (g[:, :-2], g[:, -2], g[:, -1])])

    report = megatron(tmp / "a", "qwen3", concatenate)
    says(report, "bytes-differ", "query groups concatenated instead of interleaved")
    says(report, "bytes-differ", "kv_head 0")

    def ranks(a: Arrays, c: dict[str, Any]) -> None:
        a[fc1] = np.ascontiguousarray(a[fc1].reshape(2, 2, -1, a[fc1].shape[1]).swapaxes(0, 1)).reshape(a[fc1].shape)

    says(megatron(tmp / "b", "llama", ranks), "bytes-differ", "interleaved by 2 tensor-parallel ranks")


def report_86(tmp: Path) -> None:
    """Gate rows behind q, k, v: nobody described them, so nobody may pass them over."""
    qkv = "decoder.layers.1.self_attention.linear_qkv.weight"
    report = megatron(tmp, "qwen3", lambda a, c: a.update({qkv: np.concatenate([a[qkv], a[qkv][:4]])}))
    says(report, "role-overlap", qkv)


# ---- I: experts


def report_88(tmp: Path) -> None:
    """Local numbers for global ones: experts 2 and 3 are gone."""
    says(
        m0(tmp, drop(lambda n: n.startswith((EXPERTS + "2.", EXPERTS + "3.")))), "expert-set", "[0, 1], expected 0 to 3"
    )


def report_89(tmp: Path) -> None:
    fc2 = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    report = megatron(tmp, "deepseek_v3", lambda a, c: a.update({fc2: a[fc2][[3, 3, 3, 3]]}))
    says(report, "bytes-differ", "misplaced")


# ---- J: dtypes


def report_98(tmp: Path) -> None:
    """The bias kept as it is: every tensor, every byte, no dtype changed."""
    report = m0(tmp, lambda right: None)
    clean(report)
    assert (report.tensors, report.nbytes) == (99, report.left.nbytes)


# ---- L: ties, heads, rows


def report_112(tmp: Path) -> None:
    """Tied and without a head under another prefix: fine, and said; untied it would be lost."""
    left = write_tiny("qwen2", tmp / "left")
    rename(lambda n: n.replace("model.", "model.language_model.", 1))(left)
    says(audit(left, left), "head-tied", "config says so, no tensor", "note")
    edit_json(left / "config.json", lambda t: t.update(tie_word_embeddings=False))
    says(audit(left, left), "head-missing")


def report_116(tmp: Path) -> None:
    """A tied model with its head stored all the same: equal is fine, another one is not."""
    left = write_tiny("qwen2", tmp / "left")
    table = read_safetensors(left)["model.embed_tokens.weight"]
    write_safetensors(left / "head.safetensors", {"lm_head.weight": table})
    index(lambda t: (t["weight_map"].update({"lm_head.weight": "head.safetensors"}),
                     t["metadata"].update(total_size=t["metadata"]["total_size"] + len(table[2]))))(left)  # fmt: skip
    clean(audit(left, shutil.copytree(left, tmp / "copy")))
    change_tensor("lm_head.weight", lambda x: x[::-1])(left)
    says(audit(left, left), "copy-differs", "lm_head.weight")


def added_tokens(right: Path) -> None:
    """Vocabulary 98 -> 100 in embedding and head, both new rows copies of the last one."""
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        L3 + "embed_tokens.weight",
        L3 + "shared_head.head.weight",
    ):
        change_tensor(name, lambda x: np.concatenate([x, x[-1:], x[-1:]]))(right)
    edit_json(right / "config.json", lambda t: t.update(vocab_size=100))


def report_119(tmp: Path) -> None:
    """New tokens that are copies of the last row; rows that were alike before are no news."""
    report = m0(tmp / "a", added_tokens)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        says(report, "rows-repeated", f"{name}: rows 98 to 99 repeat row 97 bit for bit", "warning")
    clean(audit(tmp / "a" / "right", shutil.copytree(tmp / "a" / "right", tmp / "copy")))
    one = m0(tmp / "b", change_tensor("lm_head.weight", lambda x: np.concatenate([x[:-1], x[-2:-1]])))
    says(one, "rows-repeated", "row 97 repeats row 96", "warning")
    trained = audit(tmp / "a" / "left", tmp / "a" / "right", trained=True)
    says(trained, "rows-repeated", "rows 98 to 99", "warning")


def report_119_in_megatron(tmp: Path) -> None:
    """Padding filled so is harmless, and a note of its own; the tokens it was taken for are not."""

    def pad(a: Arrays, c: dict[str, Any]) -> None:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            a[name] = np.concatenate([a[name][:98], np.repeat(a[name][97:98], 30, 0)])

    report = megatron(tmp, "qwen3", pad)
    assert {f.code for f in report.failing("warning")} == {"padding-nonzero"}
    exported = Path(shutil.copytree(tmp / "left", tmp / "exported"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        change_tensor(name, lambda x: np.concatenate([x, x[-1:], x[-1:]]))(exported)
    edit_json(exported / "config.json", lambda t: t.update(vocab_size=100))
    says(audit(tmp / "right", exported), "rows-repeated", "rows 98 to 99 repeat row 97", "warning")


# ---- N: side files


def report_136(tmp: Path) -> None:
    """A per-layer list counts the trunk, or the trunk and its MTP layers; nothing else."""
    clean(m0(tmp / "a", lambda right: None, config_overrides={"layer_types": ["full_attention"] * 4}))
    report = m0(tmp / "b", lambda right: None, config_overrides={"layer_types": ["full_attention"] * 5})
    says(report, "layer-list-length", "5 entries")


# ---- Q: not bit-exact


def report_148(tmp: Path) -> None:
    """One added to every norm but the last: fluent and worse. MTP's norms are norms too."""

    def harm(right: Path) -> None:
        for name in read_safetensors(right):
            if name.endswith("norm.weight") and name != "model.norm.weight":
                change_tensor(name, plus_one)(right)

    report = m0(tmp, harm, fill="normal")
    changed = {f.tensor for f in report.findings if f.code == "bytes-differ"}
    assert {L3 + "enorm.weight", L3 + "hnorm.weight", L3 + "shared_head.norm.weight"} < changed
    assert changed == {n for n in read_safetensors(tmp / "left") if n.endswith("norm.weight")} - {"model.norm.weight"}


def plus_one(bits: np.ndarray) -> np.ndarray:
    values = (bits.astype("<u4") << 16).view("<f4") + np.float32(1)
    return (values.view("<u4") >> 16).astype("<u2")


def report_149(tmp: Path) -> None:
    """Equal shapes and equal sums: rows that changed places."""
    report = m0(tmp, exchange(EXPERTS + "0.up_proj.weight", EXPERTS + "1.up_proj.weight"))
    says(report, "bytes-differ", "experts 0 and 1 exchanged")


REPORTS = {name.removeprefix("report_"): made for name, made in globals().items() if name.startswith("report_")}


@pytest.mark.parametrize("number", REPORTS)
def test_report(tmp_path: Path, number: str) -> None:
    REPORTS[number](tmp_path)


def test_every_class_has_two_reports() -> None:
    numbers = {int(name.split("_")[0]) for name in REPORTS}
    numbers |= {int(match[1]) for name in FAULTS if (match := re.search(r"\((\d+)\)$", name))}
    counted = {letter: sum(first <= n <= last for n in numbers) for letter, (first, last) in CLASSES.items()}
    assert min(counted.values()) >= 2, counted
