"""Pickles from strangers: what torch and megatron-core write is read, everything else stays dead data."""

import argparse
import builtins
import collections
import contextlib
import enum
import io
import os
import pathlib
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from mtpconvert.errors import CheckpointError
from mtpconvert.stores.torch_dist import inert
from mtpconvert.stores.torch_dist.inert import Namespace, Placeholder, TorchDtype
from mtpconvert.stores.torch_dist.pickle_write import dumps
from mtpconvert.stores.torch_dist.unpickle import TORCH_DTYPES, check_memo, loads, require_plain


class Colour(enum.Enum):
    RED = 1


class Odd:
    def __init__(self) -> None:
        self.x = 1


class OddList(list):
    pass


class OddDict(dict):
    pass


PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_come_back(protocol: int) -> None:
    value = {
        "none": None, "yes": True, "n": [0, 255, 256, 65536, -1, 2**31, -(2**40), 2**80], "f": 1.5, "s": "ü\n",
        "b": b"\x00\xff", "t": (), "t4": (1, 2, 3, 4), "set": {1, 2}, "frozen": frozenset({3}), 7: {"in": {}},
        "long": "x" * 70000,
    }  # fmt: skip
    assert loads(pickle.dumps(value, protocol), "x") == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_known_classes_become_inert(protocol: int) -> None:
    args = argparse.Namespace(a=1, params_dtype=torch.bfloat16, nested=types.SimpleNamespace(b=(2,)))
    ordered = collections.OrderedDict(k=torch.Size([2, 3]))
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]  # as module.state_dict() has it
    value = [args, ordered, collections.defaultdict(list, z=[1]), pathlib.PurePosixPath("/a/b"), pathlib.Path("c/d")]
    got_args, got_ordered, got_default, root, relative = loads(pickle.dumps(value, protocol), "x")  # type: ignore[misc]
    assert isinstance(got_args, Namespace) and not isinstance(got_args, argparse.Namespace)
    assert got_args.values["a"] == 1 and got_args.values["params_dtype"] == "BF16"
    assert isinstance(got_args.values["params_dtype"], TorchDtype)
    assert got_args.values["nested"].values == {"b": (2,)}  # type: ignore[attr-defined]
    assert got_ordered == {"k": (2, 3)} and got_default == {"z": [1]}
    assert (root, relative) == ("/a/b", "c/d")


def test_every_torch_dtype_has_a_name() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        if dtype.itemsize and not str(dtype).startswith(("torch.int", "torch.uint", "torch.bits")):
            got = loads(pickle.dumps(dtype), "x")
            assert isinstance(got, TorchDtype), dtype
    for name, safetensors_name in TORCH_DTYPES.items():
        assert loads(pickle.dumps(getattr(torch, name)), "x") == safetensors_name
        assert loads(dumps(TorchDtype(safetensors_name)), "x") == safetensors_name


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unknown_classes_become_placeholders(protocol: int) -> None:
    filled = OddList([1, 2])
    mapping = OddDict(a=1)
    value = {"odd": Odd(), "enum": Colour.RED, "list": filled, "dict": mapping, "cls": Odd, "np": np.arange(3)}
    got = loads(pickle.dumps(value, protocol), "x")
    assert isinstance(got, dict)
    for key in ("odd", "list", "dict"):
        assert isinstance(got[key], Placeholder), key
    assert got["odd"].name == f"{__name__}.Odd"
    assert isinstance(got["enum"], Placeholder) and got["enum"].name.startswith(f"{__name__}.Colour")
    assert issubclass(got["cls"], Placeholder)
    assert isinstance(got["np"], Placeholder)
    with pytest.raises(CheckpointError, match=r"args\.odd is an object of the class .*Odd"):
        require_plain(got["odd"], "args.odd")
    with pytest.raises(CheckpointError, match="Colour"):
        require_plain({"deep": [(got["enum"],)]}, "args")
    require_plain({"a": [1, (None, "x")], "d": TorchDtype("BF16")}, "args")


def test_an_enum_pickled_by_getattr_is_a_placeholder() -> None:
    # Python 3.11 writes enum members as getattr(Class, "NAME")
    data = b"\x80\x02cbuiltins\ngetattr\ncsome.module\nColour\nX\x03\x00\x00\x00RED\x86R."
    got = loads(data, "x")
    assert isinstance(got, Placeholder) and got.name == "some.module.Colour.RED"


