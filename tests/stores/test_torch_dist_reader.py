"""TorchDistReader on what torch's own DCP saves, and each refusal."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtpconvert.errors import CheckpointError, IncompleteError, MtpConvertError, NotRepresentableError
from mtpconvert.stores.torch_dist.metadata_pickle import metadata_pickle
from mtpconvert.stores.torch_dist.reader import TorchDistReader
from mtpconvert.stores.torch_dist.record_write import lay_out, object_container
from mtpconvert.stores.torch_dist.stored import Place, StoredChunk, StoredTensor
from mtpconvert.tensors import Shape, TensorSpec
from tests.support.dcp import CONFIG, dcp_save, pattern, read_bits, tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One save by torch: whole tensors, a transposed one, a slice of a larger one, layers under one key."""
    folder = tmp_path_factory.mktemp("dcp") / "iter_0000005"
    state: dict[str, Any] = {
        "embedding.word_embeddings.weight": tensor((5, 4), "BF16", 10),
        "output_layer.weight": tensor((4, 5), "BF16", 100).t(),
        "decoder.final_layernorm.weight": tensor((3, 8), "F32", 50)[1],
        "decoder.layers.mlp.linear_fc2.weight": tensor((2, 3, 4), "BF16", 1000).transpose(1, 2),
        "decoder.layers.mlp.linear_fc1.weight": tensor((2, 6, 3), "F8_E4M3", 7),
        "mtp.layers.0.enorm.weight": tensor((4,), "F32", 70),
        "mtp.layers.0.scale": torch.tensor(3, dtype=torch.int64),
        "mtp.layers.0.eh_proj._extra_state/shard_0_1": [None],
        "rng_state/shard_0.0_1.1": {"x": torch.get_rng_state()},
        "optimizer.state.exp_avg.output_layer.weight": torch.zeros(5, 4),
        "chained_1.optimizer.param_state/shard_0_1": {"a": 1},
        "somebody_elses": {"a": 1},
    }
    dcp_save(folder, state)
    torch.save({"iteration": 5, "checkpoint_version": 3.0}, folder / "common.pt")
    return folder


