"""Megatron checkpoints that are as they should be: nothing is found, from either side, with and without arguments.

The faults themselves stand in the fault table (tests/support/faults_megatron.py, tests/audit/test_fault_table.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.audit.api import audit
from tests.support.faults_megatron import ALL
from tests.support.handmade import Arrays, megatron_args, megatron_arrays, read_arrays, write_torch_dist
from tests.support.tiny import write_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Arrays, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for family in ALL.split():
        hf = write_tiny(family, root / family)
        config = json.loads((hf / "config.json").read_text())
        made[family] = (hf, megatron_arrays(read_arrays(hf), config, rows=128), config)
    return made


@pytest.mark.parametrize("family", ALL.split())
@pytest.mark.parametrize("with_args", [True, False])
def test_unharmed_is_clean(models: Any, tmp_path: Path, family: str, with_args: bool) -> None:
    hf, arrays, config = models[family]
    write_torch_dist(tmp_path / "mc", arrays, megatron_args(config, 128) if with_args else None)
    for left, right in ((hf, tmp_path / "mc"), (tmp_path / "mc", hf)):
        report = audit(left, right)
        assert report.verdict("warning") == "pass", [f.message for f in report.findings]
        assert report.nbytes == sum(a.nbytes for n, a in arrays.items()) - _padding(arrays, config)


def _padding(arrays: Arrays, config: dict[str, Any]) -> int:
    tables = [arrays[n] for n in ("embedding.word_embeddings.weight", "output_layer.weight") if n in arrays]
    return sum((len(t) - config["vocab_size"]) * t.shape[1] * t.itemsize for t in tables)
