"""One record of a ``.distcp`` file: where its tensor's bytes lie, or what object it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mtpconvert.errors import CheckpointError, NotRepresentableError
from mtpconvert.stores.torch_dist.container import Container
from mtpconvert.stores.torch_dist.inert import StorageRef, TensorRef
from mtpconvert.stores.torch_dist.unpickle import loads
from mtpconvert.tensors import DTYPE_BITS, Shape


@dataclass(frozen=True, slots=True)
class Record:
    """A saved tensor. ``offset``: byte of its first element in the file; ``strides`` in bytes.

    ``storage``: byte at which the whole storage begins, ``nbytes`` long, whose CRC-32 the container claims to be
    ``crc32`` (torch never checks it; it is 0 or wrong where torch was told not to compute it).
    """

    dtype: str
    shape: Shape
    offset: int
    strides: Shape
    storage: int
    nbytes: int
    crc32: int


def read_record(fd: int, base: int, length: int, where: str) -> Record:
    """The tensor in the record of ``length`` bytes at byte ``base``; two preads, no tensor bytes.

    Raises CheckpointError (no container, no tensor, a view outside its storage), IncompleteError (file too short),
    NotRepresentableError (a dtype that safetensors has no name for).
    """
    container = open_container(fd, base, length, where)
    tensor = _tensor(container.read("data.pkl"), where)
    if tensor.dtype not in DTYPE_BITS:
        raise NotRepresentableError(f"{where} has dtype {tensor.dtype}, which safetensors has no name for", where=where)
    itemsize = DTYPE_BITS[tensor.dtype] // 8
    entry = container.entry(f"data/{tensor.storage.key}")
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.size, tensor.stride, strict=True))
    if entry.size != tensor.storage.numel * (itemsize if tensor.storage.kind else 1):
        raise _wrong(where, f"its storage has {entry.size} bytes, its pickle says otherwise")
    if 0 not in tensor.size and (last + 1) * itemsize > entry.size:
        raise _wrong(where, f"its view reaches element {last} of a storage of {entry.size} bytes")
    storage = container.position(entry)
    return Record(
        dtype=str(tensor.dtype),
        shape=tensor.size,
        offset=storage + tensor.offset * itemsize,
        strides=tuple(step * itemsize for step in tensor.stride),
        storage=storage,
        nbytes=entry.size,
        crc32=entry.crc32,
    )


def read_object(fd: int, base: int, length: int, where: str) -> object:
    """The object that ``torch.save`` wrote there, its classes inert and its tensors without numbers."""
    return loads(open_container(fd, base, length, where).read("data.pkl"), where)


def open_container(fd: int, base: int, length: int, where: str) -> Container:
    """The container, once its bytes are known to be little-endian."""
    container = Container(fd, base, length, where)
    if container.has("byteorder") and container.read("byteorder") != b"little":
        raise CheckpointError(
            f"{where} was written on a big-endian machine",
            where=where,
            next_step="load and save it with torch on a little-endian machine first",
        )
    return container


def _tensor(pickled: bytes, where: str) -> TensorRef:
    try:
        tensor = _parse_tensor(pickled)
    except CheckpointError as problem:
        raise CheckpointError(f"{where}: {problem.what}", where=where, next_step=problem.next_step) from problem
    if tensor is None:
        raise _wrong(where, "it holds no tensor")
    return tensor


@lru_cache(maxsize=4096)
def _parse_tensor(pickled: bytes) -> TensorRef | None:
    """The tensor that ``data.pkl`` describes; None when it is no plain tensor. Chunks of one kind share a pickle."""
    tensor = loads(pickled, "data.pkl")
    if not isinstance(tensor, TensorRef) or not isinstance(tensor.storage, StorageRef):
        return None
    numbers = (tensor.storage.numel, tensor.offset, *_ints(tensor.size), *_ints(tensor.stride))
    if any(type(n) is not int or n < 0 for n in numbers) or len(tensor.size) != len(tensor.stride):
        return None
    if not isinstance(tensor.dtype, str) or tensor.storage.kind not in ("", tensor.dtype):
        return None
    return tensor


def _ints(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (None,)


def _wrong(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is damaged: {why}", where=where, next_step="copy the file again, or use another checkpoint"
    )