def test_values_come_back_bit_for_bit(saved: Path) -> None:
    reader = TorchDistReader(saved)
    fc2 = pattern((2, 3, 4), "BF16", 1000).transpose(0, 2, 1)
    fc1 = pattern((2, 6, 3), "F8_E4M3", 7)
    wanted = {
        "embedding.word_embeddings.weight": ("BF16", pattern((5, 4), "BF16", 10)),
        "output_layer.weight": ("BF16", pattern((4, 5), "BF16", 100).T),
        "decoder.final_layernorm.weight": ("F32", pattern((3, 8), "F32", 50)[1]),
        "mtp.layers.0.enorm.weight": ("F32", pattern((4,), "F32", 70)),
        "mtp.layers.0.scale": ("I64", np.array(3, "<u8")),
    }
    for layer in (0, 1):
        wanted[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = ("BF16", fc2[layer])
        wanted[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] = ("F8_E4M3", fc1[layer])
    assert reader.inventory() == {name: TensorSpec(name, bits.shape, dtype) for name, (dtype, bits) in wanted.items()}
    for name, (_, bits) in wanted.items():
        np.testing.assert_array_equal(read_bits(reader, name), bits, err_msg=name)


def test_a_strided_chunk_keeps_its_strides(saved: Path) -> None:
    (chunk,) = TorchDistReader(saved).chunks("output_layer.weight")
    assert chunk.strides == (2, 10)  # [5, 4] of two bytes, saved as the transpose of [4, 5]


def test_halves_and_experts_under_keys_of_their_own(tmp_path: Path) -> None:
    """The keys of ``singleton_local_shards``: one for each expert, gate and up halves apart."""
    base = "decoder.layers.1.mlp."
    state = {
        f"{base}experts.experts.{e}.linear_fc1.weight_{half}": tensor(
            (3, 2), "BF16", 100 * e + (50 if half == "v" else 0)
        )
        for e in range(3)
        for half in "wv"
    }
    state |= {f"{base}experts.experts.{e}.linear_fc2.weight": tensor((2, 3), "BF16", 900 + e) for e in range(3)}
    state |= {
        f"{base}shared_experts.linear_fc1.weight_w": tensor((2, 4), "F32", 0),
        f"{base}shared_experts.linear_fc1.weight_v": tensor((2, 4), "F32", 8),
    }
    dcp_save(tmp_path, state)
    reader = TorchDistReader(tmp_path)
    gate_up = [[pattern((3, 2), "BF16", 100 * e), pattern((3, 2), "BF16", 100 * e + 50)] for e in range(3)]
    fc1 = np.stack([np.concatenate(halves) for halves in gate_up])
    np.testing.assert_array_equal(read_bits(reader, f"{base}experts.experts.linear_fc1.weight"), fc1)
    fc2 = np.stack([pattern((2, 3), "BF16", 900 + e) for e in range(3)])
    np.testing.assert_array_equal(read_bits(reader, f"{base}experts.experts.linear_fc2.weight"), fc2)
    shared = pattern((4, 4), "F32", 0)
    np.testing.assert_array_equal(read_bits(reader, f"{base}shared_experts.linear_fc1.weight"), shared)
    strides = {chunk.strides for chunk in reader.chunks(f"{base}experts.experts.linear_fc1.weight")}
    assert strides == {(12, 4, 2)}  # C order of a [1, 3, 2] box of two-byte elements


def test_everything_else_is_counted(saved: Path) -> None:
    reader = TorchDistReader(saved)
    assert reader.objects == {"optimizer": 2, "extra_state": 1, "rng_state": 1, "unknown": 1}
    assert reader.unknown_objects == ["somebody_elses.a"]  # plain DCP flattens dicts into the key
    assert reader.iteration == 5 and reader.checkpoint_version == 3.0 and reader.stacked
    assert reader.args is None and any("no training arguments" in note for note in reader.notes)
    assert reader.physical("decoder.layers.1.mlp.linear_fc2.weight") == ["decoder.layers.mlp.linear_fc2.weight"]


def test_no_tensor_byte_is_read_for_an_inventory(saved: Path, tmp_path: Path) -> None:
    """With every record's bytes gone, names and shapes are still there; chunks() is what looks."""
    for path in saved.iterdir():
        shutil.copy(path, tmp_path / path.name)
        if path.suffix == ".distcp":
            (tmp_path / path.name).write_bytes(bytes(path.stat().st_size))
    reader = TorchDistReader(tmp_path)
    assert len(reader.inventory()) == 9
    with pytest.raises(CheckpointError, match=r"not a torch\.save container"):
        reader.chunks("output_layer.weight")


# Checkpoints made by hand, one tensor "w" of 4 x 4 unless said otherwise

SHAPE: Shape = (4, 4)


def build(
    folder: Path, chunks: list[tuple[Shape, Shape]], *, key: str = "w", shape: Shape = SHAPE
) -> list[StoredChunk]:
    """A checkpoint whose records are in order; ``chunks``: (offsets, sizes)."""
    folder.mkdir(exist_ok=True)
    blob, placed = b"", []
    for offsets, sizes in chunks:
        layout = lay_out(len(blob), "BF16", sizes)
        blob += layout.header(0) + bytes(layout.nbytes) + layout.trailer(0)
        placed.append(StoredChunk(offsets, sizes, Place("__0_0.distcp", layout.base, layout.end - layout.base)))
    (folder / "__0_0.distcp").write_bytes(blob)
    metadata(folder, placed, key=key, shape=shape)
    (folder / "metadata.json").write_text(CONFIG)
    return placed


def metadata(folder: Path, chunks: list[StoredChunk], *, key: str = "w", shape: Shape = SHAPE) -> None:
    (folder / ".metadata").write_bytes(metadata_pickle([StoredTensor(key, "BF16", shape, chunks)], {}))


LEFT, RIGHT, ALL = ((0, 0), (4, 2)), ((0, 2), (4, 2)), ((0, 0), (4, 4))


@pytest.mark.parametrize(
    "chunks",
    [
        [ALL],
        [LEFT, RIGHT],
        [RIGHT, LEFT],
        [((0, 0), (1, 4)), ((1, 0), (3, 1)), ((1, 1), (1, 3)), ((2, 1), (2, 3))],
        [((0, 0), (2, 1)), ((0, 1), (1, 3)), ((1, 3), (3, 1)), ((3, 0), (1, 3)), ((2, 0), (1, 3)), ((1, 1), (1, 2))],
        [LEFT, RIGHT, ((4, 0), (0, 4))],
    ],
)
def test_any_exact_cover_is_read(chunks: list[tuple[Shape, Shape]], tmp_path: Path) -> None:
    build(tmp_path, chunks)
    assert read_bits(TorchDistReader(tmp_path), "w").shape == SHAPE


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([LEFT], r"nothing holds \[0:4, 2:4\]"),
        ([], r"nothing holds \[0:4, 0:4\]"),
        ([LEFT, RIGHT, ((1, 1), (1, 1))], r"2 chunks hold \[1:2, 1:2\]"),
        ([ALL, LEFT], r"two records hold the same chunk|2 chunks hold \[0:4, 0:2\]"),
        ([ALL, ALL], r"two records hold the same chunk of w|2 chunks hold"),
        ([LEFT, ((0, 2), (4, 3))], r"does not lie inside \[4, 4\]"),
        ([((0,), (4,))], r"does not lie inside"),
        ([((0, 0), (4, 1)), ((0, 2), (4, 2))], r"nothing holds \[0:4, 1:2\]"),
    ],
)
def test_holes_overlaps_and_replicas_are_refused(chunks: list[Any], why: str, tmp_path: Path) -> None:
    build(tmp_path, chunks)
    with pytest.raises(CheckpointError, match=why) as caught:
        TorchDistReader(tmp_path)
    assert caught.value.where == "w" and caught.value.exit_code == 6


