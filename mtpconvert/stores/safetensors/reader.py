"""A Hugging Face directory of safetensors files as a Reader, and its headers kept apart from its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mtpconvert.errors import CheckpointError, IncompleteError, some
from mtpconvert.garbage import no_gc
from mtpconvert.stores.base import Chunk
from mtpconvert.stores.safetensors.header import Header, damaged, parse_header, read_header
from mtpconvert.stores.safetensors.layout import INDEX_NAME, SINGLE_NAME, Index, SafetensorsLayout, Shard, parse_index
from mtpconvert.stores.source_files import SourceFiles
from mtpconvert.tensors import DTYPE_BITS, Inventory, TensorSpec

HEADER_SUFFIX = ".header"  # model.safetensors.header: the raw header of model.safetensors
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


class SafetensorsReader:
    """Reader of one ``*.safetensors`` file, or of an index and its shards, in the directory ``root``.

    Opening it reads and checks every header and the index, no weights. Raises IncompleteError for a missing or
    truncated file and CheckpointError for everything else that is not in order.
    """

    kind = "Hugging Face safetensors"

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            names = sorted(entry.name for entry in root.iterdir())
        except OSError as error:
            raise CheckpointError(
                f"{root} cannot be listed: {error.strerror}", where=str(root), next_step="give a directory"
            ) from None
        files = {name: root / name for name in names if name.endswith(".safetensors")}
        self.layout = _assemble(files, read_header, _read_index(root, names), str(root))
        self._files = SourceFiles(self.path)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.layout.shards

    @property
    def index_bytes(self) -> bytes | None:
        return self.layout.index_bytes

    @property
    def notes(self) -> list[str]:
        """What is odd about the files but harms nothing, as sentences."""
        return self.layout.notes

    def inventory(self) -> Inventory:
        return self.layout.inventory()

    def chunks(self, name: str) -> tuple[Chunk]:
        return (chunk_of(*self.layout.places[name]),)

    def path(self, file: int) -> Path:
        return self.root / self.shards[file].name

    def read(self, file: int, buffer: memoryview, offset: int) -> None:
        self._files.read(file, buffer, offset)


def chunk_of(file: int, spec: TensorSpec, start: int) -> Chunk:
    """The one chunk of a tensor in a safetensors file: all of it, in C order.

    Strides are whole bytes. An axis of a sub-byte dtype along which a step is not a whole number of bytes has stride
    0: nothing but the whole of it can be addressed.
    """
    bits = DTYPE_BITS[spec.dtype]
    strides = []
    for dim in reversed(spec.shape):
        strides.append(0 if bits % 8 else bits // 8)
        bits *= dim
    return Chunk(tuple((0, dim) for dim in spec.shape), file, start, tuple(reversed(strides)))


def save_headers(layout: SafetensorsLayout, out_dir: Path) -> None:
    """Write each shard's raw header (``<shard>.header``) and the index, verbatim, into ``out_dir``; nothing is synced.

    Raises OSError as the filesystem does; ``out_dir`` is made if it is not there.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    for shard in layout.shards:
        (out_dir / (shard.name + HEADER_SUFFIX)).write_bytes(shard.header.raw)
    if layout.index is not None:
        (out_dir / layout.index.name).write_bytes(layout.index.raw)


def load_layout(directory: Path) -> SafetensorsLayout:
    """The layout of a reference: headers kept by ``save_headers``, or a Hugging Face directory with its weights.

    Raises CheckpointError when ``directory`` is neither.
    """
    names = sorted(path.name for path in directory.iterdir())
    if not any(name.endswith(".safetensors" + HEADER_SUFFIX) for name in names):
        return SafetensorsReader(directory).layout
    return _from_headers(directory, _read_index(directory, names))


def _from_headers(headers_dir: Path, index: Index | None) -> SafetensorsLayout:
    suffix = ".safetensors" + HEADER_SUFFIX
    paths = sorted(path for path in headers_dir.iterdir() if path.name.endswith(suffix))
    files = {path.name.removesuffix(HEADER_SUFFIX): path for path in paths}
    return _assemble(files, lambda path: parse_header(path.read_bytes(), str(path)), index, str(headers_dir))


