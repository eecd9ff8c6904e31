"""The writer and the layouts it writes: verbatim from a reference, cut down from one, or planned like transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconvert.errors import CheckpointError, TargetError, UsageError
from mtpconvert.stores.safetensors.layout import SafetensorsLayout
from mtpconvert.stores.safetensors.plan import adapt_layout, parse_size, plan_layout, subset_layout
from mtpconvert.stores.safetensors.reader import SafetensorsReader, load_layout, save_headers
from mtpconvert.stores.safetensors.writer import SafetensorsWriter
from mtpconvert.tensors import DTYPE_BITS, TensorSpec
from tests.support.tiny import INDEX, read_safetensors, sha256_tree, write_safetensors, write_tiny

FIRST, SECOND, LAST = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


def fill(writer: SafetensorsWriter, values: dict[str, bytes]) -> None:
    """What the executor does: every tensor's bytes at its chunk's offset."""
    writer.create()
    for name, data in values.items():
        (chunk,) = writer.chunks(name)
        with writer.path(chunk.file).open("r+b") as file:
            file.seek(chunk.offset)
            file.write(data)
        writer.finish_chunk(name, 0, 0)
    writer.commit()


def weights(root: Path) -> dict[str, str]:
    return {name: digest for name, digest in sha256_tree(root).items() if ".safetensors" in name}


def bytes_of(root: Path) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in read_safetensors(root).items()}


@pytest.mark.parametrize("shards", [1, 3])
def test_from_kept_headers_the_same_files_come_back(shards: int, tmp_path: Path) -> None:
    root = write_tiny("deepseek_v3", tmp_path / "tiny", shards=shards)
    save_headers(SafetensorsReader(root).layout, tmp_path / "kept")
    fill(SafetensorsWriter(tmp_path / "out", load_layout(tmp_path / "kept")), bytes_of(root))
    assert sha256_tree(tmp_path / "out") == weights(root)


def test_odd_but_valid_headers_come_back_verbatim(tmp_path: Path) -> None:
    """Key order unlike byte order, metadata last, spaces, escapes, no padding, no alignment."""
    raw = (
        b' { "b\\u00e9": {"shape":[3], "dtype":"U8","data_offsets":[0,3]},'
        b'"a":{"data_offsets":[3,7],"dtype":"F32","shape":[]}, "z":{"dtype":"I64","shape":[0,2],"data_offsets":[7,7]},'
        b'"__metadata__":{"y":"1","x":"2"}}\n\n '
    )
    root = tmp_path / "odd"
    root.mkdir()
    (root / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"abcdefg")
    layout = SafetensorsReader(root).layout
    fill(SafetensorsWriter(tmp_path / "out", layout), {"bé": b"abc", "a": b"defg", "z": b""})
    assert sha256_tree(tmp_path / "out") == sha256_tree(root)


# --- planned without a reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "limit"),  # experts share the storage of a fused tensor in memory, so theirs are not split over shards
    [("llama", "50KB"), ("llama", "20KB"), ("llama", "5GB"), ("qwen3", "20KB"), ("deepseek_v3", "5GB")],
)
def test_plan_is_what_save_pretrained_writes(
    family: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same file names, headers, index and bytes as transformers, given the tensors in the order it takes them."""
    transformers = pytest.importorskip("transformers")
    split = transformers.modeling_utils.split_torch_state_dict_into_shards
    order: list[str] = []

    def recorded(state_dict: dict[str, Any], **kwargs: Any) -> Any:
        order.extend(state_dict)
        return split(state_dict, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "split_torch_state_dict_into_shards", recorded)
    tiny = write_tiny(family, tmp_path / "tiny", dtype="F32", mtp_layers=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)

    theirs = read_safetensors(tmp_path / "theirs")
    specs = [TensorSpec(name, theirs[name][1], theirs[name][0]) for name in order]
    layout = plan_layout(specs, parse_size(limit))
    assert len(layout.shards) == len(list((tmp_path / "theirs").glob("*.safetensors")))
    assert (len(layout.shards) == 1) == (limit == "5GB")
    fill(SafetensorsWriter(tmp_path / "out", layout), {name: data for name, (_, _, data) in theirs.items()})
    ours, expected = sha256_tree(tmp_path / "out"), weights(tmp_path / "theirs")
    assert ours == expected
    assert (INDEX in ours) == (limit != "5GB")


