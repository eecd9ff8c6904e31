"""The store against the installed megatron-core: its real save is read, its real load accepts what is written.

Runs with 0.16.1 in `make test`, and with 0.19.2 in `make test-mcore-next`. Each call of the framework is a process.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from mtpconvert.stores.torch_dist.extra_state import extra_state_keys
from mtpconvert.stores.torch_dist.inert import Placeholder, TorchDtype
from mtpconvert.stores.torch_dist.layout import targets
from mtpconvert.stores.torch_dist.logical import Assembly, assemble
from mtpconvert.stores.torch_dist.reader import TorchDistReader
from mtpconvert.stores.torch_dist.stored import StoredTensor
from mtpconvert.stores.torch_dist.writer import TorchDistWriter
from mtpconvert.tensors import TensorSpec
from tests.support import mcore_ranks
from tests.support.dcp import SAVED, pattern, read_bits, write_bits

NEXT = not version("megatron-core").startswith("0.16")
COMMON = {
    "args": {
        "num_layers": 3,
        "hidden_size": 4,
        "params_dtype": TorchDtype("BF16"),
        "moe_layer_freq": [0, 1],
        "x": None,
    },
    "iteration": 0,
}
LAYERS = 3


def expected() -> dict[str, tuple[str, np.ndarray]]:
    """Canonical name -> dtype and bit patterns of what ``dcp.job_save`` saves."""
    out = {}
    for key, (shape, dtype, seed, layers, _) in SAVED.items():
        for layer in range(max(layers, 1)):
            name = key.replace("decoder.layers.", f"decoder.layers.{layer}.") if layers else key
            out[name] = (dtype, pattern(shape, dtype, seed + 100 * layer))
    return out


SPECS = [TensorSpec(name, bits.shape, dtype) for name, (dtype, bits) in expected().items()]
SEEDS = {
    spec: SAVED[key][2] + 100 * layer
    for key in SAVED
    for layer in range(max(SAVED[key][3], 1))
    for spec in SPECS
    if spec.name == (key.replace("decoder.layers.", f"decoder.layers.{layer}.") if SAVED[key][3] else key)
}
PER_LAYER = {spec.name: [list(spec.shape), spec.dtype] for spec in SPECS}
STACKED = {
    key: [[layers, *shape] if layers else list(shape), dtype] for key, (shape, dtype, _, layers, _) in SAVED.items()
}
OBJECTS = {
    True: [f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{n}_{LAYERS}" for n in range(LAYERS)]
    + ["mtp.layers.0.eh_proj._extra_state/shard_0_1"],
    False: [f"decoder.layers.{n}.self_attention.linear_proj._extra_state/shard_0_1" for n in range(LAYERS)]
    + ["decoder.final_layernorm._extra_state/shard_0_1"],
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both directions, in one process and then in two: folders that megatron-core saved, results of its loads."""
    root = tmp_path_factory.mktemp("mcore")
    loads = []
    for mcore_version in ("0.16", "0.19"):
        for stacked in (True, False):
            folder = root / f"ours-{mcore_version}-{stacked}"
            folder.mkdir()
            boxes = {"embedding.word_embeddings.weight": [((0, 7), (0, 4)), ((7, 10), (0, 4))]}
            writer = TorchDistWriter(
                folder, SPECS, boxes, stacked=stacked, mcore_version=mcore_version, common=COMMON, files=2
            )
            write_bits(writer, SEEDS)
            loads.append(
                {
                    "folder": str(folder),
                    "tensors": STACKED if stacked else PER_LAYER,
                    "objects": OBJECTS[stacked],
                }
            )
    if NEXT:  # which can do without common.pt
        (root / "ours-0.19-True" / "common.pt").unlink()
    patience = 900  # a minute on two idle cores; other jobs may be running
    with ThreadPoolExecutor(3) as pool:  # each is a process that imports megatron-core first
        start = partial(pool.submit, mcore_ranks.run, timeout=patience)
        both = start("tests.support.dcp:job_save", 2, folder=str(root / "theirs-2"))
        asks = start("tests.support.dcp:job_asks", te=True, spec="te")
        one = start("tests.support.dcp:job_everything", save=str(root / "theirs-1"), loads=loads)
        both.result()
        (result,), (te,) = one.result(), asks.result()
    return result | {"root": root, "loads": list(zip(loads, result["loads"], strict=True)), "te": te}


