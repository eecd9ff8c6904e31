"""Each cell of the matrix: the real model of that layout loads what ``hf2mcore`` wrote, saves it, and it comes back."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from mtpconvert import audit
from mtpconvert.audit.findings import Severity
from tests.full.matrix import CELLS, Cell
from tests.full.sources import wrong_shards
from tests.support.frameworks_convert import to_hf
from tests.support.tiny import sha256_tree


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell, matrix: Any) -> None:
    ranks, saved = matrix.seen(cell)
    source = matrix.sources[cell.family]
    assert not isinstance(ranks, str), ranks
    assert {key: shape for rank in ranks for key, shape in rank["asked"].items()} == ranks[0]["stored"]
    assert [rank["nan"] for rank in ranks] == [[]] * cell.layout.world
    assert wrong_shards([shard for rank in ranks for shard in rank["shards"]], source.keys(cell.spec)) == []
    back = saved.with_suffix(".back")
    to_hf(saved, back, reference=source.folder)
    assert sha256_tree(back) == source.hashes
    errors = [finding for finding in audit(source.folder, saved).findings if finding.severity is Severity.ERROR]
    assert [finding.message for finding in errors] == []
    shutil.rmtree(saved)
    shutil.rmtree(back)
