"""Drafts published as pickles: written by torch itself, read without it; damaged and hostile files run nothing."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtpconvert.audit.api import audit
from mtpconvert.audit.readers.opening import open_side
from mtpconvert.audit.report_model import Report
from mtpconvert.errors import CheckpointError
from tests.support.command_line import Run, run
from tests.support.draft_kinds import KINDS
from tests.support.sparse import write_headers
from tests.support.tiny import write_safetensors
from tests.support.torch_files import FORMS, rezipped, saved, state_dict, write_shards, write_torch, zipped

__all__ = ["run"]
BIN = "pytorch_model.bin"


def codes(report: Report) -> set[str]:
    return {found.code for found in report.failing("warning")}


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).reshape(-1)[-1] ^= 1


@pytest.mark.parametrize("kind", FORMS)
def test_a_copy_passes_and_the_draft_is_counted(kind: str, tmp_path: Path, run: Run) -> None:
    checkpoint = KINDS[kind]
    left = write_torch(tmp_path / "left", kind)
    for wrap in ("", "state_dict", "model"):
        right = write_torch(tmp_path / f"right {wrap}", kind, wrap=wrap)
        report = audit(left, right)
        assert codes(report) == set(), [found.message for found in report.findings]
        assert report.tensors == len(checkpoint.shapes)
        assert report.mtp.kinds == {"left": checkpoint.kind, "right": checkpoint.kind}
        assert all(row.equal == row.expected for row in report.mtp.layers)
        assert (right.name, wrap != "") == (right.name, "objects-ignored" in {f.code for f in report.findings})
    nbytes = sum(tensor.nbytes for name, tensor in state_dict(checkpoint).items() if name in checkpoint.draft_names)
    result = run("inspect", left, "--json")
    assert result.json["kind"] == "torch.save files"
    assert result.json["mtp"] == {
        "kind": checkpoint.kind, "key": checkpoint.key, "declared": checkpoint.declared,
        "present": len(checkpoint.parts), "tensors": len(checkpoint.draft_names), "bytes": nbytes,
    }  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_what_differs_or_is_lost_is_named(kind: str, tmp_path: Path) -> None:
    name = sorted(KINDS[kind].draft_names)[-1]
    left = write_torch(tmp_path / "left", kind)
    report = audit(left, write_torch(tmp_path / "bit", kind, lambda table: flip(table[name])))
    assert {(f.code, f.tensor) for f in report.failing("error")} == {("bytes-differ", name)}
    report = audit(left, write_torch(tmp_path / "lost", kind, lambda table: table.pop(name)), level="headers")
    assert [f.tensor for f in report.findings if f.code == "mtp-tensor-missing"] == [name]


@pytest.mark.parametrize("command", ["plan", "hf2mcore", "roundtrip", "slice"])
@pytest.mark.parametrize("kind", FORMS)
def test_the_converter_refuses_the_draft_as_one(command: str, kind: str, tmp_path: Path, run: Run) -> None:
    source = write_torch(tmp_path / "hf", kind)
    more = {"hf2mcore": [tmp_path / "out"], "slice": [tmp_path / "out", "--layers", "1"]}.get(command, [])
    result = run(command, source, *more)
    assert (result.code, result.out) == (10, ""), result.err
    assert KINDS[kind].reason in result.err and "convert its target alone" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_is_no_draft_is_told_to_be_saved_as_safetensors(tmp_path: Path, run: Run) -> None:
    source = write_torch(tmp_path / "hf", "eagle 1", lambda table: table.update({"norm.weight": torch.ones(8)}))
    write_torch(tmp_path / "other", "eagle 1", lambda table: [table.pop(name) for name in list(table)[1:]])
    for folder in (source, tmp_path / "other"):
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert run("plan", source).code == 10  # fc beside layers at the root: EAGLE, whatever else is there
    result = run("plan", tmp_path / "other")
    assert result.code == 6 and "PyTorch pickles only (pytorch_model.bin)" in result.err
    (source / BIN).write_bytes(b"no file of torch at all")
    assert run("plan", source).code == 6
    config = KINDS["eagle 3"].config
    (source / "config.json").write_text(json.dumps(config))
    assert run("plan", source).code == 10  # the config says it


def test_safetensors_beside_params_json(tmp_path: Path, run: Run) -> None:
    """Meta's heads as somebody has converted them: against the pickle too, byte for byte."""
    meta = KINDS["meta"]
    table = state_dict(meta)
    source = write_torch(tmp_path / "pickle", "meta")
    other = tmp_path / "safetensors"
    other.mkdir()
    (other / "params.json").write_text(json.dumps(meta.config))
    tensors = {n: ("BF16", tuple(t.shape), t.view(torch.uint8).numpy().tobytes()) for n, t in table.items()}
    write_safetensors(other / "model.safetensors", tensors)
    report = audit(source, other)
    assert codes(report) == set(), [found.message for found in report.findings]
    assert report.nbytes == sum(tensor.nbytes for tensor in table.values())
    shown = run("inspect", other, "--json").json
    assert shown["kind"] == "safetensors with params.json"
    assert (shown["mtp"]["kind"], shown["mtp"]["key"], shown["mtp"]["present"]) == (meta.kind, "n_future_tokens", 3)
    result = run("plan", other)
    assert result.code == 10 and meta.reason in result.err
    (other / "params.json").write_text('{"dim": 8}')
    write_safetensors(other / "model.safetensors", {n: t for n, t in tensors.items() if "extra" not in n})
    assert run("plan", other).code == 5


