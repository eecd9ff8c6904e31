"""Stand-ins for the classes that Megatron and torch pickle: they hold data and can do nothing.

Every class is sealed: a pickle's BUILD opcode can set attributes on whatever lies on its stack, and a class may lie
there too, so assignments to the classes themselves are refused. Instances are plain records; whoever reads a field
checks its type (``unpickle.require_plain``, ``metadata_read``).
"""

from __future__ import annotations

from typing import Any, NoReturn

from mtpconvert.tensors import DTYPE_BITS


class Sealed(type):
    """Metaclass of everything a pickle may name: no attribute of such a class changes after it was made."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"the pickle tries to set {name!r} on the class {cls.__name__}")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError(f"the pickle tries to delete {name!r} of the class {cls.__name__}")


class Record(metaclass=Sealed):
    """A class whose instances are what their state says: NEWOBJ makes one, BUILD fills its ``__dict__``."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Old saves call the class with arguments before they set the state; the state has everything."""


# torch/distributed/checkpoint/metadata.py, filesystem.py (torch 2.6 to 2.13)
class Metadata(Record):
    """``state_dict_metadata``: key -> TensorStorageMetadata or BytesStorageMetadata; ``storage_data``."""


class TensorStorageMetadata(Record):
    """``properties``, ``size``, ``chunks``."""


class BytesStorageMetadata(Record):
    """A key that is an object, no tensor."""


class ChunkStorageMetadata(Record):
    """``offsets`` and ``sizes``: one box of a tensor."""


class MetadataIndex(Record):
    """``fqn``, and ``offset`` (absent for objects): the key of ``storage_data``."""


class StorageInfo(Record):
    """``relative_path``, ``offset``, ``length``, and ``transform_descriptors`` where a stream was transformed."""


class TensorProperties(Record):
    """The state is a tuple that begins with the dtype."""

    dtype: object = None

    def __setstate__(self, state: object) -> None:
        first = state[0] if isinstance(state, tuple) and state else state
        self.dtype = first.get("dtype") if isinstance(first, dict) else first


class Namespace(Record):
    """``argparse.Namespace`` and ``types.SimpleNamespace``: the training arguments."""

    @property
    def values(self) -> dict[str, object]:
        return dict(vars(self))


class OrderedDict(dict[Any, Any], metaclass=Sealed):
    """``collections.OrderedDict`` and friends: a dict; attributes such as ``_metadata`` are dropped."""

    def __setstate__(self, state: object) -> None:
        """A module's state dict carries ``_metadata`` as an attribute; it says nothing about the numbers."""


class DefaultDict(OrderedDict):
    """``collections.defaultdict``: its factory is not kept."""

    def __init__(self, *_factory: object) -> None:
        super().__init__()


class PathText(str, metaclass=Sealed):
    """A ``pathlib`` path as text: paths pickle as their parts."""

    __slots__ = ()

    def __new__(cls, *parts: object) -> PathText:
        joined = "/".join(part for part in parts if isinstance(part, str))
        return super().__new__(cls, joined.replace("//", "/", 1) if joined.startswith("//") else joined)


class TorchDtype(str, metaclass=Sealed):
    """A ``torch.dtype``: its safetensors name ("BF16"), or "torch.<name>" where safetensors knows none."""

    __slots__ = ()

    @property
    def known(self) -> bool:
        return self in DTYPE_BITS


class StorageType(str, metaclass=Sealed):
    """A torch storage class: the dtype it implies (safetensors name), "" for an untyped one, or "torch.<name>"."""

    __slots__ = ()


class StorageRef:
    """What a persistent id stands for: a storage in ``data/<key>``; ``numel`` counts bytes where ``kind`` is ""."""

    __slots__ = ("key", "kind", "numel")

    def __init__(self, kind: str, key: str, numel: int) -> None:
        self.kind, self.key, self.numel = kind, key, numel


class TensorRef:
    """A tensor as its pickle describes it, without its numbers: a view of a storage, in elements."""

    __slots__ = ("dtype", "offset", "size", "storage", "stride")

    def __init__(self, storage: StorageRef, dtype: str, offset: int, size: tuple[int, ...], stride: tuple[int, ...]):
        self.storage, self.dtype, self.offset, self.size, self.stride = storage, dtype, offset, size, stride


class RebuildTensorV2(metaclass=Sealed):
    """``torch._utils._rebuild_tensor_v2``: the storage's class gives the dtype."""

    def __new__(  # type: ignore[misc]
        cls, storage: StorageRef, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_rest: object
    ) -> TensorRef:
        return TensorRef(storage, storage.kind, offset, size, stride)


class RebuildTensorV3(metaclass=Sealed):
    """``torch._utils._rebuild_tensor_v3``: an untyped storage, the dtype last (FP8, unsigned integers)."""

    def __new__(  # type: ignore[misc]
        cls,
        storage: StorageRef,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        _requires_grad: bool,
        _hooks: object,
        dtype: str,
        *_rest: object,
    ) -> TensorRef:
        return TensorRef(storage, dtype, offset, size, stride)


class RebuildParameter(metaclass=Sealed):
    """``torch._utils._rebuild_parameter``: the tensor in it."""

    def __new__(cls, data: object, *_rest: object) -> object:  # type: ignore[misc]
        return data


class Latin1(metaclass=Sealed):
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise ValueError(f"_codecs.encode with {encoding!r}")
        return text.encode("latin1")


class Placeholder(metaclass=Sealed):
    """An object of a class that this reader does not know, never imported: its name and what it was made from."""

    name = ""
    args: tuple[object, ...] = ()

    def __init__(self, *args: object, **_kwargs: object) -> None:
        self.args = args

    def __call__(self, *args: object, **_kwargs: object) -> Placeholder:
        return type(self)(*args)

    def __setstate__(self, state: object) -> None:
        self._parts.append(state)

    def append(self, item: object) -> None:
        self._parts.append(item)

    add = append

    def extend(self, items: list[object]) -> None:
        self._parts.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self._parts.append((key, value))

    @property
    def _parts(self) -> list[object]:
        parts: list[object] = vars(self).setdefault("state", [])
        return parts

    def __repr__(self) -> str:
        return f"<{self.name}>"


def placeholder_type(name: str) -> type[Placeholder]:
    """A class whose instances stand for objects of ``name`` ("module.qualname")."""
    made: type[Placeholder] = Sealed(name, (Placeholder,), {"name": name, "__module__": __name__})  # type: ignore[assignment]
    return made


class GetAttr(metaclass=Sealed):
    """``builtins.getattr`` as enums of Python 3.11 pickle it: a name gets longer, nothing is looked up."""

    def __new__(cls, owner: object, attribute: str) -> Placeholder:  # type: ignore[misc]
        made = Placeholder()
        if isinstance(owner, Placeholder) or (isinstance(owner, type) and issubclass(owner, Placeholder)):
            name = owner.name
        else:
            name = type(owner).__name__
        vars(made)["name"] = f"{name}.{attribute}"
        return made


class Reconstruct(metaclass=Sealed):
    """``copyreg._reconstructor``: how protocols 0 and 1 make an instance without calling ``__init__``."""

    def __new__(cls, wanted: type, *_base_and_state: object) -> object:  # type: ignore[misc]
        if not isinstance(wanted, Sealed):
            raise TypeError("copyreg._reconstructor of something that is no class")
        return object.__new__(wanted) if issubclass(wanted, Record | Placeholder) else wanted()
