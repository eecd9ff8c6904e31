"""Pickles written opcode by opcode: plain values, ``argparse.Namespace``, torch dtypes, and the tensor of a record.

CPython's own pickler would have to import the classes that it names. Protocol 2, what ``torch.save`` uses and its
``weights_only`` reader understands.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from mtpconvert.errors import NotRepresentableError
from mtpconvert.stores.torch_dist.inert import Namespace, TorchDtype
from mtpconvert.stores.torch_dist.unpickle import STORAGE_DTYPES, TORCH_DTYPES
from mtpconvert.tensors import DTYPE_BITS, Shape

TORCH_NAMES: dict[str, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_STORAGE_NAMES: dict[str, str] = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


def torch_name(dtype: str, where: str) -> str:
    """torch's name for a safetensors dtype. Raises NotRepresentableError for those it has none for (F4, F6)."""
    if dtype not in TORCH_NAMES:
        raise NotRepresentableError(
            f"{where} has dtype {dtype}, which a torch_dist checkpoint cannot hold",
            where=where,
            next_step="convert a checkpoint whose tensors are 8 bits or wider",
        )
    return TORCH_NAMES[dtype]


def dumps(value: object) -> bytes:
    """``value`` as a complete pickle: None, bool, int, float, str, bytes, list, tuple, dict, Namespace, TorchDtype.

    Raises TypeError for anything else, naming its type.
    """
    return b"\x80\x02" + encode(value) + b"."


def encode(value: object) -> bytes:
    """The opcodes that push ``value``."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return encode_int(value)
        case float():
            return b"G" + struct.pack(">d", value)
        case TorchDtype():
            return encode_global("torch", torch_name(value, "a torch dtype"))
        case str():
            raw = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(raw)) + raw
        case bytes():  # as protocol 2 has it: text, back through latin-1
            return encode_global("_codecs", "encode") + encode_tuple((value.decode("latin1"), "latin1")) + b"R"
        case list():
            return b"](" + b"".join(map(encode, value)) + b"e"
        case tuple():
            return encode_tuple(value)
        case dict():
            return b"}(" + b"".join(encode(key) + encode(item) for key, item in value.items()) + b"u"
        case Namespace():
            return encode_global("argparse", "Namespace") + b")\x81" + encode(value.values) + b"b"
    raise TypeError(f"no plain value for a pickle: {type(value).__name__}")


def encode_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def encode_tuple(value: tuple[object, ...]) -> bytes:
    items = b"".join(map(encode, value))
    if len(value) > 3:
        return b"(" + items + b"t"
    return items + (b")", b"\x85", b"\x86", b"\x87")[len(value)]


def encode_int(value: int) -> bytes:
    if 0 <= value < 0x100:
        return b"K" + bytes((value,))
    if 0 <= value < 0x10000:
        return b"M" + struct.pack("<H", value)
    if -0x80000000 <= value < 0x80000000:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) > 255:
        raise TypeError(f"an integer of {len(raw)} bytes")
    return b"\x8a" + bytes((len(raw),)) + raw


@lru_cache(maxsize=4096)
def tensor_pickle(dtype: str, shape: Shape) -> bytes:
    """``data.pkl`` of a C-contiguous tensor that fills the storage ``data/0`` (torch/_tensor.py:_reduce_ex_internal).

    FP8 and the wider unsigned integers have no storage class of their own: an untyped one, counted in bytes.
    """
    name = torch_name(dtype, "a tensor")
    numel = 1
    strides: list[int] = []
    for n in reversed(shape):
        strides.insert(0, numel)
        numel *= max(n, 1)
    if 0 in shape:
        numel = 0
    typed = dtype in _STORAGE_NAMES
    storage = (
        encode_global("torch", _STORAGE_NAMES[dtype]) if typed else encode_global("torch.storage", "UntypedStorage")
    )
    count = numel if typed else numel * DTYPE_BITS[dtype] // 8
    return b"".join(
        (
            b"\x80\x02",
            encode_global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"),
            b"((",
            encode("storage") + storage + encode("0") + encode("cpu") + encode_int(count),
            b"tQ",
            encode_int(0) + encode_tuple(shape) + encode_tuple(tuple(strides)),
            b"\x89",
            encode_global("collections", "OrderedDict") + b")R",
            b"" if typed else encode_global("torch", name),
            b"tR.",
        )
    )
