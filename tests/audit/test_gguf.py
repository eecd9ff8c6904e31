"""GGUF against GGUF, as bytes: written by the ``gguf`` package, harmed by hand; MTP (``nextn``) counted and missed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.readers.gguf import PACKED
from mtpconvert.audit.report_model import Report
from tests.support.command_line import Run, run
from tests.support.tiny import write_tiny

gguf = pytest.importorskip("gguf")
__all__ = ["run"]
Types = gguf.GGMLQuantizationType
MTP = "blk.2."
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def write(path: Path, change: Change = lambda tensors, keys: None, split: int = 0) -> Path:
    """Two trunk layers and one MTP layer of a "glm4moe". Tensors: name -> (array, type of packed bytes or None)."""
    draw = np.random.default_rng(1)
    tensors: dict[str, Any] = {"token_embd.weight": (draw.standard_normal((40, 64)).astype(np.float16), None)}
    for layer in range(3):
        stem = f"blk.{layer}."
        tensors[stem + "attn_norm.weight"] = (draw.standard_normal(64).astype(np.float32), None)
        tensors[stem + "attn_q.weight"] = (draw.integers(0, 256, (32, 64 // 32 * 18), dtype=np.uint8), Types.Q4_0)
        tensors[stem + "ffn_up.weight"] = (draw.integers(0, 256, (16, 64 // 32 * 34), dtype=np.uint8), Types.Q8_0)
    tensors[MTP + "nextn.eh_proj.weight"] = (draw.integers(0, 256, (64, 128 // 32 * 34), dtype=np.uint8), Types.Q8_0)
    for norm in ("enorm", "hnorm"):
        tensors[f"{MTP}nextn.{norm}.weight"] = (draw.standard_normal(64).astype(np.float32), None)
    keys = {"block_count": 3, "nextn_predict_layers": 1, "tokens": ["a", "é", "b"]}
    change(tensors, keys)
    writer = gguf.GGUFWriter(path, "glm4moe", split_max_tensors=split)
    writer.add_block_count(keys["block_count"])
    if keys["nextn_predict_layers"] is not None:
        writer.add_uint32("glm4moe.nextn_predict_layers", keys["nextn_predict_layers"])
    writer.add_token_list(keys["tokens"])
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def found(report: Report) -> set[tuple[str, str | None]]:
    return {(fault.code, fault.tensor) for fault in report.failing("warning")}


def test_the_sizes_of_blocks_are_those_of_the_package() -> None:
    sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: entry for kind, entry in sizes.items() if kind in PACKED} == PACKED


@pytest.mark.parametrize("level", ["headers", "bits"])
def test_a_copy_passes_and_mtp_is_counted(tmp_path: Path, level: str) -> None:
    report = audit(write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf"), level=level)
    assert found(report) == set() and report.tensors == 13
    nbytes = 3 * 64 * 4 + 32 * 36 + 16 * 68 + 64 * 4 * 34
    assert report.mtp.left == report.mtp.right == {"layers": 1, "tensors": 6, "bytes": nbytes}
    assert "metadata declares 1 MTP layer; 1 MTP layer present, 6 tensors" in report.mtp.sentences[1]
    assert "6 of 6 tensors present under blk.2." in report.mtp.layers[0].sentence


def byte(tensors: dict[str, Any], name: str) -> None:
    array, kind = tensors[name]
    array = array.copy()
    array.reshape(-1).view(np.uint8)[-1] ^= 1
    tensors[name] = (array, kind)


def without(tensors: dict[str, Any], start: str) -> None:
    for name in [name for name in tensors if name.startswith(start)]:
        del tensors[name]


HARM: dict[str, tuple[Change, set[tuple[str, str | None]]]] = {
    "a byte of a packed tensor": (
        lambda t, k: byte(t, MTP + "nextn.eh_proj.weight"), {("bytes-differ", MTP + "nextn.eh_proj.weight")},
    ),
    "a bit of a norm": (lambda t, k: byte(t, "blk.0.attn_norm.weight"), {("bytes-differ", "blk.0.attn_norm.weight")}),
    "one MTP tensor": (
        lambda t, k: t.pop(MTP + "nextn.hnorm.weight"), {("mtp-tensor-missing", MTP + "nextn.hnorm.weight")},
    ),
    "count of MTP lost": (
        lambda t, k: k.update(nextn_predict_layers=None), {("config-changed", None), ("mtp-undeclared", None)},
    ),
    "count of MTP wrong": (
        lambda t, k: k.update(nextn_predict_layers=2, block_count=4),
        {("config-changed", None), ("mtp-count-mismatch", None)},
    ),
    "a token": (lambda t, k: k.update(tokens=["a", "e", "b"]), {("config-changed", None)}),
    "another type of as many bytes": (
        lambda t, k: t.update({MTP + "attn_q.weight": (t[MTP + "attn_q.weight"][0], Types.IQ4_NL)}),
        {("dtype-changed", MTP + "attn_q.weight")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_harm_is_found(tmp_path: Path, harm: str) -> None:
    change, expected = HARM[harm]
    assert found(audit(write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf", change))) == expected


def test_lost_mtp_is_named_layer_by_layer(tmp_path: Path) -> None:
    report = audit(write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf", lambda t, k: without(t, MTP)))
    codes = {fault.code for fault in report.failing("error")}
    assert codes == {"mtp-layer-missing", "mtp-none-found", "mtp-tensor-missing"}
    assert "0 of 6 tensors present (expected under blk.2.)" in report.mtp.sentences[1]


def test_a_split_model_equals_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    write(tmp_path / "split" / "m.gguf", split=5)
    assert len(list((tmp_path / "split").iterdir())) == 3
    report = audit(write(tmp_path / "whole.gguf"), tmp_path / "split")
    assert {fault.code for fault in report.failing("warning")} <= {"config-changed"} and report.tensors == 13


def test_damaged_files_are_findings_and_never_a_traceback(tmp_path: Path, run: Run) -> None:
    left = write(tmp_path / "a.gguf")
    blob = left.read_bytes()
    cases = {
        "short": blob[:-40], "trailing": blob + bytes(64), "magic": b"GGML" + blob[4:], "empty": b"",
        "version": blob[:4] + struct.pack("<I", 1) + blob[8:], "count": blob[:8] + b"\xff" * 8 + blob[16:],
    }  # fmt: skip
    codes = {"short": "file-truncated", "trailing": "file-trailing"}
    for name, content in cases.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        report = audit(left, tmp_path / f"{name}.gguf")
        assert codes.get(name, "file-unreadable") in {fault.code for fault in report.failing("error")}, name
    rng = np.random.default_rng(2)
    for _ in range(60):
        harmed = bytearray(blob[:700])
        for _ in range(3):
            harmed[int(rng.integers(4, 700))] = int(rng.integers(256))
        (tmp_path / "x.gguf").write_bytes(bytes(harmed) + blob[700:])
        audit(left, tmp_path / "x.gguf", level="headers")
    assert run("audit", left, tmp_path / "magic.gguf").code == 1


def test_gguf_against_another_kind_is_an_error_that_says_so(tmp_path: Path) -> None:
    report = audit(write_tiny("qwen3", tmp_path / "hf"), write(tmp_path / "a.gguf"))
    assert {"architecture-unknown", "nothing-compared"} <= {fault.code for fault in report.failing("error")}


def test_inspect_counts_its_mtp_and_a_conversion_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    file = write(tmp_path / "gguf" / "model.gguf")
    shown = run("inspect", file)
    assert shown.code == 0, shown.err
    assert shown.out.startswith(f"{file}: GGUF; glm4moe, no mapping for it\n13 tensors, ")
    assert "types: 5 F32, 4 Q8_0, 3 Q4_0, 1 F16" in shown.out  # q of each layer is Q4_0; up and eh_proj are Q8_0
    assert shown.last_line.startswith("MTP layers: declared 1 (nextn_predict_layers), present 1; 6 tensors")
    assert "use the safetensors checkpoint that it was made from" in shown.err
    assert run("inspect", file.parent, "--json").json["mtp"]["present"] == 1  # the folder of a split model too
    refused = run("hf2mcore", file.parent, tmp_path / "out")
    assert (refused.code, "GGUF files only" in refused.err) == (6, True), refused.err
    file.write_bytes(file.read_bytes()[:40])
    broken = run("inspect", file)
    assert (broken.code, "no readable GGUF header" in broken.err) == (6, True)
