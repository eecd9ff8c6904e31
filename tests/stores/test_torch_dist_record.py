"""Records of a .distcp file: torch's own found by position, ours read back by torch and by zipfile."""

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from mtpconvert.errors import CheckpointError, IncompleteError, NotRepresentableError
from mtpconvert.stores.torch_dist.record import Record, read_object, read_record
from mtpconvert.stores.torch_dist.record_write import lay_out, object_container
from mtpconvert.stores.torch_dist.unpickle import TORCH_DTYPES
from mtpconvert.tensors import DTYPE_BITS


def saved(tensor: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def record_in(path: Path, data: bytes, before: int = 0, after: int = 0) -> Record:
    """``data`` among other bytes of a file, as DCP puts records one after another."""
    path.write_bytes(b"\xee" * before + data + b"PK\x05\x06" * (after // 4))
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_record(fd, before, len(data), "a record")
    finally:
        os.close(fd)


def elements(path: Path, record: Record) -> bytes:
    """The tensor's elements in C order, taken one by one from where the record says that they are."""
    raw = path.read_bytes()
    size = DTYPE_BITS[record.dtype] // 8
    steps = record.strides
    at = [record.offset + sum(i * s for i, s in zip(n, steps, strict=True)) for n in np.ndindex(record.shape)]
    return b"".join(raw[p : p + size] for p in at)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def sample(name: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_saves_are_found_by_position(name: str, tmp_path: Path) -> None:
    tensor = sample(name, 2, 3, 4)
    for variant in (tensor, tensor.transpose(0, 2), tensor[1:, :, 1:3], tensor[:, 1], sample(name, 1).reshape(())):
        record = record_in(tmp_path / "x", saved(variant), before=37, after=400)
        assert (record.dtype, record.shape) == (TORCH_DTYPES[name], tuple(variant.shape))
        assert elements(tmp_path / "x", record) == bits(variant)


def test_a_large_record_is_read_through_its_ends(tmp_path: Path) -> None:
    tensor = torch.arange(50_000, dtype=torch.int32).reshape(250, 200)
    record = record_in(tmp_path / "x", saved(tensor), before=3)
    raw = (tmp_path / "x").read_bytes()
    assert raw[record.offset : record.offset + 200_000] == bits(tensor)
    assert record.crc32 == zlib.crc32(raw[record.storage : record.storage + record.nbytes])


def test_parameters_and_other_folder_names_are_read(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0))
    assert record_in(tmp_path / "x", saved(parameter)).shape == (6,)
    torch.save(torch.arange(6.0), tmp_path / "name of its own.pt")  # the folder in the zip has the file's name
    assert record_in(tmp_path / "x", (tmp_path / "name of its own.pt").read_bytes()).dtype == "F32"


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("base", [0, 1, 61, 64])
def test_our_records_are_read_by_torch_and_zipfile(name: str, base: int, tmp_path: Path) -> None:
    for shape in ((3, 5), (), (0, 4), (1, 2, 1, 3, 2), (700,)):
        tensor = sample(name, *shape)
        payload = bits(tensor)
        layout = lay_out(base, TORCH_DTYPES[name], tuple(shape))
        data = layout.header(zlib.crc32(payload)) + payload + layout.trailer(zlib.crc32(payload))
        assert len(data) == layout.end - base and layout.data % 64 == 0
        assert len(layout.header(0)) == layout.data - base
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            local = archive.getinfo("archive/data/0").header_offset
        assert struct.unpack_from("<I", data, local + 14) == (zlib.crc32(payload),)  # zipfile looks at the other one
        got = torch.load(io.BytesIO(data), weights_only=True)
        assert (got.dtype, got.shape, got.is_contiguous()) == (tensor.dtype, tensor.shape, True)
        assert bits(got) == payload
        record = record_in(tmp_path / "x", data, before=base, after=8)
        assert (record.dtype, record.shape, record.offset) == (TORCH_DTYPES[name], tuple(shape), layout.data)
        assert record.crc32 == zlib.crc32(payload) and elements(tmp_path / "x", record) == payload


def test_a_wrong_crc_is_what_zipfile_notices(tmp_path: Path) -> None:
    layout = lay_out(0, "U8", (4,))
    data = layout.header(123) + b"abcd" + layout.trailer(123)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() == "archive/data/0"
    assert record_in(tmp_path / "x", data).crc32 == 123


@pytest.mark.parametrize("nbytes", [0xFFFFFFFF - 900, 0xFFFFFFFE, 0xFFFFFFFF, 0x100000000, 0x100000123])
def test_zip64_around_4_gib(nbytes: int, tmp_path: Path) -> None:
    """A file of holes: only the ends are on disk. zipfile reads the last bytes of the payload, torch the tensor."""
    path = tmp_path / "big.distcp"
    layout = lay_out(128, "U8", (nbytes,))
    with path.open("wb") as file:
        file.seek(128)
        file.write(layout.header(7))
        file.seek(layout.data + nbytes - 3)
        file.write(b"end" + layout.trailer(7))
    assert path.stat().st_blocks * 512 < 1 << 20
    with path.open("rb") as file:
        record = read_record(file.fileno(), 128, layout.end - 128, "big")
        assert (record.offset, record.nbytes, record.crc32) == (layout.data, nbytes, 7)
        with zipfile.ZipFile(_Slice(file, 128, layout.end)) as archive:
            info = archive.getinfo("archive/data/0")
            assert (info.file_size, info.compress_size, info.CRC) == (nbytes, nbytes, 7)
            assert archive.read("archive/version") == b"3\n"
            with archive.open(info) as member:
                assert member.read(2) == b"\0\0"
    own = lay_out(0, "U8", (nbytes,))
    with (tmp_path / "own.pt").open("wb") as file:
        file.write(own.header(7))
        file.seek(own.data + nbytes - 3)
        file.write(b"end" + own.trailer(7))
    tensor = torch.load(tmp_path / "own.pt", weights_only=True, mmap=True)
    assert tensor.shape == (nbytes,) and bytes(tensor[-3:].tolist()) == b"end"
    # the zip64 field stands where the size needs it, and only there
    assert (struct.pack("<HHQ", 1, 16, nbytes) in layout.trailer(7)) == (nbytes >= 0xFFFFFFFF)


class _Slice(io.RawIOBase):
    """Bytes [start, stop) of an open file as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, stop: int) -> None:
        self._file, self._start, self._size, self._at = file, start, stop - start, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(self._size - self._at, 0)])
        self._at += count
        return count


def test_objects_are_read_back_by_torch() -> None:
    assert torch.load(io.BytesIO(object_container([None])), weights_only=True) == [None]
    value = {"content_metadata": {"singleton_local_shards": False}, "iteration": 3, "list": [1.5, "x"]}
    assert torch.load(io.BytesIO(object_container(value)), weights_only=True) == value
    with zipfile.ZipFile(io.BytesIO(object_container(value))) as archive:
        assert archive.testzip() is None


def test_objects_with_tensors_are_read_without_their_numbers(tmp_path: Path) -> None:
    data = saved({"rng": torch.get_rng_state(), "n": 1})
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as file:
        value = read_object(file.fileno(), 0, len(data), "x")
    assert isinstance(value, dict) and value["n"] == 1 and value["rng"].dtype == "U8"


def _zip(method: int = zipfile.ZIP_STORED, **files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr("archive/" + name.replace("__", "/").replace("_", "."), content)
    return buffer.getvalue()


def _parts(tensor: torch.Tensor) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as archive:
        return {"data_pkl": archive.read("archive/data.pkl"), "data__0": archive.read("archive/data/0")}


GOOD = _parts(torch.arange(8.0))
REFUSED = {
    "no zip": (b"\x93 old pickle" * 100, "does not end as a zip container"),
    "empty": (b"", "does not end as a zip container"),
    "no data.pkl": (_zip(other=b"x"), "no data.pkl"),
    "compressed": (_zip(zipfile.ZIP_DEFLATED, data_pkl=GOOD["data_pkl"], data__0=bytes(64)), "compressed"),
    "no storage": (_zip(data_pkl=GOOD["data_pkl"]), "no data/0"),
    "storage too short": (_zip(data_pkl=GOOD["data_pkl"], data__0=b"1234"), "its storage has 4 bytes"),
    "big-endian": (_zip(**GOOD, byteorder=b"big"), "big-endian"),
    "no tensor": (saved({"a": 1}), "holds no tensor"),
    "a list of tensors": (saved([torch.zeros(2)]), "holds no tensor"),
    "sparse": (saved(torch.eye(3).to_sparse()), "holds no tensor"),
    "view outside": (
        _zip(data_pkl=GOOD["data_pkl"].replace(b"K\x08\x85", b"K\x09\x85"), data__0=GOOD["data__0"]),
        "reaches element 8",
    ),
    "negative size": (
        _zip(data_pkl=GOOD["data_pkl"].replace(b"K\x08\x85", b"J\xff\xff\xff\xff\x85"), data__0=GOOD["data__0"]),
        "holds no tensor",
    ),
    "corrupt pickle": (_zip(data_pkl=b"\x80\x02", data__0=b""), "data.pkl is not a readable pickle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tmp_path: Path) -> None:
    data, why = REFUSED[case]
    with pytest.raises(CheckpointError, match=why) as caught:
        record_in(tmp_path / "x", data)
    assert caught.value.exit_code == 6 and "a record" in str(caught.value)


def test_a_dtype_without_a_safetensors_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotRepresentableError, match=r"torch\.complex128"):
        record_in(tmp_path / "x", saved(torch.zeros(2, dtype=torch.complex128)))
    with pytest.raises(NotRepresentableError, match="F4") as caught:
        lay_out(0, "F4", (8,))
    assert caught.value.exit_code == 10


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    data = saved(torch.arange(10_000.0))
    (tmp_path / "x").write_bytes(data[:-10])
    with (tmp_path / "x").open("rb") as file, pytest.raises(IncompleteError, match="ends 10 bytes too early") as caught:
        read_record(file.fileno(), 0, len(data), "a record")
    assert caught.value.exit_code == 7


def test_damage_anywhere_in_the_frame_never_escapes(tmp_path: Path) -> None:
    data = saved(torch.arange(4.0))
    rng = np.random.default_rng(3)
    outcomes = set()
    for _ in range(1500):
        broken = bytearray(data)
        broken[rng.integers(len(data))] ^= 1 << rng.integers(8)
        try:
            record = record_in(tmp_path / "x", bytes(broken))
            assert 0 <= record.offset <= len(data) - record.nbytes
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
        except NotRepresentableError:
            outcomes.add("dtype")
    assert {"read", "refused"} <= outcomes
