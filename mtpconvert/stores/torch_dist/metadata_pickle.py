"""``.metadata``: the pickle of ``torch.distributed.checkpoint.metadata.Metadata``, emitted by hand.

Protocol 4. The classes and field names are put into the memo first, so that each chunk costs about 150 bytes and a
microsecond or two. Fields as torch 2.6 to 2.13 write them (torch/distributed/checkpoint/metadata.py,
filesystem.py:_StorageInfo); the deprecated tensor properties have the values of a plain CPU tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mtpconvert.stores.torch_dist.pickle_write import encode_int, encode_tuple, torch_name
from mtpconvert.stores.torch_dist.stored import Place, StoredTensor
from mtpconvert.tensors import Shape

_DCP = "torch.distributed.checkpoint."
_CLASSES = {
    "Metadata": (f"{_DCP}metadata", "Metadata"),
    "TensorStorageMetadata": (f"{_DCP}metadata", "TensorStorageMetadata"),
    "BytesStorageMetadata": (f"{_DCP}metadata", "BytesStorageMetadata"),
    "ChunkStorageMetadata": (f"{_DCP}metadata", "ChunkStorageMetadata"),
    "TensorProperties": (f"{_DCP}metadata", "TensorProperties"),
    "MetadataIndex": (f"{_DCP}metadata", "MetadataIndex"),
    "StorageMeta": (f"{_DCP}metadata", "StorageMeta"),
    "_MEM_FORMAT_ENCODING": (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"),
    "_StorageInfo": (f"{_DCP}filesystem", "_StorageInfo"),
    "Size": ("torch", "Size"),
    "_get_layout": ("torch.serialization", "_get_layout"),
}
_FIELDS = ("properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")


def metadata_pickle(tensors: Iterable[StoredTensor], objects: Mapping[str, Place]) -> bytes:
    """The whole ``.metadata``: tensors with their chunks, and where the record of each object is."""
    return _Emitter().document(list(tensors), objects)


class _Emitter:
    def __init__(self) -> None:
        self._memo: dict[str, bytes] = {}
        self._sizes: dict[Shape, bytes] = {}
        self._prelude = bytearray(b"\x80\x04")
        for name, (module, attribute) in _CLASSES.items():
            self._remember(name, _text(module) + _text(attribute) + b"\x93")
        for name in _FIELDS:
            self._remember(name, _text(name))
        self._remember("layout", self._get("_get_layout") + _text("torch.strided") + b"\x85R")
        self._remember("format", self._get("_MEM_FORMAT_ENCODING") + b"K\x00\x85R")

    def document(self, tensors: list[StoredTensor], objects: Mapping[str, Place]) -> bytes:
        # Written first, pushed last: both tables put dtypes and file names into the memo while they are written.
        keys, places = self._keys(tensors, objects), self._places(tensors, objects)
        meta = b"".join(
            (
                self._new("StorageMeta", b""),
                b"}(" + _text("checkpoint_id") + b"N" + _text("save_id") + b"N",
                _text("load_id") + b"N" + _text("modules") + b"]ub",
            )
        )
        return b"".join(
            (
                bytes(self._prelude),
                self._new("Metadata", b""),
                b"}(" + _text("state_dict_metadata") + keys,
                _text("planner_data") + b"N",
                _text("storage_data") + places,
                _text("storage_meta") + meta,
                _text("version") + _text("1.0.0"),
                b"ub.",
            )
        )

    def _keys(self, tensors: list[StoredTensor], objects: Mapping[str, Place]) -> bytes:
        chunk_start = self._new("ChunkStorageMetadata", b"}(" + self._get("offsets"))
        sizes = self._get("sizes")
        parts = [b"}("]
        for tensor in tensors:
            parts += (
                _text(tensor.key),
                self._new("TensorStorageMetadata", b"}(" + self._get("properties") + self._properties(tensor)),
                self._get("size") + self._size(tensor.shape),
                self._get("chunks") + b"](",
            )
            for chunk in tensor.chunks:
                parts += (chunk_start, self._size(chunk.offsets), sizes, self._size(chunk.sizes), b"ub")
            parts.append(b"eub")
        nothing = self._new("BytesStorageMetadata", b"")
        for key in objects:
            parts += (_text(key), nothing)
        parts.append(b"u")
        return b"".join(parts)

    def _places(self, tensors: list[StoredTensor], objects: Mapping[str, Place]) -> bytes:
        index_start = self._new("MetadataIndex", b"}(" + self._get("fqn"))
        at = self._get("offset")
        no_index = self._get("index") + b"Nub"
        info_start = self._new("_StorageInfo", b"}(" + self._get("relative_path"))
        length = self._get("length")
        parts = [b"}("]
        for tensor in tensors:
            start = index_start + _text(tensor.key) + at
            for chunk in tensor.chunks:
                parts += (
                    start + self._size(chunk.offsets) + no_index + info_start + self._file(chunk.place.file),
                    at + encode_int(chunk.place.offset) + length + encode_int(chunk.place.length) + b"ub",
                )
        for key, place in objects.items():
            parts += (
                index_start + _text(key) + no_index + info_start + self._file(place.file),
                at + encode_int(place.offset) + length + encode_int(place.length) + b"ub",
            )
        parts.append(b"u")
        return b"".join(parts)

    def _properties(self, tensor: StoredTensor) -> bytes:
        """``(dtype, layout, requires_grad, memory_format, pin_memory)`` as TensorProperties.__getstate__ has it."""
        name = "torch." + torch_name(tensor.dtype, tensor.key)
        if name not in self._memo:
            self._remember(name, _text("torch") + _text(name.removeprefix("torch.")) + b"\x93")
        state = b"(" + self._get(name) + self._get("layout") + b"\x89" + self._get("format") + b"\x89t"
        return self._new("TensorProperties", state) + b"b"

    def _size(self, shape: Shape) -> bytes:
        known = self._sizes.get(shape)
        if known is None:
            known = self._sizes[shape] = self._memo["Size"] + encode_tuple(shape) + b"\x85R"
        return known

    def _file(self, name: str) -> bytes:
        if name not in self._memo:
            self._remember(name, _text(name))
        return self._get(name)

    def _new(self, name: str, then: bytes) -> bytes:
        return self._get(name) + b")\x81" + then

    def _get(self, name: str) -> bytes:
        return self._memo[name]

    def _remember(self, name: str, pushes: bytes) -> None:
        """Push in the prelude, store in the memo, pop."""
        number = len(self._memo)
        self._prelude += pushes + b"\x940"
        self._memo[name] = b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little")


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) < 256:
        return b"\x8c" + bytes((len(raw),)) + raw
    return b"X" + len(raw).to_bytes(4, "little") + raw
