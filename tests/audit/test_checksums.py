"""CRC-32 of records from the stretches that the comparison reads: against zlib, and each byte is read once."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconvert.audit import windows
from mtpconvert.audit.api import audit
from mtpconvert.audit.checksums import Sums, combined
from mtpconvert.audit.readers.opening import open_side
from tests.support.handmade import write_pair, write_torch_dist
from tests.support.tiny import write_tiny


@given(first=st.binary(max_size=80), second=st.binary(max_size=300))
def test_the_crc_of_a_whole_is_that_of_its_parts(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_long_parts_combine() -> None:
    data = bytes(range(256)) * 40_000
    for cut in (1, 1 << 20, len(data) - 1):
        assert combined(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut) == zlib.crc32(data)


def test_a_stretch_grows_while_reads_follow_one_another() -> None:
    data = memoryview(bytes(range(100)))
    sums = Sums()
    for file, start, stop in ((0, 10, 20), (0, 50, 60), (0, 20, 30), (1, 30, 40), (0, 60, 70)):
        sums.add(file, start, data[start:stop])
    assert {file: sorted(stretches) for file, stretches in sums.by_file().items()} == {
        0: [(10, 30, zlib.crc32(data[10:30])), (50, 70, zlib.crc32(data[50:70]))],
        1: [(30, 40, zlib.crc32(data[30:40]))],
    }


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int, int]]:
    """(file, start, stop) of every read of weights."""
    found: list[tuple[Path, int, int]] = []
    plain = windows.Files.read_into

    def read_into(self: Any, file: int, view: memoryview, offset: int) -> None:
        found.append((self.paths[file], offset, offset + len(view)))
        plain(self, file, view, offset)

    monkeypatch.setattr(windows.Files, "read_into", read_into)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3"])
def test_each_byte_of_a_record_is_read_once(
    family: str, tmp_path: Path, reads: list[tuple[Path, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused projections too, whose parts are read by different pairs; nothing of a record is left out either.

    With runs as they are in models of real size: short ones are read in one span, with what lies between them.
    """
    monkeypatch.setattr(windows, "_SHORT", 0)
    hf = write_tiny(family, tmp_path / "hf")
    write_pair(hf, tmp_path / "mc")
    assert audit(hf, tmp_path / "mc").verdict() == "pass"
    side = open_side(tmp_path / "mc", "right")
    seen = sorted((start, stop) for path, start, stop in reads if path in side.files and start < stop)
    assert all(one[1] <= two[0] for one, two in pairwise(seen))
    records = [record for name in side.inventory for record in side.records(name)]
    assert sum(stop - start for start, stop in seen) == sum(record.length for record in records)


@pytest.mark.parametrize("known", [True, False])
def test_records_that_no_pair_reads_are_checked(tmp_path: Path, known: bool) -> None:
    """A tensor without an answer on the other side, and a whole checkpoint whose architecture nobody knows."""
    hf = write_tiny("llama", tmp_path / "hf")
    write_pair(hf, tmp_path / "mc")
    if known:
        side = open_side(tmp_path / "mc", "right")
        arrays = {"decoder.layers.0.surplus.weight": np.arange(1, 65, dtype="<u2").reshape(8, 8)}
        path = write_torch_dist(tmp_path / "other", arrays, side.arguments)
    else:
        (hf / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
        path = tmp_path / "mc" / "release"
    root = path.parent
    assert "crc-mismatch" not in {f.code for f in audit(hf, root).findings}
    side = open_side(root, "right")
    name = next(iter(side.inventory))
    record = side.records(name)[0]
    with side.files[record.file].open("r+b") as file:
        file.seek(record.offset + record.length - 1)
        byte = file.read(1)[0]
        file.seek(record.offset + record.length - 1)
        file.write(bytes([byte ^ 128]))
    assert [f.tensor for f in audit(hf, root).findings if f.code == "crc-mismatch"] == [name]


def test_a_flipped_bit_of_padding_that_nothing_compares(tmp_path: Path) -> None:
    """Rows beyond the vocabulary belong to no pair; their bytes belong to the record."""
    hf = write_tiny("llama", tmp_path / "hf")
    write_pair(hf, tmp_path / "mc", rows=128)
    side = open_side(tmp_path / "mc", "right")
    assert side.inventory["output_layer.weight"].shape[0] == 128
    record = side.records("output_layer.weight")[0]
    with side.files[record.file].open("r+b") as file:
        file.seek(record.offset + record.length - 1)
        file.write(b"\x01")
    codes = {f.code: f.tensor for f in audit(hf, tmp_path / "mc").findings}
    assert codes["crc-mismatch"] == codes["padding-nonzero"] == "output_layer.weight"
    assert "bytes-differ" not in codes