def test_several_files_and_their_index(tmp_path: Path, run: Run) -> None:
    whole, split = write_torch(tmp_path / "whole", "eagle 1"), write_shards(tmp_path / "split", "eagle 1")
    report = audit(whole, split)
    assert codes(report) == set() and report.tensors == len(KINDS["eagle 1"].shapes)
    assert run("inspect", split, "--json").json["files"] == 2
    (split / "pytorch_model-00002-of-00002.bin").unlink()
    assert {"index-missing-file", "shard-set-incomplete", "mtp-tensor-missing"} <= codes(audit(whole, split))
    assert run("inspect", split).code == 6
    index = split / "pytorch_model.bin.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["fc.weight"] = "../../../../etc/passwd"
    index.write_text(json.dumps(table))
    assert "index-missing-file" in codes(audit(whole, split))


def test_pieces_of_a_tensor_parallel_model_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"consolidated.0{rank}.pth").write_bytes(saved({"output.weight": torch.zeros(2, 2)}))
    with pytest.raises(CheckpointError, match=r"pieces of a tensor-parallel model: each holds a part of output.weight"):
        open_side(tmp_path, "left")


def folder_of(path: Path, blob: bytes, config: str = "{}") -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / BIN).write_bytes(blob)
    (path / "config.json").write_text(config)
    return path


