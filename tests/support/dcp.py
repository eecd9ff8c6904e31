"""Checkpoints made of hand-made tensors by the real torch DCP and the real megatron-core, and their bytes read back.

The value of element ``j`` (C order) of a tensor is the bit pattern ``seed + j``: every element can be told from every
other, and a test can say what it expects without the code under test. Functions whose name begins with ``job_`` run in
processes of their own (``mcore_ranks.run``).
"""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtpconvert.stores.base import Chunk, Reader, Writer
from mtpconvert.tensors import TensorSpec

BITS = {"BF16": "<u2", "F32": "<u4", "F8_E4M3": "<u1", "I64": "<u8"}
CONFIG = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def pattern(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    """The bit patterns as unsigned integers of the dtype's width, wrapping round."""
    numbers = np.arange(seed, seed + int(np.prod(shape, dtype=np.int64)), dtype=np.uint64)
    return numbers.astype(BITS[dtype]).reshape(shape)


def tensor(shape: Sequence[int], dtype: str, seed: int) -> Any:
    """The same as a torch tensor of that dtype."""
    import torch

    of = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64}
    bits = pattern(shape, dtype, seed)
    return torch.from_numpy(bits.view(bits.dtype.str.replace("<u", "<i"))).view(of[dtype])


def dcp_save(folder: Path, state: Mapping[str, Any]) -> None:
    """``torch.distributed.checkpoint.save`` in this process, with the file that says torch_dist."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is one process
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(CONFIG)


def dcp_load(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """``torch.distributed.checkpoint.load`` into ``state`` in this process."""
    import torch.distributed.checkpoint as dcp

    loaded = dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded


def read_bits(reader: Reader, name: str) -> np.ndarray:
    """The tensor's bit patterns, fetched through ``chunks`` alone; every element must be set exactly once."""
    spec = reader.inventory()[name]
    whole = np.zeros(spec.shape, BITS[spec.dtype])
    seen = np.zeros(spec.shape, np.uint8)
    for chunk in reader.chunks(name):
        window = tuple(slice(a, b) for a, b in chunk.box)
        whole[window] = view_of(reader.path(chunk.file), chunk, whole.dtype)
        seen[window] += 1
    assert (seen == 1).all(), f"{name} is not covered exactly"
    return whole


def view_of(path: Path, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
    raw = np.fromfile(path, np.uint8)[chunk.offset :]
    count = len(raw) // dtype.itemsize
    flat = raw[: count * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, tuple(b - a for a, b in chunk.box), chunk.strides)


def write_bits(writer: Writer, seeds: Mapping[TensorSpec, int]) -> None:
    """Run a Writer from ``create`` to ``commit`` with the patterns of ``seeds``."""
    writer.create()
    for spec, seed in seeds.items():
        bits = pattern(spec.shape, spec.dtype, seed)
        for number, chunk in enumerate(writer.chunks(spec.name)):
            part = bits[tuple(slice(a, b) for a, b in chunk.box)]
            payload = np.ascontiguousarray(part).tobytes()
            with writer.path(chunk.file).open("r+b") as file:
                file.seek(chunk.offset)
                file.write(payload)
            writer.finish_chunk(spec.name, number, zlib.crc32(payload))
    writer.commit()


# What job_save saves: key -> (global shape, dtype, seed, stacked layers or 0, axis that ranks split or None)
SAVED: dict[str, tuple[tuple[int, ...], str, int, int, int | None]] = {
    "decoder.layers.self_attention.linear_proj.weight": ((4, 6), "BF16", 1000, 3, 1),
    "decoder.layers.self_attention.linear_qkv.weight": ((8, 4), "BF16", 2000, 3, 0),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": ((4,), "F32", 3000, 3, None),
    "decoder.final_layernorm.weight": ((4,), "F32", 4000, 0, None),
    "embedding.word_embeddings.weight": ((10, 4), "BF16", 5000, 0, 0),
    "mtp.layers.0.eh_proj.weight": ((4, 8), "BF16", 6000, 0, 0),
}


def job_save(folder: str) -> None:
    """The real ``dist_checkpointing.save`` of ``SAVED``; each rank holds its part along the split axis."""
    import argparse
    import inspect

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.enums import ModelType

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        Path(folder).mkdir(parents=True)
    torch.distributed.barrier()
    state: dict[str, Any] = {}
    for key, (shape, dtype, seed, layers, axis) in SAVED.items():
        for layer in range(max(layers, 1)):
            part = tensor(shape, dtype, seed + 100 * layer)
            offsets = [(0, layer, layers)] if layers else []
            if axis is not None:
                part = part.chunk(world, axis)[rank].contiguous()
                offsets.append((axis + bool(layers), rank, world))
            state[f"{key}.{layer}"] = ShardedTensor.from_rank_offsets(
                key, part, *offsets, prepend_axis_num=int(bool(layers)), replica_id=0 if axis is not None else rank
            )
            if layers:
                module = key.rsplit(".", 1)[0]
                state[f"{key}.{layer}.x"] = ShardedObject(
                    f"{module}._extra_state", None, (layers,), (layer,), replica_id=rank
                )
    state["optimizer"] = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.zeros(4), replica_id=rank
    )
    state["rng"] = ShardedObject("rng_state", [{"torch": torch.get_rng_state()}], (1, world), (0, rank), replica_id=0)
    state["odd"] = ShardedObject("someones_own_state", {"x": 1}, (1,), (0,), replica_id=rank)
    state |= {
        "args": argparse.Namespace(
            num_layers=3, params_dtype=torch.bfloat16, model_type=ModelType.encoder_or_decoder, load=Path("/tmp/x")
        ),
        "checkpoint_version": 3.0,
        "iteration": 12,
    }
    options: dict[str, Any] = {"content_metadata": {"singleton_local_shards": False}}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    dist_checkpointing.save(state, folder, **options)