@given(
    st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(1, 60),
)
def test_shards_are_split_as_huggingface_hub_splits(sizes: list[tuple[str, int]], limit: int) -> None:
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    specs = [TensorSpec(f"t{n}", (numel,), dtype) for n, (dtype, numel) in enumerate(sizes)]
    split = split_state_dict_into_shards_factory(
        {spec.name: spec for spec in specs},
        get_storage_size=lambda spec: spec.nbytes,
        get_storage_id=lambda spec: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    layout = plan_layout(specs, limit)
    ours = {shard.name: sorted(spec.name for spec in shard.header.specs) for shard in layout.shards}
    assert ours == {file: sorted(names) for file, names in split.filename_to_tensors.items()}
    if layout.index_bytes is not None:
        index = json.loads(layout.index_bytes)
        assert index["weight_map"] == split.tensor_to_filename
        assert index["metadata"]["total_size"] == split.metadata["total_size"]


def test_header_bytes_are_those_of_the_reference_library() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save

    dtypes = {
        "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64, "F32": torch.float32,
        "U32": torch.uint32, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16,
        "I16": torch.int16, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    }  # fmt: skip
    tensors = {f'n"\\\né\u0001\x7f{dtype}': torch.zeros(2, 1, dtype=dtypes[dtype]) for dtype in sorted(dtypes)}
    tensors |= {"scalar": torch.zeros(()), "empty": torch.zeros(0, 3), "b": torch.zeros(1), "a": torch.zeros(1)}
    theirs = save(tensors, metadata={"format": "pt"})
    names = {dtype: name for name, dtype in dtypes.items()}
    specs = [TensorSpec(name, tuple(tensor.shape), names[tensor.dtype]) for name, tensor in tensors.items()]
    (shard,) = plan_layout(specs, 10**9).shards
    assert theirs.startswith(shard.header.raw)
    assert len(theirs) == shard.header.end
    assert set(dtypes) == {dtype for dtype in DTYPE_BITS if not dtype.startswith(("F4", "F6_"))}


def test_plan_refuses_nothing_and_twice() -> None:
    with pytest.raises(CheckpointError, match="not a single tensor"):
        plan_layout([], 10)
    a = TensorSpec("a", (4,), "U8")
    with pytest.raises(CheckpointError, match="tensor a would be written twice"):
        plan_layout([a, a], 10)
    with pytest.raises(CheckpointError, match="tensor a lies in two files"):
        plan_layout([a, a], 4)


@pytest.mark.parametrize("text", ["5GB", "500MB", "1.5 kb", "2TB", " 10GB ", "0.001mb"])
def test_sizes_are_those_of_huggingface_hub(text: str) -> None:
    from huggingface_hub.serialization._base import parse_size_to_int

    assert parse_size(text) == parse_size_to_int(text)
    assert parse_size("5GB") == 5_000_000_000
    assert parse_size("1234") == 1234


@pytest.mark.parametrize("text", ["", "GB", "5", "5GiB", "-5GB", "0GB", "nanGB", "1e3GB", "1.5", "5 G B", "٣GB"])
def test_sizes_that_are_none(text: str) -> None:
    if text == "5":
        assert parse_size(text) == 5
        return
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


# --- a reference of which some tensors are not written -------------------------------------------------------------


def test_subset_leaves_untouched_shards_alone_and_rewrites_the_others(tmp_path: Path) -> None:
    root = write_tiny("deepseek_v3", tmp_path / "tiny")
    layout = SafetensorsReader(root).layout
    keep = {name for name in layout.inventory() if not name.startswith("model.layers.3.")}
    smaller = subset_layout(layout, keep)
    values = {name: data for name, data in bytes_of(root).items() if name in keep}
    fill(SafetensorsWriter(tmp_path / "out", smaller), values)

    assert bytes_of(tmp_path / "out") == values
    before, after = weights(root), weights(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} == {LAST, INDEX}
    reader = SafetensorsReader(tmp_path / "out")
    assert reader.notes == []
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(map(len, values.values()))
    assert reader.shards[2].header.metadata == {"format": "pt"}
    expected = tmp_path / "expected.safetensors"  # the order that remains is the order that was
    write_safetensors(expected, {k: v for k, v in read_safetensors(root / LAST).items() if k in keep})
    assert expected.read_bytes() == (tmp_path / "out" / LAST).read_bytes()


def test_subset_drops_empty_shards_and_renames_none(tmp_path: Path) -> None:
    root = write_tiny("qwen3", tmp_path / "tiny")
    keep = set(read_safetensors(root / FIRST)) | set(read_safetensors(root / LAST))
    smaller = subset_layout(SafetensorsReader(root).layout, keep)
    assert [shard.name for shard in smaller.shards] == [FIRST, LAST]
    assert smaller.index_bytes is not None
    assert set(json.loads(smaller.index_bytes)["weight_map"].values()) == {FIRST, LAST}
    with pytest.raises(CheckpointError, match="not a single tensor"):
        subset_layout(SafetensorsReader(root).layout, set())


def test_subset_of_everything_is_the_layout_itself(tmp_path: Path) -> None:
    layout = SafetensorsReader(write_tiny("qwen3", tmp_path / "tiny")).layout
    assert subset_layout(layout, set(layout.inventory())) is layout
    with pytest.raises(CheckpointError, match=r"1 tensors have no place in the reference: mtp\.x") as caught:
        subset_layout(layout, {"mtp.x"})
    assert caught.value.next_step


def test_an_index_keeps_what_it_says_besides(tmp_path: Path) -> None:
    root = write_tiny("qwen3", tmp_path / "tiny")
    index = json.loads((root / INDEX).read_text())
    del index["metadata"]["total_parameters"]
    index["metadata"]["note"] = "é"
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    (root / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False), encoding="utf-8")
    layout = SafetensorsReader(root).layout
    smaller = subset_layout(layout, set(layout.inventory()) - {"lm_head.weight"})
    assert smaller.index_bytes is not None
    del index["weight_map"]["lm_head.weight"]
    index["metadata"]["total_size"] -= 98 * 36 * 2
    assert smaller.index_bytes.decode() == json.dumps(index, indent=2, ensure_ascii=False)


