"""Read the pickles of a Megatron checkpoint without running anything in them.

``loads`` maps the globals that torch and megatron-core write to the inert classes of ``inert``; every other global
becomes a named ``Placeholder``. Nothing is ever imported because a pickle says so. What is corrupt or tries to do
more is a CheckpointError that names the file.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable

from mtpconvert.errors import CheckpointError
from mtpconvert.stores.torch_dist import inert
from mtpconvert.stores.torch_dist.inert import Placeholder, StorageRef, StorageType, TorchDtype

# torch dtype -> safetensors dtype (safetensors 0.8.0, bindings/python/py_src/safetensors/torch.py:_TYPES).
# float4_e2m1fn_x2 is left out: torch counts pairs, safetensors elements, and Megatron writes none.
TORCH_DTYPES: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
OTHER_TORCH_DTYPES = (
    "complex32", "complex128", "float4_e2m1fn_x2", "quint8", "qint8", "qint32", "quint4x2", "quint2x4",
)  # fmt: skip
# torch/storage.py: the typed storage classes that `torch.save` still names for the older dtypes
STORAGE_DTYPES: dict[str, str] = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "torch.complex128",
}  # fmt: skip

_MAX_UNKNOWN = 10_000  # distinct unknown globals; a training save has a few dozen


def _known_globals() -> dict[str, object]:
    dcp = "torch.distributed.checkpoint."
    known: dict[str, object] = {
        "torch.Size": tuple,
        "torch._utils._rebuild_tensor_v2": inert.RebuildTensorV2,
        "torch._utils._rebuild_tensor_v3": inert.RebuildTensorV3,
        "torch._utils._rebuild_parameter": inert.RebuildParameter,
        "torch.storage.UntypedStorage": StorageType(""),
        f"{dcp}metadata.Metadata": inert.Metadata,
        f"{dcp}metadata.TensorStorageMetadata": inert.TensorStorageMetadata,
        f"{dcp}metadata.BytesStorageMetadata": inert.BytesStorageMetadata,
        f"{dcp}metadata.ChunkStorageMetadata": inert.ChunkStorageMetadata,
        f"{dcp}metadata.TensorProperties": inert.TensorProperties,
        f"{dcp}metadata.MetadataIndex": inert.MetadataIndex,
        f"{dcp}filesystem._StorageInfo": inert.StorageInfo,
        # megatron/core/dist_checkpointing/strategies/torch.py, 0.15 and before
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": inert.Metadata,
        "argparse.Namespace": inert.Namespace,
        "types.SimpleNamespace": inert.Namespace,
        "collections.OrderedDict": inert.OrderedDict,
        "collections.defaultdict": inert.DefaultDict,
        "_codecs.encode": inert.Latin1,
        "copyreg._reconstructor": inert.Reconstruct,
        "copy_reg._reconstructor": inert.Reconstruct,
    }
    for module in ("builtins", "__builtin__"):
        known |= {f"{module}.set": set, f"{module}.frozenset": frozenset, f"{module}.getattr": inert.GetAttr}
    for module in ("pathlib", "pathlib._local"):  # Python 3.13 moved the classes
        for name in ("PosixPath", "PurePosixPath", "Path", "PurePath", "WindowsPath", "PureWindowsPath"):
            known[f"{module}.{name}"] = inert.PathText
    known |= {f"torch.{name}": TorchDtype(dtype) for name, dtype in TORCH_DTYPES.items()}
    known |= {f"torch.{name}": TorchDtype(f"torch.{name}") for name in OTHER_TORCH_DTYPES}
    known |= {f"torch.{name}": StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()}
    return known


_KNOWN = _known_globals()


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._unknown: dict[str, type[Placeholder]] = {}

    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if full not in self._unknown:
            if len(self._unknown) == _MAX_UNKNOWN:
                raise pickle.UnpicklingError(f"more than {_MAX_UNKNOWN} different classes")
            self._unknown[full] = inert.placeholder_type(full)
        return self._unknown[full]

    def persistent_load(self, pid: object) -> StorageRef:
        """``("storage", class, key, location, numel)``, as torch/serialization.py:_save writes it."""
        match pid:
            case ("storage", StorageType() as kind, str() as key, str(), int() as numel):
                return StorageRef(kind, key, numel)
        raise pickle.UnpicklingError("a persistent id that torch.save does not write")


def loads(data: bytes, where: str) -> object:
    """The object in ``data``, every class in it inert. ``where`` names file and entry for messages.

    Raises CheckpointError for anything that is not one complete, harmless pickle.
    """
    check_memo(data, where)
    try:
        return _InertUnpickler(data).load()
    except Exception as problem:  # a corrupt pickle raises whatever its opcodes run into
        raise _corrupt(where, str(problem) or type(problem).__name__) from problem


def require_plain(value: object, where: str) -> None:
    """Refuse ``value`` when it is, or holds, an object of an unknown class. Raises CheckpointError."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Placeholder) or (isinstance(item, type) and issubclass(item, Placeholder)):
            raise CheckpointError(
                f"{where} is an object of the class {item.name}, which is not read",
                where=where,
                next_step="save the checkpoint again with a plain value there",
            )
        if isinstance(item, dict | list | tuple | set | frozenset) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item)
            if isinstance(item, dict):
                stack.extend(item.values())


def _corrupt(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not a readable pickle: {why}",
        where=where,
        next_step="copy the file again, or use another checkpoint",
    )


# Opcodes by the bytes that follow them (CPython Lib/pickletools.py); those that matter are taken one by one.
_PLAIN_RUN = re.compile(
    rb"(?:[()012NQR\]abdelostu}\x81\x85-\x89\x8f-\x94\x97\x98]"
    rb"|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}|[G\x95].{8})+",
    re.DOTALL,
)


def check_memo(data: bytes, where: str) -> None:
    """Walk the opcodes and refuse a memo index beyond the pickle's own length.

    CPython allocates the memo up to the largest index that a PUT names, so a few bytes could ask for 30 GB. Also
    finds a pickle that is cut short. Raises CheckpointError.
    """
    at, end = 0, len(data)
    while at < end:
        code = data[at]
        step = _COUNTED.get(code)
        if step is not None:
            at = step(data, at)
        elif code == 0x72:  # LONG_BINPUT
            if int.from_bytes(data[at + 1 : at + 5], "little") > end:
                raise _corrupt(where, "a memo index beyond its length")
            at += 5
        elif code == 0x70:  # PUT, decimal text
            stop = _line(data, at)
            digits = data[at + 1 : stop - 1]
            if not digits.isdigit() or len(digits) > 10 or int(digits) > end:
                raise _corrupt(where, "a memo index beyond its length")
            at = stop
        elif code == 0x2E:  # STOP
            return
        else:
            run = _PLAIN_RUN.match(data, at)
            if run is None:
                raise _corrupt(where, f"opcode {code:#04x} at byte {at}")
            at = run.end()
    raise _corrupt(where, "it is cut short")


def _line(data: bytes, at: int) -> int:
    stop = data.find(b"\n", at)
    return len(data) if stop < 0 else stop + 1


def _counted(width: int) -> Callable[[bytes, int], int]:
    def step(data: bytes, at: int) -> int:
        return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")

    return step


_COUNTED: dict[int, Callable[[bytes, int], int]] = {
    **{code: _counted(1) for code in b"\x8cUC\x8a"},
    **{code: _counted(4) for code in b"XTB\x8b"},
    **{code: _counted(8) for code in b"\x8d\x8e\x96"},
    **dict.fromkeys(b"FILSVPg", _line),
    **{code: lambda data, at: _line(data, _line(data, at)) for code in b"ci"},
}
