"""The reader: what it hands out on sound directories, and the refusal of every way index and files can disagree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.errors import CheckpointError, IncompleteError, MtpConvertError
from mtpconvert.stores.safetensors.header import Header
from mtpconvert.stores.safetensors.reader import (
    SafetensorsReader,
    chunk_of,
    load_layout,
    save_headers,
)
from mtpconvert.tensors import TensorSpec
from tests.support import refusals
from tests.support.tiny import INDEX, read_safetensors, sha256_tree, write_safetensors, write_tiny

FIRST, SECOND, LAST = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("deepseek_v3", tmp_path_factory.mktemp("pristine") / "tiny")


@pytest.fixture
def tiny(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


def edit_index(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((root / INDEX).read_text())
    change(index)
    (root / INDEX).write_text(json.dumps(index))


def refusal(root: Path, kind: type[MtpConvertError], *words: str) -> None:
    refusals.refusal(lambda: SafetensorsReader(root), kind, str(root), *words)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_lies_where_the_reader_says(shards: int, tmp_path: Path) -> None:
    root = write_tiny("deepseek_v3", tmp_path / "tiny", shards=shards)
    reader = SafetensorsReader(root)
    expected = read_safetensors(root)
    inventory = reader.inventory()
    assert {name: (spec.dtype, spec.shape) for name, spec in inventory.items()} == {
        name: tensor[:2] for name, tensor in expected.items()
    }
    for name, (_, shape, data) in expected.items():
        (chunk,) = reader.chunks(name)
        assert chunk.box == tuple((0, dim) for dim in shape)
        found = reader.path(chunk.file).read_bytes()[chunk.offset : chunk.offset + len(data)]
        assert found == data, name
    assert reader.notes == []
    assert reader.index_bytes == ((root / INDEX).read_bytes() if shards > 1 else None)
    assert [shard.name for shard in reader.shards] == ([FIRST, SECOND, LAST] if shards > 1 else ["model.safetensors"])
    for shard in reader.shards:
        assert (root / shard.name).read_bytes().startswith(shard.header.raw)


def test_strides_are_bytes_in_c_order() -> None:
    assert chunk_of(2, TensorSpec("a", (3, 5, 7), "F32"), 16).strides == (140, 28, 4)
    assert chunk_of(2, TensorSpec("a", (), "F32"), 16).strides == ()
    assert chunk_of(0, TensorSpec("a", (3, 5, 4), "F4"), 0).strides == (10, 2, 0)  # half a byte along the last axis
    assert chunk_of(0, TensorSpec("a", (2, 5), "F6_E2M3"), 0).strides == (0, 0)  # 30 bits a row


def test_opening_imports_neither_numpy_nor_torch_and_reads_headers_only(tiny: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from mtpconvert.stores.detect import detect;"
        "from mtpconvert.stores.safetensors.reader import SafetensorsReader;"
        "from mtpconvert.stores.safetensors.writer import SafetensorsWriter;"
        f"detect(Path({str(tiny)!r})); SafetensorsReader(Path({str(tiny)!r})).inventory();"
        "print(sorted({'numpy', 'torch', 'safetensors', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- index against headers against files ---------------------------------------------------------------------------


def test_missing_shards_are_counted_with_their_tensors(tiny: Path) -> None:
    held = len(read_safetensors(tiny / LAST))
    (tiny / LAST).unlink()
    refusal(tiny, IncompleteError, "1 of 3 files", f"{LAST} ({held} tensors)", "download these files again")
    (tiny / SECOND).unlink()
    (tiny / SECOND).symlink_to(tiny / "blob-that-is-gone")
    refusal(tiny, IncompleteError, "2 of 3 files", SECOND, LAST)


def test_index_ghosts_name_the_tensor_its_shard_and_the_nearest_name(tiny: Path) -> None:
    edit_index(tiny, lambda index: index["weight_map"].update({"model.layers.3.eh_projection.weight": LAST}))
    refusal(tiny, CheckpointError, "1 tensors are in the index but in no file", "model.layers.3.eh_projection.weight",
            f"should be in {LAST}", "nearest name that a file has is model.layers.3.eh_proj.weight")  # fmt: skip


def test_a_ghost_whose_tensor_was_dropped_from_its_shard(tiny: Path) -> None:
    tensors = read_safetensors(tiny / LAST)
    del tensors["model.layers.3.eh_proj.weight"]
    write_safetensors(tiny / LAST, tensors)
    refusal(tiny, CheckpointError, "in no file: model.layers.3.eh_proj.weight", f"should be in {LAST}")


def test_tensors_that_the_index_forgot(tiny: Path) -> None:
    def forget(index: dict[str, Any]) -> None:
        for name in [name for name in index["weight_map"] if name.startswith("model.layers.3.")]:
            del index["weight_map"][name]

    edit_index(tiny, forget)
    refusal(tiny, CheckpointError, "32 tensors are in a file but not in the index", "model.layers.3.", f"is in {LAST}")


def test_a_tensor_in_another_file_than_the_index_says(tiny: Path) -> None:
    edit_index(tiny, lambda index: index["weight_map"].update({"model.norm.weight": FIRST}))
    refusal(tiny, CheckpointError, "model.norm.weight should be in " + FIRST, "is in " + LAST)


def test_one_name_in_two_files_is_refused_although_the_index_picks_one(tiny: Path) -> None:
    tensors = read_safetensors(tiny / FIRST)
    tensors["model.layers.3.eh_proj.weight"] = ("BF16", (2,), b"old!")
    write_safetensors(tiny / FIRST, tensors)
    refusal(tiny, CheckpointError, f"model.layers.3.eh_proj.weight lies in two files: {FIRST} and {LAST}")


def test_surplus_files_are_named_with_what_is_in_them(tiny: Path) -> None:
    write_safetensors(tiny / "model-00001-of-00002.safetensors", read_safetensors(tiny / FIRST))
    (tiny / "model-00002-of-00002.safetensors").write_bytes(b"half")
    count = len(read_safetensors(tiny / FIRST))
    refusal(tiny, CheckpointError, f"2 *.safetensors files are not in {INDEX}",
            f"model-00001-of-00002.safetensors ({count} tensors, {count} of them also in the index: ",
            "model-00002-of-00002.safetensors (unreadable: ", "move these files away")  # fmt: skip
    for path in tiny.glob("*-of-00002.safetensors"):
        path.unlink()
    write_safetensors(tiny / "mtp.safetensors", {"mtp.0.enorm.weight": ("BF16", (1,), b"xx")})
    refusal(tiny, CheckpointError, "mtp.safetensors (1 tensors, 0 of them also in the index: mtp.0.enorm.weight)")


def test_a_truncated_shard_names_itself(tiny: Path) -> None:
    content = (tiny / SECOND).read_bytes()
    (tiny / SECOND).write_bytes(content[:-1])
    refusal(tiny, IncompleteError, SECOND, f"{len(content)} bytes expected, {len(content) - 1} found")


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": None}])
def test_total_size_missing_is_a_note(metadata: object, tiny: Path) -> None:
    total = sum(len(data) for _, _, data in read_safetensors(tiny).values())
    edit_index(tiny, lambda index: index.update(metadata=metadata))
    assert SafetensorsReader(tiny).notes == [f"{INDEX} has no total_size; the tensors are {total} bytes"]
    edit_index(tiny, lambda index: index.pop("metadata"))
    assert len(SafetensorsReader(tiny).notes) == 1


def test_total_size_wrong_is_refused_with_both_numbers(tiny: Path) -> None:
    total = sum(len(data) for _, _, data in read_safetensors(tiny).values())
    edit_index(tiny, lambda index: index["metadata"].update(total_size=total - 72))
    refusal(tiny, CheckpointError, f"total_size of the index is {total - 72}", f"are {total} bytes")
    edit_index(tiny, lambda index: index["metadata"].update(total_size=float(total)))  # old transformers wrote floats
    assert SafetensorsReader(tiny).notes == []
    for value in (True, "big", [total]):
        edit_index(tiny, lambda index, value=value: index["metadata"].update(total_size=value))
        refusal(tiny, CheckpointError, f"total_size of the index is {value!r}, not a number")
    edit_index(tiny, lambda index: index.update(metadata=[]))
    refusal(tiny, CheckpointError, "metadata of the index is not an object")


def test_total_parameters_wrong_is_a_note(tiny: Path) -> None:
    edit_index(tiny, lambda index: index["metadata"].update(total_parameters=5))
    (note,) = SafetensorsReader(tiny).notes
    assert "total_parameters" in note
    assert " is 5, " in note


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "the index is not valid JSON"),
        ("[]", "the index is not a JSON object"),
        ("{}", "the index has no weight_map"),
        ('{"weight_map": {}}', "the index has no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "the index names a twice"),
        ('{"weight_map": {"a": 1}}', "weight_map puts tensor a in 1"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "weight_map puts tensor a in 'pytorch_model.bin'"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "weight_map puts tensor a in '../x.safetensors'"),
    ],
)
def test_an_index_that_cannot_be_read_is_a_refusal(content: str, words: str, tiny: Path) -> None:
    (tiny / INDEX).write_text(content)
    refusal(tiny, CheckpointError, words, INDEX)


def test_two_indices(tiny: Path) -> None:
    shutil.copy(tiny / INDEX, tiny / "consolidated.safetensors.index.json")
    refusal(tiny, CheckpointError, "there are 2 indices: consolidated.safetensors.index.json, " + INDEX)


def test_no_index(tiny: Path) -> None:
    (tiny / INDEX).unlink()
    refusal(tiny, IncompleteError, f"{INDEX} is missing beside {FIRST}")
    (tiny / SECOND).unlink()
    refusal(tiny, IncompleteError, INDEX, f"1 of 3 shards are missing too: {SECOND}")
    (tiny / LAST).unlink()
    (tiny / FIRST).rename(tiny / "weights.safetensors")
    assert SafetensorsReader(tiny).notes == [
        "the one weights file is called weights.safetensors, not model.safetensors"
    ]
    write_safetensors(tiny / "model.safetensors", {"a": ("U8", (1,), b"x")})
    refusal(tiny, CheckpointError, "2 *.safetensors files and no index", "model.safetensors, weights.safetensors")


def test_nothing_to_read(tmp_path: Path) -> None:
    refusal(tmp_path, CheckpointError, "no *.safetensors files")
    write_safetensors(tmp_path / "model.safetensors", {})
    refusal(tmp_path, CheckpointError, "not a single tensor")
    refusal(tmp_path / "gone", CheckpointError, "cannot be listed: No such file")
    refusal(tmp_path / "model.safetensors", CheckpointError, "cannot be listed: Not a directory")


# --- headers kept without weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_kept_headers_give_the_same_layout_as_the_directory(shards: int, tmp_path: Path) -> None:
    root = write_tiny("deepseek_v3", tmp_path / "tiny", shards=shards)
    reader = SafetensorsReader(root)
    kept = tmp_path / "hf_assets"
    save_headers(reader.layout, kept)
    size = sum(path.stat().st_size for path in kept.glob("*.header"))
    assert size == sum(len(shard.header.raw) for shard in reader.shards)
    assert load_layout(kept) == reader.layout == load_layout(root)
    assert sorted(sha256_tree(kept)) == sorted(
        [f"{shard.name}.header" for shard in reader.shards] + ([INDEX] if shards > 1 else [])
    )
    assert all(isinstance(shard.header, Header) for shard in load_layout(kept).shards)


def test_kept_headers_are_checked_like_files(tiny: Path, tmp_path: Path) -> None:
    kept = tmp_path / "hf_assets"
    save_headers(SafetensorsReader(tiny).layout, kept)
    (kept / f"{LAST}.header").unlink()
    with pytest.raises(IncompleteError, match=f"1 of 3 files .* {LAST}"):
        load_layout(kept)
    (kept / f"{LAST}.header").write_bytes(b"half")
    with pytest.raises(IncompleteError, match="truncated"):
        load_layout(kept)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        load_layout(tmp_path)