def test_adapted_shapes_and_dtypes_stay_aligned(tmp_path: Path) -> None:
    root = tmp_path / "one"
    root.mkdir()
    tensors = {"a": ("BF16", (3,), b"aaaaaa"), "b": ("BF16", (1,), b"bb"), "c": ("U8", (5,), b"ccccc")}
    write_safetensors(root / "model.safetensors", tensors)
    layout = SafetensorsReader(root).layout
    wanted = layout.inventory() | {"b": TensorSpec("b", (2,), "F32"), "c": TensorSpec("c", (4,), "U8")}
    adapted = adapt_layout(layout, wanted)
    assert adapted.inventory() == wanted
    assert adapted.index_bytes is None
    values = {"a": b"aaaaaa", "b": b"bbbbbbbb", "c": b"cccc"}
    fill(SafetensorsWriter(tmp_path / "out", adapted), values)
    assert bytes_of(tmp_path / "out") == values
    for _, spec, start in adapted:
        assert start % (DTYPE_BITS[spec.dtype] // 8) == 0
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[8:]
    assert list(json.JSONDecoder().raw_decode(header.decode("latin-1"))[0]) == ["__metadata__", "a", "b", "c"]


# --- the writer's own duties ---------------------------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> SafetensorsLayout:
    return SafetensorsReader(write_tiny("qwen3", tmp_path / "tiny")).layout


def test_no_index_while_a_tensor_is_unwritten(layout: SafetensorsLayout, tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "out", layout)
    writer.create()
    names = list(layout.inventory())
    for name in names[:-1]:
        writer.finish_chunk(name, 0, 0)
    with pytest.raises(TargetError, match=f"1 of {len(names)} tensors were never written: {names[-1]}"):
        writer.commit()
    assert not (tmp_path / "out" / INDEX).exists()
    writer.finish_chunk(names[-1], 0, 0)
    with pytest.raises(TargetError, match=f"tensor {names[-1]} was written twice"):
        writer.finish_chunk(names[-1], 0, 0)
    with pytest.raises(TargetError, match=f"tensor {names[0]} has no chunk 1"):
        writer.finish_chunk(names[0], 1, 0)
    writer.commit()
    assert (tmp_path / "out" / INDEX).exists()


def test_create_again_keeps_what_was_written(layout: SafetensorsLayout, tmp_path: Path) -> None:
    first = SafetensorsWriter(tmp_path / "out", layout)
    first.create()
    path = tmp_path / "out" / SECOND
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"done")
    SafetensorsWriter(tmp_path / "out", layout).create()
    assert path.read_bytes().endswith(b"done")
    assert sorted(sha256_tree(tmp_path / "out")) == [FIRST, SECOND, LAST]
    with path.open("ab") as file:
        file.write(b"!")
    with pytest.raises(TargetError, match=f"{SECOND} is there already and is another file"):
        SafetensorsWriter(tmp_path / "out", layout).create()


def test_files_are_created_at_full_size(layout: SafetensorsLayout, tmp_path: Path) -> None:
    SafetensorsWriter(tmp_path / "out", layout).create()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "tiny").glob("*.safetensors")}


def test_the_disk_s_refusals_name_the_file(layout: SafetensorsLayout, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match=r"cannot write out: Not a directory") as caught:
        SafetensorsWriter(tmp_path / "file" / "out", layout).create()
    assert caught.value.next_step
    (tmp_path / "out" / FIRST).mkdir(parents=True)
    with pytest.raises(TargetError, match=f"cannot write {FIRST}: Is a directory"):
        SafetensorsWriter(tmp_path / "out", layout).create()

    writer = SafetensorsWriter(tmp_path / "gone", layout)
    writer.create()
    for name in layout.inventory():
        writer.finish_chunk(name, 0, 0)
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(TargetError, match=f"cannot write {FIRST}: No such file"):
        writer.commit()


def test_a_full_disk_is_a_target_error(layout: SafetensorsLayout, tmp_path: Path) -> None:
    """A file-size limit stands in for it; Python ignores SIGXFSZ, so the write fails with EFBIG."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(TargetError, match=f"cannot write {FIRST}: File too large"):
            SafetensorsWriter(tmp_path / "out", layout).create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