@pytest.mark.parametrize("world", [1, 2])
def test_what_megatron_core_saves_is_read(ran: dict[str, Any], world: int) -> None:
    reader = TorchDistReader(ran["root"] / f"theirs-{world}")
    wanted = expected()
    assert reader.inventory() == {n: TensorSpec(n, bits.shape, dtype) for n, (dtype, bits) in wanted.items()}
    for name, (_, bits) in wanted.items():
        np.testing.assert_array_equal(read_bits(reader, name), bits, err_msg=name)
    assert len(reader.chunks("decoder.layers.1.self_attention.linear_proj.weight")) == world
    assert len(reader.chunks("embedding.word_embeddings.weight")) == world
    states = 3 * LAYERS  # one object a layer for each of the three stacked keys
    assert reader.objects == {"extra_state": states, "rng_state": world, "optimizer": 1, "unknown": 1} | (
        {"common_state": 1} if NEXT else {}
    )
    assert reader.unknown_objects == ["someones_own_state/shard_0_1"]
    assert reader.stacked and reader.iteration == 12 and reader.checkpoint_version == 3.0
    assert (ran["root"] / f"theirs-{world}" / "common.pt").exists() is not NEXT


@pytest.mark.parametrize("world", [1, 2])
def test_training_arguments_are_read_past_unknown_classes(ran: dict[str, Any], world: int) -> None:
    args = TorchDistReader(ran["root"] / f"theirs-{world}").args
    assert args is not None and args["num_layers"] == 3 and args["params_dtype"] == "BF16" and args["load"] == "/tmp/x"
    assert isinstance(args["model_type"], Placeholder)
    assert args["model_type"].name.startswith("megatron.core.enums.ModelType")


def test_default_load_accepts_what_we_write(ran: dict[str, Any]) -> None:
    wanted = expected()
    for request, result in ran["loads"]:
        where = request["folder"]
        for key, (shape, dtype) in request["tensors"].items():
            width = {"BF16": np.int16, "F32": np.int32}[dtype]
            got = np.array(result["tensors"][key], width).view(f"<u{width().itemsize}").reshape(shape)
            if key in wanted:
                np.testing.assert_array_equal(got, wanted[key][1], err_msg=f"{where} {key}")
            else:
                layers = [wanted[key.replace("decoder.layers.", f"decoder.layers.{n}.")][1] for n in range(LAYERS)]
                np.testing.assert_array_equal(got, np.stack(layers), err_msg=f"{where} {key}")
        assert result["objects"] == dict.fromkeys(request["objects"])
        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        assert result["content_metadata"] == content
        assert result["common"] == {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
        assert result["args"] == {
            "num_layers": "3",
            "hidden_size": "4",
            "params_dtype": "torch.bfloat16",
            "moe_layer_freq": "[0, 1]",
            "x": "None",
        }
        assert set(result["plain"]) >= set(request["tensors"])


def test_the_config_file_is_what_this_version_writes(ran: dict[str, Any]) -> None:
    theirs = json.loads((ran["root"] / "theirs-1" / "metadata.json").read_text())
    ours = json.loads((ran["root"] / f"ours-{'0.19' if NEXT else '0.16'}-True" / "metadata.json").read_text())
    assert ours == theirs


def logical(asked: dict[str, Any]) -> Assembly:
    """A checkpoint of exactly the tensors that a model asks for, as the reader sees it."""
    return assemble([StoredTensor(key, "F32", tuple(shape), []) for key, shape in asked["tensors"].items()], {})


def test_real_models_of_either_spec_have_the_same_canonical_tensors(ran: dict[str, Any]) -> None:
    for name, te in ran["te"].items():
        wanted = {key: tensor.spec for key, tensor in logical(te).tensors.items()}
        assert not [note for note in logical(te).notes if "translated" in note], name
        for dialect in ("local", "singleton"):
            got = {key: tensor.spec for key, tensor in logical(ran[dialect][name]).tensors.items()}
            assert got == wanted, f"{name}, {dialect}"


@pytest.mark.parametrize("spec", ["te", "local"])
def test_what_real_models_ask_for_is_what_is_written(ran: dict[str, Any], spec: str) -> None:
    """Tensor keys and shapes exactly, at least the objects: by plan, for every kind of layer that there is."""
    for name, asked in ran[spec].items():
        canonical = logical(ran["te"][name])
        specs = [tensor.spec for tensor in canonical.tensors.values()]
        wanted, layers = targets(specs, canonical.stacked, local=spec == "local")
        stacked = frozenset(target.spec.name for target in wanted if target.layer is not None)
        shapes = {t.key: [layers] * (t.layer is not None) + list(t.spec.shape) for t in wanted}
        assert shapes == asked["tensors"], name
        assert set(asked["objects"]) <= set(extra_state_keys(specs, stacked, layers)), name
