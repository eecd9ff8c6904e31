"""Headers: every kind of malformed file is refused by name, and safetensors 0.8.0 is never stricter than we are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconvert.errors import CheckpointError, IncompleteError, MtpConvertError
from mtpconvert.stores.safetensors.header import parse_header, read_header
from mtpconvert.tensors import DTYPE_BITS, TensorSpec

AGAIN = "download or save this file again"


def entry(dtype: str, shape: list[Any], begin: Any, end: Any, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def blob(header: object, data: int = 0, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data)


def refusal(tmp_path: Path, content: bytes, kind: type[MtpConvertError] = CheckpointError) -> str:
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(content)
    with pytest.raises(MtpConvertError) as caught:
        read_header(path)
    assert type(caught.value) is kind
    assert caught.value.exit_code == (7 if kind is IncompleteError else 6)
    assert str(path) == caught.value.where
    assert caught.value.next_step
    return caught.value.what


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("BF16", [3, 1], 8, 14)}


def test_a_good_header_in_any_key_order(tmp_path: Path) -> None:
    table = {"b": GOOD["b"], "__metadata__": {"format": "pt"}, "a": GOOD["a"]}
    content = blob(table, 14)
    (tmp_path / "x.safetensors").write_bytes(content)
    header = read_header(tmp_path / "x.safetensors")
    assert header.specs == (TensorSpec("a", (2,), "F32"), TensorSpec("b", (3, 1), "BF16"))
    start = len(content) - 14
    assert header.starts == (start, start + 8)
    assert header.end == len(content)
    assert header.metadata == {"format": "pt"}
    assert header.raw == content[:start]


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    from safetensors import deserialize

    at, table = 0, {}
    for dtype, bits in DTYPE_BITS.items():  # 8 elements of n bits are n bytes
        table[dtype.lower()] = entry(dtype, [2, 4], at, at + bits)
        at += bits
    content = blob(table, at)
    assert {name: value["dtype"] for name, value in deserialize(content)} == {d.lower(): d for d in DTYPE_BITS}
    (tmp_path / "x.safetensors").write_bytes(content)
    assert [spec.nbytes for spec in read_header(tmp_path / "x.safetensors").specs] == list(DTYPE_BITS.values())


@pytest.mark.parametrize(
    ("table", "data", "words"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 12, 16)}, 16, "a hole of 4 bytes lies before tensor b"),
        ({"a": entry("F32", [2], 4, 12)}, 12, "a hole of 4 bytes lies before tensor a"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "tensor b overlaps the tensor before it"),
        ({"a": entry("F32", [2], 0, 8), "z": entry("F32", [0], 4, 4)}, 8, "overlaps the tensor before it by 4 bytes"),
        ({"a": entry("F31", [2], 0, 8)}, 8, "tensor a: unknown dtype 'F31'"),
        ({"a": entry("f32", [2], 0, 8)}, 8, "tensor a: unknown dtype 'f32'"),
        ({"a": entry("F32", [3], 0, 8)}, 8, "tensor a: F32 [3] is 12 bytes, its data_offsets [0, 8] hold 8"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, "tensor a: shape [-2] is no list of integers >= 0"),
        ({"a": entry("F32", [2.0], 0, 8)}, 8, "tensor a: shape [2.0]"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "tensor a: shape [True]"),
        ({"a": entry("F32", [10**9, [1]], 0, 8)}, 8, "tensor a: shape [1000000000, [1]]"),
        ({"a": entry("F32", [1], False, 4)}, 4, "tensor a: data_offsets [False, 4]"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "tensor a: data_offsets [8, 0] are not a begin and an end"),
        ({"a": GOOD["a"] | {"data_offsets": [0, 8, 8]}}, 8, "tensor a: data_offsets [0, 8, 8]"),
        ({"a": entry("F32", [2**40, 2**40, 0], 0, 0)}, 0, "tensor a: the product of its shape"),
        ({"a": entry("F32", [0, 2**64], 0, 0)}, 0, "tensor a: shape [0, 18446744073709551616]"),
        ({"a": entry("F4", [3], 0, 1)}, 1, "tensor a: F4 [3] does not fill whole bytes (12 bits)"),
        ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "tensor a: its header entry lacks shape"),
        ({"a": entry("F32", [2], 0, 8, strides=[1])}, 8, "tensor a: its header entry has unknown strides"),
        ({"a": ["F32", [2], [0, 8]]}, 8, "tensor a: its header entry is not an object"),
        ({"a": GOOD["a"], "__metadata__": {"k": 1}}, 8, "__metadata__ is not an object of strings"),
        ({"a": GOOD["a"], "__metadata__": []}, 8, "__metadata__ is not an object of strings"),
        (
            b'{"a":' + json.dumps(GOOD["a"]).encode() + b',"a":' + json.dumps(GOOD["a"]).encode() + b"}",
            8,
            "names a twice",
        ),
        (b'{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', 8, "names shape twice"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', 0, "names k twice"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}', 8, "the header is not valid JSON"),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8, "the header is not valid JSON: NaN"),
        (b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, "the header is not valid JSON"),
        (b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, "the header is not valid JSON"),
        (b"\xef\xbb\xbf{}", 0, "the header is not valid JSON"),
        (b'{"a":' + b"[" * 200_000, 0, "the header is not valid JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "the header is not valid JSON"),
        (b"{}\0", 0, "the header is not valid JSON"),
        (b"", 0, "the header is not valid JSON"),
        (b"[]", 0, "the header is not a JSON object"),
        ({"a": entry("U8", [2**63], 0, 2**63)}, 0, "the header asks for a file of"),
    ],
)
def test_malformed_headers(table: object, data: int, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, blob(table, data))


def test_truncation_says_sizes_and_the_first_tensor_affected(tmp_path: Path) -> None:
    content = blob(GOOD, 14)
    name = "model-00002-of-00003.safetensors is truncated"
    what = refusal(tmp_path, content[:-1], IncompleteError)
    assert what == (
        f"{name}: {len(content)} bytes expected, {len(content) - 1} found; 1 of 2 tensors affected, the first is b"
    )
    what = refusal(tmp_path, content[:-7], IncompleteError)
    assert "2 of 2 tensors affected, the first is a" in what
    what = refusal(tmp_path, content[:40], IncompleteError)
    assert what == f"{name} inside its header: 40 bytes, the header alone is {len(content) - 14}"
    assert refusal(tmp_path, content[:7], IncompleteError) == f"{name}: 7 bytes, a safetensors file has at least 8"
    assert refusal(tmp_path, b"", IncompleteError) == f"{name}: 0 bytes, a safetensors file has at least 8"
    assert "inside its header" in refusal(tmp_path, blob(b"{}", length=50), IncompleteError)


def test_trailing_bytes_are_not_called_truncation(tmp_path: Path) -> None:
    content = blob(GOOD, 14)
    what = refusal(tmp_path, content + b"\0\0\0\0")
    assert what.endswith(f"has 4 trailing bytes: {len(content) + 4} bytes, its header accounts for {len(content)}")


def test_the_size_cap_is_the_reference_library_s(tmp_path: Path) -> None:
    from safetensors import SafetensorError, deserialize

    cap = 100_000_000
    with pytest.raises(SafetensorError, match="header too large"):
        deserialize(blob(b"{}", length=cap + 1))
    assert "ask for a header of 100000001 bytes" in refusal(tmp_path, blob(b"{}", length=cap + 1))
    assert "inside its header" in refusal(tmp_path, blob(b"{}", length=cap), IncompleteError)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8\n", "a git-LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "a zip archive, as torch.save writes"),
        (b"GGUF\x03\0\0\0" + bytes(100), "a GGUF file"),
        (b"<!doctype html><html>403</html>", "a web page"),
        (b"\xff" * 100, "no safetensors file"),
    ],
)
def test_files_of_other_kinds_are_named(content: bytes, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, content)


def test_a_header_length_that_looks_like_a_magic_is_no_fault(tmp_path: Path) -> None:
    content = blob({"a": entry("U8", [0], 0, 0)})
    padded = content[8:] + b" " * (ord("<") - len(content) + 8)
    (tmp_path / "x.safetensors").write_bytes(blob(padded))
    assert (tmp_path / "x.safetensors").read_bytes()[:1] == b"<"
    assert read_header(tmp_path / "x.safetensors").specs == (TensorSpec("a", (0,), "U8"),)


def test_unreadable_and_absent_files(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match=r"gone\.safetensors does not exist"):
        read_header(tmp_path / "gone.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"dir.safetensors cannot be read: Is a directory"):
        read_header(tmp_path / "dir.safetensors")


def test_a_kept_header_must_be_whole_and_alone() -> None:
    raw = blob(GOOD)
    assert parse_header(raw, "x").end == len(raw) + 14
    with pytest.raises(IncompleteError, match="has only"):
        parse_header(raw[:-1], "x")
    with pytest.raises(CheckpointError, match="1 bytes follow a header"):
        parse_header(raw + b" ", "x")


# --- against the reference library ---------------------------------------------------------------------------------

MUTATIONS: tuple[Any, ...] = (0, 1, 4, 8, -1, 2**64, 1.5, None, "F32", [], [0, 4], {}, True)


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """JSON and a data length: a sound header, most of the time with one thing about it changed."""
    table: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.text(max_size=3), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        if DTYPE_BITS[dtype] % 8:
            shape.append(8)
        size = DTYPE_BITS[dtype]
        for dim in shape:
            size *= dim
        table[name] = entry(dtype, shape, at, at + size // 8)
        at += size // 8
    if draw(st.booleans()):
        table["__metadata__"] = draw(st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2))
    names = [name for name in table if name != "__metadata__"]
    if names:
        name = draw(st.sampled_from(names))
        match draw(st.integers(0, 6)):
            case 0:
                field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
                table[name][field] = draw(st.sampled_from(MUTATIONS))
            case 1:
                shape = table[name]["shape"]
                shape.insert(draw(st.integers(0, len(shape))), draw(st.sampled_from(MUTATIONS)))
            case 2:
                offsets = table[name]["data_offsets"]
                offsets[draw(st.integers(0, 1))] = draw(st.integers(0, at + 2))
            case 3:
                del table[name][draw(st.sampled_from(["dtype", "shape", "data_offsets"]))]
            case 4:
                table["__metadata__"] = draw(st.sampled_from(MUTATIONS))
    raw = json.dumps(table, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    raw += draw(st.sampled_from([b"", b"   ", b"\n", b"\0"]))
    return raw, max(0, at + draw(st.sampled_from([0, 0, 0, 0, 1, -1])))


@given(headers())
def test_same_verdict_as_safetensors(header: tuple[bytes, int]) -> None:
    """On these headers (no repeated names, no unknown keys, entries as objects) the two agree exactly."""
    from safetensors import SafetensorError, deserialize

    content = blob(*header)
    try:
        theirs = {name: (value["dtype"], tuple(value["shape"])) for name, value in deserialize(content)}
    except SafetensorError:
        theirs = None
    ours = _verdict(content, header[1])
    assert ours == theirs


@given(st.binary(max_size=40))
def test_never_laxer_than_safetensors_on_bytes(raw: bytes) -> None:
    from safetensors import SafetensorError, deserialize

    content = blob(b"{" + raw + b"}")
    if _verdict(content, 0) is not None:
        try:
            deserialize(content)
        except SafetensorError as error:
            pytest.fail(f"accepted, but safetensors says: {error}")


def _verdict(content: bytes, data: int) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Tensors of ``content``, or None where it is refused; by ``parse_header`` and the size it asks for."""
    try:
        header = parse_header(content[: len(content) - data], "x")
    except CheckpointError:
        return None
    if header.end != len(content):
        return None
    return {spec.name: (spec.dtype, spec.shape) for spec in header.specs}


def test_where_this_reader_is_stricter(tmp_path: Path) -> None:
    """safetensors 0.8.0 takes these; the module says so, and this test notices if it ever changes."""
    from safetensors import deserialize

    twice = b'{"a":' + json.dumps(GOOD["a"]).encode() + b',"a":' + json.dumps(GOOD["a"]).encode() + b"}"
    for table, data in (
        (twice, 8),
        (b'{"__metadata__":{"k":"1","k":"2"}}', 0),
        ({"a": ["F32", [2], [0, 8]]}, 8),
        ({"a": entry("F32", [2], 0, 8, strides=[1])}, 8),
    ):
        deserialize(blob(table, data))
        refusal(tmp_path, blob(table, data))
