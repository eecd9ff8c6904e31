"""One set of processes per megatron-core version and world size; it goes through all cells of that size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.full.matrix import Cell
from tests.full.sources import Source
from tests.support.mcore_ranks import ROOT, RankFailedError, run

# The python with each megatron-core; this one has 0.16
INTERPRETERS = {
    "0.16": sys.executable,
    "0.19": os.environ.get("MTPCONVERT_NEXT_PYTHON", str(ROOT / ".venv-next" / "bin" / "python")),
}
Seen = dict[str, Any]


def run_set(cells: Sequence[Cell], sources: dict[str, Source], root: Path) -> dict[Cell, list[Seen] | str]:
    """What each rank saw of each cell, or the error that ended it. All cells have one version and one world size.

    A cell that fails takes its processes with it; the cells after it run in new ones.
    """
    root.mkdir()
    (version,), (world,) = {cell.version for cell in cells}, {cell.layout.world for cell in cells}
    jobs = {str(cell): _job(cell, sources, root / str(number)) for number, cell in enumerate(cells)}
    results: dict[Cell, list[Seen] | str] = {}
    left = list(cells)
    while left:
        for old in root.glob("*.jsonl"):
            old.unlink()
        error = ""
        try:
            run(
                "tests.full.worker:run_cells",
                world,
                te=True,
                timeout=120 + 20 * len(left),
                python=INTERPRETERS[version],
                cells=[jobs[str(cell)] for cell in left],
                reports=root,
            )
        except (RankFailedError, subprocess.TimeoutExpired) as failure:
            error = str(failure)
        seen = _lines(root, world)
        done = [cell for cell in left if len(seen[str(cell)]) == world and not _errors(seen[str(cell)])]
        results |= {cell: seen[str(cell)] for cell in done}
        left = left[len(done) :]
        if left:
            culprit = left.pop(0)
            results[culprit] = "\n".join(_errors(seen[str(culprit)])) or error or "a rank said nothing of it"
    return results


def _job(cell: Cell, sources: dict[str, Source], target: Path) -> dict[str, Any]:
    directory = sources[cell.family].directory(cell.version, cell.spec)
    return {"name": str(cell), "directory": directory, "target": target, "spec": cell.spec, **vars(cell.layout)}


def _lines(root: Path, world: int) -> dict[str, list[Seen]]:
    seen: dict[str, list[Seen]] = defaultdict(list)
    for rank in range(world):
        file = root / f"{rank}.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            report = json.loads(line)
            seen[report["cell"]].append(report)
    return seen


def _errors(seen: list[Seen]) -> list[str]:
    return [report["error"] for report in seen if "error" in report]