def test_views_shared_storages_and_every_dtype_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """A transposed view, a slice, a tie, a Parameter, a state dict with attributes, FP8: against contiguous copies."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    module = torch.nn.Linear(3, 2)
    table: dict[str, Any] = module.state_dict() | {
        "turned": base.t(), "slice": base[1:5:2, 2:6], "tie": base, "parameter": torch.nn.Parameter(base[0]),
        "empty": torch.zeros(0, 4), "scalar": torch.tensor(3.0), "one": base[:, 3:4].t(),
    }  # fmt: skip
    names = "float64 float16 int32 int16 int8 uint8 uint16 uint32 uint64 complex64 float8_e4m3fn float8_e5m2"
    table |= {name: torch.arange(4).to(getattr(torch, name)) for name in names.split()}
    left = folder_of(tmp_path / "left", saved(table))
    right = tmp_path / "right"
    right.mkdir()
    (right / "config.json").write_text("{}")
    from safetensors.torch import save_file

    save_file({name: tensor.detach().clone().contiguous() for name, tensor in table.items()}, right / "m.safetensors")
    report = audit(left, right)
    assert codes(report) == set(), [found.message for found in report.findings]
    assert report.tensors == len(table)
    state = torch.nn.Sequential(module).state_dict()
    assert hasattr(state, "_metadata")
    assert set(open_side(folder_of(left, saved(state)), "left").inventory) == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"x": torch.zeros(1).expand(1000)}, "x has 1000 elements over a storage of 4 bytes: an expanded view"),
        ({"x": torch.eye(3).to_sparse()}, "x is no plain tensor (_rebuild_sparse_tensor)"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, "x is of ComplexDoubleStorage, which is not read"),
        ([torch.zeros(2)], "holds a list, and no dict of tensors by name"),
        ({"a": {"b": torch.zeros(2)}}, "holds a dict of a, and no dict of tensors by name"),
        (torch.nn.Linear(2, 2), "holds an object of torch.nn.modules.linear.Linear, and no dict of tensors by name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_is_no_plain_tensor_is_refused_by_name(value: object, said: str, tmp_path: Path, run: Run) -> None:
    source = folder_of(tmp_path / "hf", saved(value))
    for command in (["inspect", source], ["audit", source, source]):
        result = run(*command)
        assert result.code == 6 and said in result.err and "safetensors" in result.err, result.err


def test_the_legacy_form_is_refused_with_how_to_convert_it(tmp_path: Path, run: Run) -> None:
    folder = folder_of(tmp_path / "hf", b"")
    torch.save({"fc.weight": torch.zeros(2)}, folder / BIN, _use_new_zipfile_serialization=False)
    for command in (["inspect", folder], ["audit", folder, folder]):
        result = run(*command)
        assert result.code == 6
        assert "pytorch_model.bin is a pickle of the form that torch.save wrote before torch 1.6" in result.err
        assert "torch.save it again with a new torch, or save its tensors with safetensors" in result.err


class Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_nothing_in_a_file_is_run(tmp_path: Path, run: Run) -> None:
    mark = tmp_path / "planted"
    planted = folder_of(tmp_path / "hf", saved({"fc.weight": torch.zeros(2, 2), "x": Planted(mark)}))
    assert set(open_side(planted, "left").inventory) == {"fc.weight"}
    (planted / BIN).write_bytes(saved(Planted(mark)))
    for command in (["inspect", planted], ["audit", planted, planted], ["plan", planted]):
        assert run(*command).code == 6
    assert not mark.exists()


TABLE = {"fc.weight": torch.arange(8.0).reshape(2, 4)}
_OFFSETS = struct.Struct("<I")


def _central(blob: bytes, field: int, value: int) -> bytes:
    """The central directory's entry of the storage says ``value`` in four bytes at ``field``."""
    at = blob.index(b"/data/0", blob.index(b"PK\x01\x02")) - 46 - len("archive")
    assert blob[at : at + 4] == b"PK\x01\x02"
    harmed = bytearray(blob)
    _OFFSETS.pack_into(harmed, at + field, value)
    return bytes(harmed)


def _pickled(old: bytes, new: bytes) -> bytes:
    def change(entries: dict[str, bytes]) -> None:
        assert old in entries["archive/data.pkl"]
        entries["archive/data.pkl"] = entries["archive/data.pkl"].replace(old, new)

    return rezipped(saved(TABLE), change)


