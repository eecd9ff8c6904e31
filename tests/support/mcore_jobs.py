"""What the tests have the real megatron-core do in processes of its own (``mcore_ranks.run``)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from mtpconvert.convert.arguments import mtp_spec_layer
from mtpconvert.stores.torch_dist.reader import TorchDistReader
from tests.support import mcore, mcore_cpu
from tests.support.mcore_kinds import torch_delta_rule

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(
    directories: list[str],
    *,
    spec: str,
    dtype: str = "float32",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    args: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """For each iteration directory: a model of its own ``args``, NaN everywhere, then the real load.

    Says per directory how many tensors the model has and which still hold a NaN, or the error that stopped the load.
    """
    results = []
    for number, directory in enumerate(directories):
        saved = args[number] if args else mcore.common_state(Path(directory))["args"]
        model = mcore.model_from_args(saved, spec=spec, dtype=DTYPES[dtype], tp=tp, pp=pp, ep=ep)
        try:
            nan = mcore.load_into(model, Path(directory))
        except (CheckpointException, RuntimeError) as error:  # the former is a BaseException
            results.append({"error": str(error)})
        else:
            results.append({"tensors": len(mcore.stored_tensors(model)), "nan": nan})
    return results


def resave(
    source: str,
    target: str,
    *,
    spec: str = "local",
    dtype: str = "bfloat16",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    change: bool = False,
    padding: float | None = None,
    vocab_rows: int | None = None,
    with_args: bool = True,
    optimizer: bool = False,
    **changed_args: Any,
) -> list[str]:
    """Load the checkpoint directory ``source`` at these sizes with the real megatron-core and save it to ``target``.

    ``change`` makes every value another one first (``changed``); ``padding`` fills the vocabulary rows at and after
    ``args.vocab_size`` with a value; ``changed_args`` are what this run was launched with instead. Returns the
    in-memory names of this rank's tensors.
    """
    saved = mcore.common_state(Path(source))["args"]
    args = mcore.as_mapping(saved) | changed_args
    if vocab_rows is not None:
        args["padded_vocab_size"] = vocab_rows
    model = mcore.model_from_args(args, spec=spec, dtype=DTYPES[dtype], tp=tp, pp=pp, ep=ep)
    nan = mcore.load_into(model, Path(source))
    if vocab_rows is None:
        assert not nan, f"left unloaded: {nan}"
    with torch.no_grad():
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for name in mcore.stored_tensors(model):
            if change:
                tensors[name].copy_(changed(tensors[name]))
            if padding is not None and name.endswith(("word_embeddings.weight", "output_layer.weight")):
                assert tp == 1, "padding rows are counted on the whole tensor"
                tensors[name][args["vocab_size"] :] = padding
    mcore.save_from(model, Path(target), args=args if with_args else None, optimizer=optimizer)
    return sorted(mcore.stored_tensors(model))


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Another value in every element, by bit: the lowest bit of each element flipped. Its own inverse."""
    view = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return (tensor.contiguous().view(view) ^ 1).view(tensor.dtype)


def resave_each(runs: list[dict[str, Any]]) -> list[list[str]]:
    """``resave`` one run after the other, in one world."""
    return [resave(**run) for run in runs]


def ask_and_load(directories: dict[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
    """For each layer spec and each of its iteration directories: a float32 model of the directory's own ``args``.

    "asked": tensor keys and global shapes of the model's real sharded state dict; "stored": those that megatron-core
    finds in the directory; "nan": tensors that the real load leaves unfilled. "error" in their place if it stops.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    results: dict[str, list[dict[str, Any]]] = {}
    for spec, folders in directories.items():
        results[spec] = []
        for directory in map(Path, folders):
            args = mcore.common_state(directory)["args"]
            if getattr(args, "experimental_attention_variant", None) == "gated_delta_net":
                torch_delta_rule()
            like = mtp_spec_layer(TorchDistReader(directory).inventory())
            try:
                model = mcore.model_from_args(args, spec=spec, mtp_like=like)
            except ValueError as error:  # megatron-core's word for a config that it has no modules for
                results[spec].append({"error": str(error)})
                continue
            with mcore_cpu.quiet():
                content = dist_checkpointing.load_content_metadata(str(directory)) or {}
                state = dict(model.sharded_state_dict(metadata=mcore.content_metadata(content)))
                apply_factories(state)
                stored = dist_checkpointing.load_tensors_metadata(str(directory))
            result: dict[str, Any] = {
                "asked": {n.key: list(n.global_shape) for n in leaves(state) if isinstance(n, ShardedTensor)},
                "stored": {key: list(tensor.global_shape) for key, tensor in stored.items()},
            }
            try:
                result["nan"] = mcore.load_into(model, directory)
            except (CheckpointException, RuntimeError) as error:
                result["error"] = str(error)
            results[spec].append(result)
    return results


def leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from leaves(child)
    else:
        yield node