def refused(folder: Path, error: type[MtpConvertError], why: str) -> MtpConvertError:
    with pytest.raises(error, match=why) as caught:
        reader = TorchDistReader(folder)
        for name in reader.inventory():
            reader.chunks(name)
    assert type(caught.value) is error and caught.value.next_step
    return caught.value


def test_a_replica_in_two_files_is_not_picked(tmp_path: Path) -> None:
    (one,) = build(tmp_path, [ALL])
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp")
    metadata(tmp_path, [one, StoredChunk(one.offsets, one.sizes, Place("__1_0.distcp", 0, one.place.length))])
    refused(tmp_path, CheckpointError, "two records hold the same chunk of w, at")


def test_missing_and_short_files(tmp_path: Path) -> None:
    left, right = build(tmp_path, [LEFT, RIGHT])
    data = (tmp_path / "__0_0.distcp").read_bytes()
    (tmp_path / "__0_0.distcp").write_bytes(data[:-1])
    error = refused(
        tmp_path, IncompleteError, f"cut short: it has {len(data) - 1} bytes, w .* ends at byte {len(data)}"
    )
    assert error.where == "__0_0.distcp, first of w" and error.exit_code == 7
    (tmp_path / "__0_0.distcp").unlink()
    error = refused(tmp_path, IncompleteError, r"__0_0\.distcp is missing: it holds w")
    assert error.exit_code == 7
    (tmp_path / "__0_0.distcp").write_bytes(data)
    outside = StoredChunk(right.offsets, right.sizes, Place("__0_0.distcp", len(data) + 5, 10))
    metadata(tmp_path, [left, outside])
    refused(tmp_path, IncompleteError, "cut short")


