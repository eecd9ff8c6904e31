"""Pickles read without running anything: every class and function becomes an inert placeholder.

Used for ``.metadata``, ``common.pt`` and the small ``data.pkl`` of each record. What the auditor needs from them are
numbers, strings, tuples and the state of a few dataclasses (torch/distributed/checkpoint/metadata.py, planner.py,
filesystem.py; torch/_utils.py ``_rebuild_tensor_v2``).
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any

from mtpconvert.errors import CheckpointError


class Entries(dict[Any, Any]):
    """An OrderedDict's entries; a module's state dict has attributes beside them (``_metadata``), which are dropped."""

    def __setstate__(self, state: Any) -> None:
        """Says nothing about the numbers."""


_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("collections", "OrderedDict"): Entries,
}

# torch's names of dtypes -> safetensors' names
DTYPES: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip

STORAGES: dict[str, str] = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip


class Inert:
    """Stands for an object of a class that is not loaded. Keeps what the pickle says about it, does nothing."""

    origin = ("", "")

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        self = super().__new__(cls)
        self.__dict__["arguments"] = args
        self.__dict__["state"] = kwargs
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return Inert(*args, **kwargs)  # what calling it would have made, as another placeholder

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("items", {})[repr(key)] = value

    def append(self, value: Any) -> None:
        self.__dict__.setdefault("values", []).append(value)

    def extend(self, values: Any) -> None:
        self.__dict__.setdefault("values", []).extend(values)

    def fields(self) -> dict[str, Any]:
        """The attributes that the pickle set, for plain, slotted and namespace-like classes."""
        state = self.__dict__["state"]
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            return {**(state[0] or {}), **state[1]}
        return state if isinstance(state, dict) else {}


class InertDtype(str):
    """``torch.bfloat16`` and the like, by name."""

    __slots__ = ()


@cache
def _placeholder(module: str, name: str) -> type[Inert]:
    return type(name.rsplit(".", 1)[-1], (Inert,), {"origin": (module, name)})


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and name in DTYPES:
            return InertDtype(name)
        return _placeholder(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return Inert(*pid) if isinstance(pid, tuple) else Inert(pid)


def read_pickle(raw: bytes, where: str) -> Any:
    """The object in ``raw`` with placeholders for every class. CheckpointError if it is no pickle."""
    try:
        return _Reader(io.BytesIO(raw)).load()
    except Exception as error:  # a hostile or broken pickle may raise anything at all
        raise CheckpointError(
            f"this pickle cannot be read: {error!r}",
            where=where,
            next_step="the file is damaged: copy it again from its origin",
        ) from error
