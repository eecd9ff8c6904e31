"""``.metadata`` of a torch_dist checkpoint: which keys there are, their chunks, and the record of each.

torch/distributed/checkpoint/metadata.py and filesystem.py describe the classes; every field is checked before use.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, TypeGuard

from mtpconvert.errors import CheckpointError, IncompleteError
from mtpconvert.stores.torch_dist import inert
from mtpconvert.stores.torch_dist.cover import first_flaw, show
from mtpconvert.stores.torch_dist.stored import Place, StoredChunk, StoredTensor
from mtpconvert.stores.torch_dist.unpickle import loads
from mtpconvert.tensors import Shape


class StoredKeys:
    """The tables of ``.metadata``: ``tensor_keys`` and ``object_keys``; chunks are checked when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises IncompleteError (no ``.metadata``) and CheckpointError (none that torch writes)."""
        self._path = path
        top = _load(path)
        keys, places = vars(top).get("state_dict_metadata"), vars(top).get("storage_data")
        if not isinstance(keys, dict) or not isinstance(places, dict) or not all(isinstance(k, str) for k in keys):
            self._refuse("its tables of keys and records are missing")
        self._keys: dict[str, object] = keys
        self._places = self._by_key(places)
        self.tensor_keys = [key for key, value in keys.items() if isinstance(value, inert.TensorStorageMetadata)]
        self.object_keys = [key for key, value in keys.items() if isinstance(value, inert.BytesStorageMetadata)]
        if len(self.tensor_keys) + len(self.object_keys) != len(keys):
            self._refuse("it has keys that are neither tensors nor objects")

    def tensor(self, key: str) -> StoredTensor:
        """The tensor, its chunks sorted by place and known to cover it exactly.

        Raises CheckpointError naming the key (hole, overlap, two records for one chunk, bad field), IncompleteError
        (no record for a chunk).
        """
        fields = vars(self._keys[key])
        properties, shape, listed = fields.get("properties"), fields.get("size"), fields.get("chunks")
        dtype = getattr(properties, "dtype", None)
        if not isinstance(dtype, inert.TorchDtype) or not _is_shape(shape) or not isinstance(listed, list):
            self._refuse(f"dtype, size or chunks of {key} are missing", key)
        places = self._places.get(key, {})
        chunks = [self._chunk(key, item, places) for item in listed]
        flaw = first_flaw(shape, [chunk.box for chunk in chunks])
        if flaw is not None:
            self._refuse(f"the chunks of {key} do not cover it exactly: {flaw}", key)
        if len(places) != len(listed):
            self._refuse(f"{len(places)} records hold {key}, but it has {len(listed)} chunks", key)
        return StoredTensor(key, str(dtype), shape, sorted(chunks, key=lambda chunk: chunk.offsets))

    def place(self, key: str) -> Place:
        """The record of an object. Raises IncompleteError when there is none."""
        found = self._places.get(key, {}).get(None)
        if found is None:
            raise self._without_record(key, "it")
        return self._checked(key, found)

    def _chunk(self, key: str, item: object, places: dict[Shape | None, object]) -> StoredChunk:
        fields = vars(item) if isinstance(item, inert.ChunkStorageMetadata) else {}
        offsets, sizes = fields.get("offsets"), fields.get("sizes")
        if not _is_shape(offsets) or not _is_shape(sizes) or len(offsets) != len(sizes):
            self._refuse(f"a chunk of {key} has no offsets or sizes", key)
        if offsets not in places:
            raise self._without_record(key, f"its chunk at {list(offsets)}")
        return StoredChunk(offsets, sizes, self._checked(key, places[offsets]))

    def _by_key(self, places: dict[object, object]) -> dict[str, dict[Shape | None, object]]:
        """key -> chunk offsets (None for objects) -> record. Two records for one chunk are refused."""
        found: dict[str, dict[Shape | None, object]] = {}
        for index, place in places.items():
            fields = vars(index) if isinstance(index, inert.MetadataIndex) else {}
            key, offset = fields.get("fqn"), fields.get("offset")
            if not isinstance(key, str) or not (offset is None or _is_shape(offset)):
                self._refuse("a record in it belongs to no key")
            records = found.get(key)
            if records is None:
                found[key] = {offset: place}
            elif offset in records:
                self._refuse(f"two records hold the same chunk of {key}, at {offset}", key)
            else:
                records[offset] = place
        return found

    def _checked(self, key: str, place: object) -> Place:
        fields = vars(place) if isinstance(place, inert.StorageInfo) else {}
        file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        extent = (offset, length)
        if not isinstance(file, str) or not _is_shape(extent):
            self._refuse(f"the record of {key} has no file, offset or length", key)
        if file in ("", ".", "..") or "/" in file or "\0" in file:
            self._refuse(f"the record of {key} lies outside the checkpoint, in {file!r}", key)
        if fields.get("transform_descriptors"):
            self._refuse(f"the record of {key} went through {fields['transform_descriptors']!r}", key)
        return Place(file, *extent)

    def _without_record(self, key: str, part: str) -> IncompleteError:
        return IncompleteError(
            f"no file holds {key}: {self._path.name} lists {part} without a record",
            where=key,
            next_step="save the checkpoint again; this one was not finished",
        )

    def _refuse(self, why: str, key: str | None = None) -> NoReturn:
        raise CheckpointError(
            f"{self._path}: {why}",
            where=key or str(self._path),
            next_step="copy the checkpoint again, or save it again with megatron-core",
        )


def check_files(folder: Path, tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Sizes of the files that hold ``tensors``. Raises IncompleteError: a file that is missing or too short."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            place = chunk.place
            if place.file not in sizes:
                sizes[place.file] = _size(folder / place.file, tensor.key)
            if place.offset + place.length > sizes[place.file]:
                raise IncompleteError(
                    f"{folder / place.file} is cut short: it has {sizes[place.file]} bytes, "
                    f"{tensor.key} {show(chunk.box)} ends at byte {place.offset + place.length}",
                    where=f"{place.file}, first of {tensor.key}",
                    next_step="copy the file again",
                )
    return sizes


def _size(path: Path, key: str) -> int:
    try:
        return path.stat().st_size
    except OSError as problem:
        raise IncompleteError(
            f"{path} is missing: it holds {key}", where=f"{path.name}, first of {key}", next_step="copy the file again"
        ) from problem


def _load(path: Path) -> inert.Metadata:
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise IncompleteError(
            f"{path} cannot be read: {problem.strerror}",
            where=str(path),
            next_step="give an iteration folder of a finished torch_dist save",
        ) from problem
    top = loads(data, str(path))
    if not isinstance(top, inert.Metadata):
        raise CheckpointError(f"{path} holds no torch DCP metadata", where=str(path), next_step="copy the file again")
    return top


_INTEGERS = {int}  # and no bool


def _is_shape(value: object) -> TypeGuard[Shape]:
    return type(value) is tuple and set(map(type, value)) <= _INTEGERS and min(value, default=0) >= 0
