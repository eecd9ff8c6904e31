"""HF -> Megatron -> HF through both real stores in a temporary directory, group by group, every byte compared.

A group is one layer, or one stacked key, so that a model of any size needs the room of its largest group only.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from mtpconvert.convert.chunking import chunk_boxes
from mtpconvert.convert.copies import compare_copies
from mtpconvert.convert.decoded_reader import DecodedReader
from mtpconvert.convert.encoding_writer import EncodingWriter
from mtpconvert.convert.execute import execute
from mtpconvert.convert.inspect_bytes import windows
from mtpconvert.convert.row_codecs import ComputedReader, ComputingWriter
from mtpconvert.convert.stacked import is_stacked
from mtpconvert.convert.to_mcore import HfSource, ToMcore, open_source
from mtpconvert.errors import CheckpointError
from mtpconvert.mapping.plan import Plan
from mtpconvert.stores.base import Reader
from mtpconvert.stores.safetensors.plan import plan_layout
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from mtpconvert.stores.safetensors.writer import SafetensorsWriter
from mtpconvert.stores.torch_dist.reader import TorchDistReader
from mtpconvert.stores.torch_dist.writer import TorchDistWriter
from mtpconvert.tensors import DTYPE_BITS, TensorSpec, whole

_LAYER = re.compile(r"^(decoder\.layers\.|mtp\.layers\.)(\d+)\.(.+)$")

Advance = Callable[[int, str], None]


@dataclass(frozen=True)
class RoundTrip:
    """``copies`` are compared with their source instead of being carried."""

    plan: Plan
    groups: int
    tensors: int
    nbytes: int


def roundtrip(source: Path, options: ToMcore, start: Callable[[int], Advance]) -> RoundTrip:
    """Carry every tensor of ``source`` there and back.

    Raises CheckpointError at the first tensor that differs, NotRepresentableError for a copy unlike its source.
    """
    opened = open_source(source, options)
    if isinstance(opened.reader, DecodedReader):
        opened.reader.check_scales()
    opened.plan.notes += compare_copies(opened.plan, opened.reader)
    groups = _groups(opened.plan)
    advance = start(opened.plan.nbytes)
    tensors = nbytes = 0
    for name, members in groups.items():
        part = _part(opened.plan, members)
        with tempfile.TemporaryDirectory(prefix="mtpconvert-roundtrip-") as folder:
            back = _there_and_back(part, opened, Path(folder), name)
            before = opened.files if opened.packing.kind == "fp8_block" else opened.reader
            for spec in back.inventory().values():
                _compare(before, back, spec)
                tensors += 1
                nbytes += spec.nbytes
            for tensor, spec in part.hf.items():
                advance(spec.nbytes, tensor)
    return RoundTrip(opened.plan, len(groups), tensors, nbytes)


def _groups(plan: Plan) -> dict[str, set[str]]:
    """Megatron tensors by stacked key where layers share one, else by layer; the rest is one group each."""
    stacked = is_stacked(plan.mcore)
    groups: dict[str, set[str]] = {}
    for name in plan.mcore:
        match = _LAYER.match(name)
        if match is None:
            key = name
        elif stacked and match[1] == "decoder.layers.":
            key = match[1] + match[3]
        else:
            key = match[1] + match[2]
        groups.setdefault(key, set()).add(name)
    return groups


def _part(plan: Plan, members: set[str]) -> Plan:
    tiles = [tile for tile in plan.tiles if tile.mcore.tensor in members]
    names = {tile.hf.tensor for tile in tiles}
    return replace(
        plan,
        tiles=tiles,
        fills=[fill for fill in plan.fills if fill.mcore.tensor in members],
        copies=[],
        hf={name: spec for name, spec in plan.hf.items() if name in names},
        codecs={name: codec for name, codec in plan.codecs.items() if name in names},
        mcore={name: spec for name, spec in plan.mcore.items() if name in members},
    )


def _there_and_back(part: Plan, opened: HfSource, folder: Path, group: str) -> SafetensorsReader:
    there = folder / "megatron"
    there.mkdir()
    writer = TorchDistWriter(
        there,
        list(part.mcore.values()),
        chunk_boxes(part),
        stacked=group.startswith("decoder.layers.") and not group.removeprefix("decoder.layers.").isdigit(),
        common={"args": {}, "iteration": 0},
    )
    with closing(writer):
        writer.create()
        execute(part, ComputedReader(opened.reader, part.codecs), writer, lambda _count, _name: None)
        writer.commit()
    packing = opened.packing.only(part.hf if opened.packing.kind == "fp8_block" else ())
    specs = {name: spec for name, spec in part.hf.items() if name not in packing.tensors} | packing.stored(part.hf)
    plain = SafetensorsWriter(folder / "hf", plan_layout(list(specs.values()), 1 << 62))
    encoding = EncodingWriter(plain, packing, opened.files) if packing.tensors else plain
    back = ComputingWriter(encoding, part.codecs, part.hf, opened.files)
    with closing(back), closing(TorchDistReader(there)) as stored:
        back.create()
        execute(replace(part, direction="mcore2hf"), stored, back, lambda _count, _name: None)
        back.commit()
    shutil.rmtree(there)
    return SafetensorsReader(folder / "hf")


def _compare(before: Reader, after: Reader, spec: TensorSpec) -> None:
    name, itemsize = spec.name, DTYPE_BITS[spec.dtype] // 8
    block = whole(name, spec.shape)
    for one, other in zip(windows(before, block, itemsize), windows(after, block, itemsize), strict=True):
        if one != other:
            raise CheckpointError(
                f"{name} came back with other bytes",
                where=str(before.root),
                next_step="this is a fault of mtpconvert or of the disk; mtpconvert audit says where; please report it",
            )