def _read_index(root: Path, names: Iterable[str]) -> Index | None:
    """The one index among ``names``, if there is one."""
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indices) > 1:
        raise CheckpointError(
            f"there are {len(indices)} indices: {some(indices)}",
            where=str(root),
            next_step="keep the one whose weights are meant, move the others away",
        )
    if not indices:
        return None
    try:
        raw = (root / indices[0]).read_bytes()
    except OSError as error:
        raise damaged(f"{indices[0]} cannot be read: {error.strerror}", str(root)) from None
    return parse_index(raw, f"{root}/{indices[0]}", indices[0])


def _assemble(
    files: Mapping[str, Path], read: Callable[[Path], Header], index: Index | None, where: str
) -> SafetensorsLayout:
    """Index and files to a layout; refuses missing files, files that are not in the index, and sets without one."""
    with no_gc():
        if index is None:
            _check_no_index_needed(list(files), where)
            shards = tuple(Shard(name, read(path)) for name, path in files.items())
            layout = SafetensorsLayout(shards, where=where)
            if files and SINGLE_NAME not in files:
                layout.notes.append(f"the one weights file is called {next(iter(files))}, not {SINGLE_NAME}")
            return layout
        mapped = index.weight_map
        listed = sorted(set(mapped.values()))
        missing = [name for name in listed if name not in files or not files[name].exists()]
        if missing:
            counts = [f"{name} ({sum(file == name for file in mapped.values())} tensors)" for name in missing]
            raise IncompleteError(
                f"{len(missing)} of {len(listed)} files that {index.name} names are missing: {some(counts)}",
                where=where,
                next_step="download these files again, from the same revision",
            )
        surplus = [name for name in files if name not in set(listed)]
        if surplus:
            raise _surplus(surplus, files, read, index, where)
        shards = tuple(Shard(name, read(files[name])) for name in listed)
        return SafetensorsLayout(shards, index, where)


def _surplus(
    surplus: list[str],
    files: Mapping[str, Path],
    read: Callable[[Path], Header],
    index: Index,
    where: str,
) -> CheckpointError:
    """The refusal of weight files that the index does not name, saying what is in them."""
    described = []
    for name in surplus:
        try:
            tensors = [spec.name for spec in read(files[name]).specs]
            both = sum(tensor in index.weight_map for tensor in tensors)
            described.append(f"{name} ({len(tensors)} tensors, {both} of them also in the index: {some(tensors, 2)})")
        except CheckpointError as error:
            described.append(f"{name} (unreadable: {error.what})")
    return CheckpointError(
        f"{len(surplus)} *.safetensors files are not in {index.name}: {some(described)}",
        where=where,
        next_step="a stale set, or tensors (often MTP) that the index forgot: move these files away, or correct the "
        "index so that every file and tensor is in it",
    )


def _check_no_index_needed(names: list[str], where: str) -> None:
    if not names:
        raise CheckpointError("there are no *.safetensors files here", where=where, next_step="check the path")
    numbered = [match for name in names if (match := _NUMBERED.fullmatch(name)) and int(match[3]) > 1]
    if numbered:
        wanted = [
            f"{numbered[0][1]}-{number + 1:0{len(numbered[0][2])}d}-of-{numbered[0][3]}.safetensors"
            for number in range(min(int(numbered[0][3]), 100_000))
        ]
        missing = [name for name in wanted if name not in names]
        shards = f"; {len(missing)} of {len(wanted)} shards are missing too: {some(missing)}" if missing else ""
        raise IncompleteError(
            f"{INDEX_NAME} is missing beside {some(names)}{shards}",
            where=where,
            next_step="download the index from where the shards came from",
        )
    if len(names) > 1:
        raise CheckpointError(
            f"there are {len(names)} *.safetensors files and no index that says which are meant: {some(names)}",
            where=where,
            next_step=f"keep the one whose weights are meant, or provide {INDEX_NAME}",
        )