def _cases() -> dict[str, tuple[bytes, str]]:
    """Blob and a piece of what is said; K\\x02 and K\\x04 are the extents, then the strides, in data.pkl."""
    blob = saved(TABLE)
    memo = b"\x80\x02}r\xff\xff\xff\xff."
    deep = b"\x80\x02" + b"]" * 20000 + b"a" * 19999 + b"."
    return {
        "empty": (b"", "no readable torch.save file"),
        "cut": (blob[:-40], "not a zip file"),
        "no zip": (b"PK\x03\x04" + bytes(100), "not a zip file"),
        "a bare pickle": (pickle.dumps({"a": 1}), "not a zip file"),
        "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        "no data.pkl": (zipped({"archive/data/0": b"x"}), "0 entries called data.pkl"),
        "two": (zipped({"a/data.pkl": b"x", "b/data.pkl": b"x"}), "2 entries called data.pkl"),
        "compressed": (rezipped(blob, lambda e: None, zipfile.ZIP_DEFLATED), "compressed or encrypted"),
        "big-endian": (rezipped(blob, lambda e: e.update({"archive/byteorder": b"big"})), "big-endian"),
        "size": (_central(_central(blob, 24, 1 << 30), 20, 1 << 30), "bytes after the file"),
        "place": (_central(blob, 42, 7), "no entry begins where"),
        "no pickle": (rezipped(blob, lambda e: e.update({"archive/data.pkl": b"no"})), "data.pkl"),
        "memo": (rezipped(blob, lambda e: e.update({"archive/data.pkl": memo})), "a memo index beyond its length"),
        "deep": (rezipped(blob, lambda e: e.update({"archive/data.pkl": deep})), "no dict of tensors by name"),
        "rows": (_pickled(b"K\x02K\x04\x86", b"M\xff\xffK\x04\x86"), "262140 elements over a storage of 32"),
        "stride": (_pickled(b"K\x04K\x01\x86", b"K\x20K\x01\x86"), "reaches element 35 of a storage of 32 bytes"),
        "negative": (_pickled(b"K\x04K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"), "not described as torch.save does"),
        "axes": (_pickled(b"K\x04K\x01\x86", b"K\x01\x85"), "not described as torch.save does"),
        "storage": (_pickled(b"X\x01\x00\x00\x000", b"X\x05\x00\x00\x00../.."), "the file does not have"),
        "class": (_pickled(b"torch FloatStorage".replace(b" ", b"\n"), b"posix\nsystem"), "is of system"),
    }


CASES = _cases()


@pytest.mark.parametrize("case", CASES)
def test_damaged_and_lying_files_are_named(case: str, tmp_path: Path, run: Run) -> None:
    blob, said = CASES[case]
    left = folder_of(tmp_path / "left", saved(TABLE))
    right = folder_of(tmp_path / "right", blob)
    result = run("inspect", right)
    assert result.code == 6 and said in result.err, result.err
    result = run("audit", left, right)
    assert result.code in (1, 6) and said in result.out + result.err
    assert run("plan", right).code == 6


def test_harmed_bytes_never_end_in_a_traceback(tmp_path: Path) -> None:
    left = folder_of(tmp_path / "left", saved(TABLE))
    blob = saved(TABLE)
    rng = np.random.default_rng(3)
    for _ in range(150):
        harmed = bytearray(blob)
        for at in rng.integers(0, len(blob), 3):
            harmed[at] = int(rng.integers(256))
        right = folder_of(tmp_path / "right", bytes(harmed))
        try:
            audit(left, right)
        except CheckpointError as error:
            assert error.where


def test_a_flipped_bit_fails_its_crc(tmp_path: Path) -> None:
    blob = bytearray(saved(TABLE))
    at = blob.index(TABLE["fc.weight"].numpy().tobytes())
    blob[at + 5] ^= 4
    source = folder_of(tmp_path / "hf", bytes(blob))
    found = [f for f in audit(source, source).findings if f.code == "crc-mismatch"]
    assert {f.side for f in found} == {"left", "right"} and all(f.tensor == "fc.weight" for f in found)


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    eagle = KINDS["eagle 1"]
    source = write_headers(tmp_path / "hf", eagle.config, eagle.shapes)
    (source / BIN).write_bytes(b"not even looked at")
    assert open_side(source, "left").layout == "safetensors, 1 file"
