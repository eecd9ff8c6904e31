"""Run a command and say what it cost. The parent stays small: Linux counts its pages towards a child's peak."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MTPCONVERT = (sys.executable, "-m", "mtpconvert")


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, seconds of processor time (user and system), bytes of memory at the peak."""

    wall: float
    cpu: float
    peak: int


def cost_of(command: Sequence[str]) -> Cost:
    """Run ``command`` with its output thrown away. Raises SystemExit when it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{errors.decode(errors='replace')}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def median_cost(command: Sequence[str], runs: int) -> Cost:
    """Median of each figure over ``runs`` runs, after one that is not counted."""
    cost_of(command)
    costs = [cost_of(command) for _ in range(runs)]
    return Cost(
        statistics.median(cost.wall for cost in costs),
        statistics.median(cost.cpu for cost in costs),
        int(statistics.median(cost.peak for cost in costs)),
    )


def alternate(runs: Mapping[str, tuple[Path, Sequence[str]]], rounds: int) -> dict[str, list[Cost]]:
    """Every command once a round, its target folder removed before; the first round, which warms the page cache, is
    not counted. Says on stderr what a round took."""
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (target, command) in runs.items():
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            cost = cost_of(command)
            if number:
                costs[name].append(cost)
        walls = ", ".join(f"{name} {of_one[-1].wall:.2f} s" for name, of_one in costs.items() if of_one)
        print(f"round {number}: {walls}", file=sys.stderr)
    return costs


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, as docs/performance.md keeps them."""
    lines = [f"### {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])