def test_a_record_that_contradicts_the_metadata(tmp_path: Path) -> None:
    left, right = build(tmp_path, [LEFT, RIGHT])
    metadata(tmp_path, [left], shape=(2, 4))
    (tmp_path / ".metadata").write_bytes(
        metadata_pickle([StoredTensor("w", "BF16", (2, 4), [StoredChunk((0, 0), (2, 4), left.place)])], {})
    )
    refused(tmp_path, CheckpointError, r"the record holds BF16 \[4, 2\], .metadata says BF16 \[2, 4\]")
    (tmp_path / ".metadata").write_bytes(metadata_pickle([StoredTensor("w", "F16", SHAPE, [left, right])], {}))
    refused(tmp_path, CheckpointError, r"the record holds BF16 .* says F16")
    swapped = Place("__0_0.distcp", left.place.offset + 3, left.place.length)
    metadata(tmp_path, [StoredChunk(left.offsets, left.sizes, swapped), right])
    refused(tmp_path, CheckpointError, "not a torch.save container")


@pytest.mark.parametrize("file", ["../x/__0_0.distcp", "/etc/passwd", "..", "", "a/b"])
def test_records_outside_the_folder(file: str, tmp_path: Path) -> None:
    (one,) = build(tmp_path, [ALL])
    metadata(tmp_path, [StoredChunk(one.offsets, one.sizes, Place(file, 0, one.place.length))])
    refused(tmp_path, CheckpointError, "lies outside the checkpoint")


def test_metadata_that_is_missing_or_not_torchs(tmp_path: Path) -> None:
    build(tmp_path, [ALL])
    good = (tmp_path / ".metadata").read_bytes()
    for data, error, why in (
        (good[:-20], CheckpointError, "not a readable pickle"),
        (b"", CheckpointError, "not a readable pickle"),
        (pickle.dumps({"a": 1}), CheckpointError, "no torch DCP metadata"),
        (good.replace(b"storage_data", b"storage_date"), CheckpointError, "tables of keys and records"),
        (good.replace(b"TensorStorageM", b"tensorStorageM"), CheckpointError, "neither tensors nor objects"),
        (good.replace(b"\x8c\x06chunks", b"\x8c\x06chunky"), CheckpointError, "dtype, size or chunks of w are missing"),
        (good.replace(b"bfloat16", b"bfloat61"), CheckpointError, "dtype, size or chunks of w are missing"),
        (good.replace(b"\x8c\x07offsets", b"\x8c\x07offsetz"), CheckpointError, "a chunk of w has no offsets"),
        (good.replace(b"relative_path", b"relative_paTH"), CheckpointError, "has no file, offset or length"),
        (good.replace(b"\x8c\x03fqn", b"\x8c\x03fqm"), CheckpointError, "a record in it belongs to no key"),
    ):  # fmt: skip
        assert data != good
        (tmp_path / ".metadata").write_bytes(data)
        refused(tmp_path, error, why)
    (tmp_path / ".metadata").unlink()
    error = refused(tmp_path, IncompleteError, r"\.metadata cannot be read: No such file")
    assert error.exit_code == 7


def test_a_chunk_without_a_record(tmp_path: Path) -> None:
    build(tmp_path, [ALL])
    good = (tmp_path / ".metadata").read_bytes()
    size = b"\x85R"  # offsets (0, 0) of the record become (0, 1): the chunk's record is gone
    at = good.rindex(b"K\x00K\x00\x86" + size)
    (tmp_path / ".metadata").write_bytes(good[:at] + b"K\x00K\x01\x86" + good[at + 5 :])
    refused(tmp_path, IncompleteError, r"no file holds w: \.metadata lists its chunk at \[0, 0\] without a record")


