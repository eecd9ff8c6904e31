# ruff: noqa: E501 (tables)
"""Files that are damaged or hostile: a finding or a CheckpointError, never a traceback, never code that runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.readers.opening import open_side
from mtpconvert.audit.readers.pickles import read_pickle
from mtpconvert.errors import CheckpointError
from tests.support.handmade import write_pair, write_torch_dist
from tests.support.tiny import INDEX, write_tiny


class Planted:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/mtpconvert-planted"),))


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    mark = Path("/tmp/mtpconvert-planted")
    mark.unlink(missing_ok=True)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read_pickle(pickle.dumps([Planted(), print, {"a": 1}], protocol), "test")
    assert not mark.exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "garbage", "empty"])
def test_damaged_megatron_files_are_named(tmp_path: Path, damage: str) -> None:
    hf = write_tiny("llama", tmp_path / "hf")
    write_pair(hf, tmp_path / "mc")
    path = next((tmp_path / "mc" / "release").glob("*.distcp"))
    blob = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(blob[:-100])
    elif damage == "gone":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(bytes(len(blob)))
    else:
        path.write_bytes(b"")
    report = audit(hf, tmp_path / "mc")
    code = {
        "cut": "file-truncated",
        "gone": "index-missing-file",
        "garbage": "chunk-unreadable",
        "empty": "file-truncated",
    }[damage]
    assert code in {f.code for f in report.findings}
    assert report.verdict() == "fail"


def test_every_flipped_bit_of_a_record_fails_its_crc(tmp_path: Path) -> None:
    """Without the other side: Megatron against itself, so that no byte differs."""
    arrays = {"decoder.final_layernorm.weight": np.arange(1, 65, dtype="<u2").reshape(8, 8)}
    folder = write_torch_dist(tmp_path / "mc", arrays, None)
    path = next(folder.glob("*.distcp"))
    clean = path.read_bytes()
    start = clean.index(arrays["decoder.final_layernorm.weight"].tobytes())
    for bit in (0, 7, 500, 1023):
        blob = bytearray(clean)
        blob[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(blob)
        codes = [f.code for f in audit(tmp_path / "mc", tmp_path / "mc").findings]
        assert codes.count("crc-mismatch") == 2, bit


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"no pickle", pickle.dumps({"state_dict_metadata": 1}), pickle.dumps(3)]
)
def test_bad_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_torch_dist(tmp_path / "mc", {"a": np.zeros((2, 2), "<u2")}, None)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError):
        open_side(tmp_path / "mc", "left")


@pytest.mark.parametrize("text", ["5", "release\n", "release/../x", "../hf", ""])
def test_the_tracker_file(tmp_path: Path, text: str) -> None:
    folder = write_torch_dist(tmp_path / "mc", {"a": np.zeros((2, 2), "<u2")}, None)
    (tmp_path / "mc" / "latest_checkpointed_iteration.txt").write_text(text)
    if text.strip() == "release":
        assert open_side(tmp_path / "mc", "left").root == folder
    else:
        with pytest.raises(CheckpointError):
            open_side(tmp_path / "mc", "left")


@pytest.mark.parametrize(
    "entry",
    [3, {}, {"dtype": "F32"}, {"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}, {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]},
     {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [1], "data_offsets": [0]}],
)  # fmt: skip
def test_a_bad_header_entry_is_a_finding(tmp_path: Path, entry: Any) -> None:
    raw = json.dumps({"x": entry, "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    (tmp_path / "config.json").write_text("{}")
    assert "file-layout" in {f.code for f in audit(tmp_path, tmp_path).findings}


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    hf = write_tiny("llama", tmp_path / "hf", shards=1)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
    (hf / "model.safetensors").write_bytes(pointer)
    (found,) = (f for f in audit(hf, hf).findings if f.code == "file-unreadable" and f.side == "left")
    assert found.message == "model.safetensors: a git-LFS pointer, not the weights; run 'git lfs pull'"


def test_other_weights_and_hidden_folders_are_no_side_files(tmp_path: Path) -> None:
    """The converter carries none of them, nor does anyone who downloads with the hub's usual patterns."""
    left, right = (write_tiny("llama", tmp_path / side) for side in ("left", "right"))
    for name in (
        "tf_model.h5",
        "onnx/model.onnx",
        "x.gguf",
        "pytorch_model.bin.index.json",
        ".git/objects/ab",
        ".cache/x",
    ):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_bytes(b"x")
    assert [f.code for f in audit(left, right).findings] == []
    for name in (".gitattributes", "assets/card.md", "tokenizer.model"):
        (left / name).parent.mkdir(exist_ok=True)
        (left / name).write_bytes(b"x")
    assert [f.detail["file"] for f in audit(left, right).findings] == [
        ".gitattributes",
        "assets/card.md",
        "tokenizer.model",
    ]


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["x"]}}', "nul", '{"weight_map": {}, "metadata": 3}'],
)
def test_a_bad_index_is_a_finding(tmp_path: Path, text: str) -> None:
    hf = write_tiny("llama", tmp_path / "hf")
    (hf / INDEX).write_text(text)
    report = audit(hf, hf)
    assert {"index-unreadable", "index-unlisted", "file-stray", "index-no-total-size"} & {
        f.code for f in report.findings
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"decoder.layers.0.self_attention.linear_proj._extra_state/shard_0_1": b"x"}, None),
        (
            {"rng_state/shard_0_1": b"x", "decoder._extra_state/shard_0_1": b"x"},
            "1 objects are not compared, 1 of them",
        ),
        ({"decoder.layers.0.mlp.lookup": b"x"}, "decoder.layers.0.mlp.lookup"),
    ],
)
def test_objects_are_said_where_they_are_more_than_extra_state(
    tmp_path: Path, objects: dict[str, bytes], said: str | None
) -> None:
    """torch.distributed.checkpoint keeps what is no tensor as bytes: its own writer makes the entries."""
    from torch.distributed import checkpoint

    arrays = {"decoder.final_layernorm.weight": np.arange(1, 65, dtype="<u2").reshape(8, 8)}
    folder = write_torch_dist(tmp_path / "mc", arrays, None)
    assert open_side(folder, "left").findings == []
    other = tmp_path / "other"
    checkpoint.save(objects, storage_writer=checkpoint.FileSystemWriter(other), no_dist=True)
    found = [f for f in open_side(other, "left").findings if f.code == "objects-ignored"]
    assert len(found) == (said is not None)
    assert said is None or said in found[0].message
    assert open_side(other, "left").objects == len(objects)