def job_load(folder: str, tensors: dict[str, tuple[list[int], str]], objects: list[str]) -> dict[str, Any]:
    """The real ``dist_checkpointing.load`` at default strictness: bit patterns of ``tensors`` (shape, dtype), values
    of ``objects`` ("key/shard_i_n", one axis), and the common state's plain entries."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    state: dict[str, Any] = {}
    for key, (shape, dtype) in tensors.items():
        state[key] = ShardedTensor.from_rank_offsets(key, torch.zeros_like(tensor(shape, dtype, 0)))
    for unique in objects:
        key, offset, size = unique.replace("/shard_", "_").rsplit("_", 2)
        state[unique] = ShardedObject(key, None, (int(size),), (int(offset),), replica_id=0)
    loaded = dist_checkpointing.load(state, folder)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    args = vars(loaded["args"])
    return {
        "tensors": {key: loaded[key].view(integers[loaded[key].element_size()]).flatten().tolist() for key in tensors},
        "objects": {unique: loaded[unique] for unique in objects},
        "args": {key: str(value) for key, value in args.items()},
        "common": {key: loaded[key] for key in ("checkpoint_version", "iteration", "content_metadata")},
        "content_metadata": dist_checkpointing.load_content_metadata(folder),
        "plain": sorted(dist_checkpointing.load_plain_tensors(folder)),
    }


def job_asks(spec: str, singleton: bool = False) -> dict[str, dict[str, Any]]:
    """What real GPTModels of that layer spec ask a checkpoint for: tensor keys with shapes, object keys."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

    from tests.support.mcore import content_metadata, model_from_args
    from tests.support.mcore_cpu import quiet
    from tests.support.mcore_jobs import leaves
    from tests.support.mcore_roles import ARGUMENTS

    asked = {}
    for name, arguments in ARGUMENTS.items():
        with quiet():
            model = model_from_args(arguments, spec=spec)
            state = model.sharded_state_dict(metadata=content_metadata({"singleton_local_shards": singleton}))
        apply_factories(state)
        asked[name] = {
            "tensors": {n.key: list(n.global_shape) for n in leaves(state) if isinstance(n, ShardedTensor)},
            "objects": sorted(n.unique_key for n in leaves(state) if isinstance(n, ShardedObject)),
        }
    return asked


def job_everything(save: str, loads: list[dict[str, Any]]) -> dict[str, Any]:
    """All in one process, since importing megatron-core takes longest."""
    job_save(save)
    return {
        "loads": [job_load(**one) for one in loads],
        "local": job_asks("local"),
        "singleton": job_asks("local", singleton=True),
    }
