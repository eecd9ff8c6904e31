"""``docs/test-full.md``: what a run of the whole matrix did, written by the run."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from tests.full.matrix import CELLS, LAYOUTS, VERSIONS, Cell, layouts
from tests.full.sets import INTERPRETERS
from tests.support.mcore_ranks import ROOT
from tests.support.stock_families import STOCK

FILE = ROOT / "docs" / "test-full.md"
_ASK = "from importlib.metadata import version; print(version({!r}))"

_TEXT = """# The heavy matrix

Written by `make test-full`, and not edited. A cell is a family at tiny size, a version of megatron-core, a layer spec
and a layout: in real processes (gloo, CPU; a stand-in for Transformer Engine, whose modules hold parameters and do not
run) the real model of that layout asks for exactly the tensors that `hf2mcore` wrote, loads them into weights that were
NaN, holds on its ranks the bits that the plan's tiles cut out of the Hugging Face file, and saves with its own
`dist_checkpointing`. `mcore2hf` of that save is byte-equal to the Hugging Face folder, and the auditor finds no error
between the two. Three layers under PP2 are two and one (`--decoder-first-pipeline-num-layers`).

"""


def write(outcomes: Mapping[Cell, str], seconds: float) -> None:
    """``outcomes``: of every cell "passed" or the first line of what is wrong."""
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    exact = {version: _version(INTERPRETERS[version], "megatron-core") for version in VERSIONS}
    packages = ", ".join(f"{name} {_version(sys.executable, name)}" for name in ("torch", "transformers"))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {packages}, megatron-core {' and '.join(exact.values())}",
        "time": f"{seconds:.0f} s, {sum(one.ru_utime + one.ru_stime for one in used):.0f} s of processors",
        "cells": f"{passed} of {len(outcomes)} passed",
        "processes": _counts(),
    }
    text = _TEXT + "| | |\n|---|---|\n" + "".join(f"| {name} | {fact} |\n" for name, fact in facts.items())
    columns = [(version, spec) for version in VERSIONS for spec in ("te", "local")]
    head = ["family", "architecture", "MTP layers", *(f"{exact[version]} {spec}" for version, spec in columns)]
    text += (
        "\nLayouts that passed, of those that were run:\n\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|\n"
    )
    for family, case in STOCK.items():
        row = [family, f"`{case.architecture}`", str(case.depths), *(_field(family, *one, outcomes) for one in columns)]
        text += "| " + " | ".join(row) + " |\n"
    text += "\nLayouts by family:\n\n"
    for group in dict.fromkeys(tuple(layouts(family)) for family in STOCK):
        families = "; ".join(family for family in STOCK if tuple(layouts(family)) == group)
        text += f"- {', '.join(map(str, group))}: {families}\n"
    wrong = {cell: outcome for cell, outcome in outcomes.items() if outcome != "passed"}
    if wrong:
        text += "\nWhat did not pass:\n\n" + "".join(f"- {cell}: {outcome}\n" for cell, outcome in wrong.items())
    FILE.write_text(text, encoding="utf-8")


def _field(family: str, version: str, spec: str, outcomes: Mapping[Cell, str]) -> str:
    case = STOCK[family]
    if spec not in case.specs:
        return "no such spec"
    if version in case.unsupported:
        return "cannot hold it"
    own = [outcomes[cell] for cell in CELLS if (cell.family, cell.version, cell.spec) == (family, version, spec)]
    return f"{own.count('passed')}/{len(own)}"


def _counts() -> str:
    worlds = sorted({layout.world for layout in LAYOUTS})
    return ", ".join(f"{sum(cell.layout.world == n for cell in CELLS)} cells in {n}" for n in worlds)


def _version(python: str, package: str) -> str:
    return subprocess.run(
        [python, "-c", _ASK.format(package)], capture_output=True, text=True, check=True
    ).stdout.strip()


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    record = FILE.relative_to(ROOT).as_posix()
    changed = git("status", "--porcelain", "--", ".", f":(exclude){record}")
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def _processor() -> str:
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0] if names else platform.processor()
