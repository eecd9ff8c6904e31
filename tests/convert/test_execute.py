"""The executor's own account: every byte has a source, every thread's error is the run's, progress adds up."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconvert.convert.chunking import chunk_boxes
from mtpconvert.convert.execute import Moved, execute
from mtpconvert.convert.stacked import is_stacked
from mtpconvert.convert.to_mcore import ToMcore, open_source
from mtpconvert.errors import CheckpointError
from mtpconvert.mapping.plan import Plan
from mtpconvert.stores.torch_dist.writer import TorchDistWriter
from tests.support.dist_read import read_torch_dist
from tests.support.frameworks_convert import to_hf, to_mcore
from tests.support.mcore_layout import megatron_tensors
from tests.support.tiny import read_safetensors, sha256_tree, write_tiny


def run(source: Path, folder: Path, change: Any = lambda plan: plan, progress: Any = None, threads: int = 2) -> Moved:
    """Execute the plan of ``source`` after ``change`` into the new ``folder``, laid out for the unchanged plan."""
    opened = open_source(source, ToMcore())
    plan: Plan = opened.plan
    folder.mkdir()
    writer = TorchDistWriter(
        folder,
        list(plan.mcore.values()),
        chunk_boxes(plan),
        stacked=is_stacked(plan.mcore),
        common={"args": {}, "iteration": 0},
    )
    writer.create()
    try:
        return execute(change(plan), opened.reader, writer, progress or (lambda count, name: None), threads)
    finally:
        writer.close()


@pytest.fixture
def source(memory: Path) -> Path:
    return write_tiny("deepseek_v3", memory / "hf")


def test_bytes_and_progress_add_up(source: Path, memory: Path) -> None:
    seen: dict[str, int] = {}
    moved = run(source, memory / "m", progress=lambda count, name: seen.update({name: seen.get(name, 0) + count}))
    copies = ("3.embed_tokens.weight", "3.shared_head.head.weight")
    tensors = {name: t for name, t in read_safetensors(source).items() if not name.endswith(copies)}
    read = sum(len(data) for _, _, data in tensors.values())
    zeros = 2 * 30 * 36 * 2
    assert (moved.read, moved.written, moved.zeros) == (read, read + zeros, zeros)
    assert sum(seen.values()) == moved.written
    assert seen["decoder.layers.0.mlp.linear_fc1.weight"] == 88 * 36 * 2


@pytest.mark.parametrize("threads", [1, 3])
def test_a_tile_that_is_lost_between_plan_and_disk_is_noticed(threads: int, source: Path, memory: Path) -> None:
    """One expert's gate is left out: 12 x 36 BF16 elements of its chunk have no source."""

    def lose(plan: Plan) -> Plan:
        gone = "model.layers.1.mlp.experts.2.gate_proj.weight"
        return replace(plan, tiles=[tile for tile in plan.tiles if tile.hf.tensor != gone])

    with pytest.raises(CheckpointError, match="0 of 864 bytes have a source") as refusal:
        run(source, memory / "m", lose, threads=threads)
    assert refusal.value.where == "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"


def test_padding_that_is_no_padding_is_noticed(source: Path, memory: Path) -> None:
    """Vocabulary rows without a source are zeros only as far as the plan says that they are padding."""

    def lose(plan: Plan) -> Plan:
        return replace(plan, tiles=[tile for tile in plan.tiles if tile.hf.tensor != "lm_head.weight"])

    with pytest.raises(CheckpointError, match="planned were"):
        run(source, memory / "m", lose)


def test_an_error_in_any_thread_stops_the_run_and_is_raised(source: Path, memory: Path) -> None:
    threads: set[str] = set()

    def progress(count: int, name: str) -> None:
        threads.add(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"at {name}")
        if "mtp" in name:  # so late that the other thread has had its turn
            threading.Event().wait(0.05)

    with pytest.raises(RuntimeError, match="at "):
        run(source, memory / "m", progress=progress, threads=4)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("move-")]


def test_tensors_larger_than_windows_and_slabs(memory: Path) -> None:
    """1 MiB windows and 4 MiB slabs: fused q, k, v of 8 MB, gate and up of 26 MB, every element unique."""
    sizes = {
        "num_hidden_layers": 1, "hidden_size": 1024, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 64, "intermediate_size": 3200, "vocab_size": 1500, "tie_word_embeddings": True,
    }  # fmt: skip
    source = write_tiny("qwen3", memory / "hf", dtype="F32", shards=2, config_overrides=sizes)
    iteration = to_mcore(source, memory / "mcore")
    hf = {
        name: np.frombuffer(data, "<u4").reshape(shape) for name, (_, shape, data) in read_safetensors(source).items()
    }
    got = read_torch_dist(iteration)
    config = sizes | {"model_type": "qwen3"}
    for name, values in megatron_tensors(config, hf, 0, 128).items():
        assert np.array_equal(got.pop(name), values), name
    assert not got
    to_hf(memory / "mcore", memory / "back")
    assert sha256_tree(memory / "back") == sha256_tree(source)