class _Reduce:
    def __init__(self, function: object, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_hostile_reduces_do_nothing(protocol: int, tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "ran"
    attacks = [
        _Reduce(os.system, f"touch {mark}"),
        _Reduce(builtins.eval, f"open({str(mark)!r}, 'w')"),
        _Reduce(builtins.exec, f"open({str(mark)!r}, 'w')"),
        _Reduce(builtins.open, str(mark), "w"),
        _Reduce(subprocess.check_output, ["touch", str(mark)]),
        _Reduce(builtins.getattr, os, "system") if protocol >= 4 else _Reduce(os.getenv, "HOME"),
        _Reduce(__import__, "antigravity"),
    ]
    for attack in attacks:
        try:
            data = pickle.dumps(attack, protocol)
        except TypeError:  # a module does not pickle
            continue
        got = loads(data, "x")
        assert isinstance(got, Placeholder), attack
    assert not mark.exists()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"cnt\nsystem\n(S'touch /tmp/x'\ntR.", id="nt"),
        pytest.param(b"(S'touch /tmp/x'\nios\nsystem\n.", id="inst"),
        pytest.param(b"(cos\nsystem\nS'true'\no.", id="obj"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", id="stack-global"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.", id="newobj-ex"),
        pytest.param(b"\x80\x02cos.path\n__builtins__\n.", id="dotted"),
    ],
)
def test_hostile_opcodes_make_placeholders(data: bytes) -> None:
    got = loads(data, "x")
    assert isinstance(got, Placeholder) or (isinstance(got, type) and issubclass(got, Placeholder))
    assert got.name in ("nt.system", "os.system", "os.path.__builtins__")


def test_build_cannot_change_the_classes_of_the_reader() -> None:
    before = dict(vars(inert.Metadata)), dict(vars(Placeholder)), dict(vars(inert.RebuildTensorV2))
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("a.b", "Unknown"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("argparse", "Namespace"),
        ("torch", "Size"),
    ):
        # BUILD with (None, {"x": 1}) on the class itself is setattr(class, "x", 1)
        data = f"c{module}\n{name}\n(N}}X\x01\x00\x00\x00xK\x01stb.".encode("latin1")
        with pytest.raises(CheckpointError):
            loads(data, "x")
    assert before == (dict(vars(inert.Metadata)), dict(vars(Placeholder)), dict(vars(inert.RebuildTensorV2)))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x04", id="cut"),
        pytest.param(b"not a pickle at all", id="text"),
        pytest.param(b"\x80\x04K\x01", id="no-stop"),
        pytest.param(b"\x80\x02NNNN", id="no-stop-2"),
        pytest.param(b"\x80\x02h\x07.", id="memo-unset"),
        pytest.param(b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", id="bytes-of-9-EB"),
        pytest.param(b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00.", id="bytearray-of-1-TB"),
        pytest.param(b"\x80\x02\x82\x01.", id="copyreg-extension"),
        pytest.param(b"\x80\x02(U\x07storagetQ.", id="persistent-id"),
        pytest.param(b"\x80\x02X\x05\x00\x00\x00storeQ.", id="persistent-text"),
        pytest.param(b"\x80\x63N.", id="protocol-99"),
        pytest.param(b"\x80\x02]K\x01K\x02s.", id="setitem-on-list"),
        pytest.param(b"\x80\x02ctorch\nSize\nK\x01\x85R.", id="size-of-an-int"),
        pytest.param(b"\x80\x05\x97.", id="out-of-band"),
        pytest.param(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x04\x00\x00\x00zliptR.", id="codec"),
    ],
)
def test_corrupt_pickles_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^common\.pt is not a readable pickle") as caught:
        loads(data, "common.pt")
    assert caught.value.exit_code == 6 and caught.value.next_step


@pytest.mark.parametrize("put", [b"r\x00\x00\x00\x01", b"r\xff\xff\xff\x7f", b"p99999999\n", b"p-1\n", b"p1e3\n"])
def test_a_memo_index_cannot_ask_for_memory(put: bytes) -> None:
    """CPython allocates 16 bytes for each number up to the largest: 268 MB for the first, 34 GB for the next."""
    with pytest.raises(CheckpointError, match="a memo index beyond its length"):
        loads(b"\x80\x02K\x01" + put + b".", "x")


def test_a_deep_memo_of_an_honest_pickle_is_no_attack() -> None:
    value = [[str(n)] for n in range(70_000)]  # protocol 2 numbers its memo with LONG_BINPUT beyond 255
    assert loads(pickle.dumps(value, 2), "x") == value


def test_truncation_anywhere_is_an_error_of_ours() -> None:
    data = pickle.dumps({"a": argparse.Namespace(x=[1, 2.5, "three"]), "b": torch.float8_e4m3fn}, 2)
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            loads(data[:length], "x")
    check_memo(data, "x")


def test_random_damage_never_escapes() -> None:
    rng = np.random.default_rng(5)
    data = bytearray(pickle.dumps({"a": argparse.Namespace(x=[1, 2.5, "three"]), "t": torch.Size([1])}, 4))
    for _ in range(3000):
        broken = bytearray(data)
        broken[rng.integers(len(data))] = rng.integers(256)
        with contextlib.suppress(CheckpointError):
            loads(bytes(broken), "x")


def test_written_values_are_what_pickle_reads() -> None:
    value = {
        "a": [None, True, False, 0, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**70, -(2**200)],
        "t": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "b": bytes(range(256)),
        "rest": [{}, [], "ü", -0.25],
    }
    assert pickle.load(io.BytesIO(dumps(value))) == value
    args = inert.Namespace()
    vars(args).update(n=1, dtype=TorchDtype("BF16"))
    got = pickle.loads(dumps({"args": args}))["args"]
    assert got == argparse.Namespace(n=1, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="set"):
        dumps({"x": {1}})
