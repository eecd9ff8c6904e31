"""What a rank of ``make test-full`` does: one cell of the matrix after the other, in one set of processes."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from mtpconvert.convert.arguments import mtp_spec_layer
from mtpconvert.stores.torch_dist.reader import TorchDistReader
from tests.support import mcore, mcore_cpu
from tests.support.mcore_jobs import leaves
from tests.support.mcore_kinds import torch_delta_rule


def run_cells(cells: list[dict[str, Any]], reports: str) -> None:
    """Run every cell and add a JSON line of what this rank saw to ``reports``/<rank>.jsonl after each.

    A cell has "name", "directory" (to load), "target" (to save to), "spec", "tp", "pp", "ep". An error is written and
    then raised: the other ranks may wait in a collective, so that the set of processes has to end.
    """
    torch_delta_rule()
    with (Path(reports) / f"{torch.distributed.get_rank()}.jsonl").open("a", encoding="utf-8") as log:
        for cell in cells:
            began = time.monotonic()
            try:
                seen = _load_and_save(cell)
            except BaseException as error:  # torch's CheckpointException is none of Exception
                log.write(json.dumps({"cell": cell["name"], "error": f"{type(error).__name__}: {error}"}) + "\n")
                log.flush()
                raise
            seen |= {"cell": cell["name"], "seconds": round(time.monotonic() - began, 3)}
            log.write(json.dumps(seen) + "\n")
            log.flush()


@mcore_cpu.quietly
def _load_and_save(cell: dict[str, Any]) -> dict[str, Any]:
    """Build this rank's part of the real model, load, look at every shard, and save.

    "asked": keys and global shapes of its sharded state dict; "stored": those in the directory; "nan": tensors that the
    load left unfilled; "shards": [key, offset, shape, SHA-256] of each piece that this rank holds after the load.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    directory, sizes = Path(cell["directory"]), {name: cell[name] for name in ("tp", "pp", "ep")}
    args = mcore.as_mapping(dist_checkpointing.load_common_state_dict(str(directory))["args"])
    if args["num_layers"] % sizes["pp"]:  # Megatron-LM's --decoder-first-pipeline-num-layers
        assert sizes["pp"] == 2
        args["num_layers_in_first_pipeline_stage"] = args["num_layers"] // 2 + 1
    # DSA under TP wants it (absorbed_mla.py), the local spec's norms refuse it (torch_norm.py)
    args["sequence_parallel"] = sizes["tp"] > 1 and cell["spec"] == "te"
    like = mtp_spec_layer(TorchDistReader(directory).inventory())
    model = mcore.model_from_args(args, spec=cell["spec"], mtp_like=like, **sizes)
    content = mcore.content_metadata(dist_checkpointing.load_content_metadata(str(directory)))
    stored = dist_checkpointing.load_tensors_metadata(str(directory))
    nan = mcore.load_into(model, directory)
    state = dict(model.sharded_state_dict(metadata=content))
    apply_factories(state)
    shards = [leaf for leaf in leaves(state) if isinstance(leaf, ShardedTensor)]
    mcore.save_from(model, Path(cell["target"]), args=args)
    return {
        "asked": {shard.key: list(shard.global_shape) for shard in shards},
        "stored": {key: list(tensor.global_shape) for key, tensor in stored.items()},
        "nan": nan,
        "shards": [[s.key, list(s.global_offset), list(s.local_shape), _sha256(s.data)] for s in shards],
    }


def _sha256(tensor: torch.Tensor) -> str:
    assert tensor.dtype == torch.float32
    return hashlib.sha256(tensor.detach().contiguous().view(torch.int32).numpy().tobytes()).hexdigest()