def test_transformed_streams_are_refused(tmp_path: Path) -> None:
    build(tmp_path, [ALL])
    data = (tmp_path / ".metadata").read_bytes()
    at = data.index(b"ub", data.rindex(b"__0_0.distcp"))
    at = data.rindex(b"ub", 0, data.index(b"storage_meta"))
    extra = b"\x8c\x15transform_descriptors](\x8c\x04zstde"
    (tmp_path / ".metadata").write_bytes(data[:at] + extra + data[at:])
    refused(tmp_path, CheckpointError, r"went through \['zstd'\]")


def test_other_layouts_are_refused_by_name(tmp_path: Path) -> None:
    build(tmp_path, [ALL], key="model.module.decoder.layers.0.mlp.linear_fc2.weight")
    refused(tmp_path, CheckpointError, "fsdp_dtensor")
    build(tmp_path, [ALL])
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    refused(tmp_path, CheckpointError, "'zarr' checkpoint, not torch_dist")
    (tmp_path / "metadata.json").write_text("{")
    refused(tmp_path, CheckpointError, "names no sharded_backend")
    (tmp_path / "metadata.json").unlink()
    error = refused(tmp_path, IncompleteError, r"metadata\.json is missing")
    assert error.exit_code == 7


def test_dtypes_that_safetensors_lacks(tmp_path: Path) -> None:
    dcp_save(tmp_path, {"decoder.z": torch.zeros(2, dtype=torch.complex128)})
    error = refused(tmp_path, NotRepresentableError, r"decoder\.z has dtype torch\.complex128")
    assert error.exit_code == 10


def test_common_state(tmp_path: Path) -> None:
    build(tmp_path, [ALL])
    reader = TorchDistReader(tmp_path)
    assert reader.args is None and reader.common == {} and reader.iteration is None
    assert any("neither common.pt nor common_state" in note for note in reader.notes)
    for value, why in (([1], "no dict of named values"), ({1: 2}, "no dict of named values")):
        torch.save(value, tmp_path / "common.pt")
        refused(tmp_path, CheckpointError, why)
    (tmp_path / "common.pt").write_bytes(b"junk")
    refused(tmp_path, CheckpointError, r"common\.pt is not a torch\.save container")
    torch.save({"args": {"num_layers": 2}, "iteration": "x"}, tmp_path / "common.pt")
    reader = TorchDistReader(tmp_path)
    assert reader.args == {"num_layers": 2} and reader.iteration is None


def test_common_state_as_an_object(tmp_path: Path) -> None:
    (one,) = build(tmp_path, [ALL])
    state = object_container([{"iteration": 9, "args": {"hidden_size": 4}}])
    (tmp_path / "__0_9.distcp").write_bytes(state)
    place = {"common_state/shard_0_1": Place("__0_9.distcp", 0, len(state))}
    (tmp_path / ".metadata").write_bytes(metadata_pickle([StoredTensor("w", "BF16", SHAPE, [one])], place))
    reader = TorchDistReader(tmp_path)
    assert reader.iteration == 9 and reader.args == {"hidden_size": 4}
    assert reader.objects == {"common_state": 1} and reader.unknown_objects == []
    (tmp_path / "__0_9.distcp").write_bytes(object_container({"iteration": 9}) + bytes(len(state)))
    refused(tmp_path, CheckpointError, "common_state")


def test_many_files_are_not_all_open_at_once(tmp_path: Path) -> None:
    (one,) = build(tmp_path, [ALL])
    chunks = []
    for row in range(200):
        (tmp_path / f"__{row}_0.distcp").write_bytes((tmp_path / "__0_0.distcp").read_bytes())
        chunks.append(StoredChunk((4 * row, 0), (4, 4), Place(f"__{row}_0.distcp", 0, one.place.length)))
    metadata(tmp_path, chunks, shape=(800, 4))
    reader = TorchDistReader(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        assert len(reader.chunks("w")) == 200
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 64
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
