"""Run a command and say what it cost. The parent stays small: Linux counts its pages towards a child's peak."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """Run ``command`` with its output thrown away. Raises SystemExit when it fails.

    Python may keep its bytecode, as an installed package has: what PYTHONDONTWRITEBYTECODE costs is no figure of ours.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
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
    return median_of([cost_of(command) for _ in range(runs)])


def median_of(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.wall for cost in costs),
        statistics.median(cost.cpu for cost in costs),
        int(statistics.median(cost.peak for cost in costs)),
    )


def alternate(
    commands: Mapping[str, Sequence[str]], rounds: int, before: Callable[[str], object]
) -> dict[str, list[Cost]]:
    """Every command once a round, after ``before`` of its name; the first round, which warms the page cache, is not
    counted. Says on stderr what a round took."""
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            before(name)
            cost = cost_of(command)
            if number:
                costs[name].append(cost)
        walls = ", ".join(f"{name} {of_one[-1].wall:.2f} s" for name, of_one in costs.items() if of_one)
        print(f"round {number}: {walls}", file=sys.stderr)
    return costs


def clear(target: Path) -> None:
    """Remove what a run wrote, and leave nothing to be synced."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()


@dataclass(frozen=True)
class Goal:
    """At most ``ratio`` times the yardstick (its lower quartile, since disks are noisy), and ``peak`` bytes."""

    ratio: float
    peak: float


def rows_against(
    yardstick: str, costs: Mapping[str, Sequence[Cost]], goals: Mapping[str, Goal], more: Callable[[Cost], list[str]]
) -> tuple[list[list[str]], bool]:
    """A row of ``table`` for each run, and whether a goal is missed: name, median, what ``more`` says of the medians,
    ratio of each run to that of ``yardstick`` in the same round, goal, peak memory."""
    rows, missed = [], False
    for name, of_one in costs.items():
        ratios = [one.wall / base.wall for one, base in zip(of_one, costs[yardstick], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        median, peak = median_of(of_one), max(cost.peak for cost in of_one)
        goal = goals.get(name)
        missed |= goal is not None and (low > goal.ratio or peak > goal.peak)
        limit = "" if goal is None else f"{goal.ratio}"
        ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        rows.append([name, f"{median.wall:.2f} s", *more(median), ratio, limit, f"{peak / 1e6:.0f} MB"])
    return rows, missed


def command_line(about: str | None, *, layers: int, of_layers: str, rounds: int) -> argparse.ArgumentParser:
    """What each benchmark of large files asks for; ``of_layers``: how large the default number of layers is."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=layers, help=of_layers)
    parser.add_argument("--rounds", type=int, default=rounds, help="after one that is not counted")
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoints are made, and removed")
    return parser


@contextmanager
def new_folder(parent: Path | None) -> Iterator[Path]:
    """A folder of one benchmark, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mtpconvert-bench-", dir=parent) as folder:
        yield Path(folder)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, as docs/performance.md keeps them."""
    lines = [f"### {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])
