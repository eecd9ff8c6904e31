"""The fault table: every seeded fault in every family that it applies to, and what each check said.

``docs/fault-table.md`` is its snapshot; ``python -m tests.support.fault_table`` writes it anew. A change that lets a
check see less shows there, line by line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from mtpconvert.audit.api import audit
from tests.support import faults_bridge, faults_fp8, faults_huggingface, faults_megatron
from tests.support.fault_model import MLA, NO_EXPERTS, NO_GROUPS, NO_MTP, TIED, Models, Outcome, run, verdict
from tests.support.faults_bridge_rows import BRIDGE_ROW_FAULTS
from tests.support.faults_executor import EXECUTOR_FAULTS
from tests.support.faults_glm import GLM_FAULTS
from tests.support.faults_mapping import MAPPING_FAULTS
from tests.support.faults_ops import OP_FAULTS
from tests.support.handmade import Arrays, megatron_args, megatron_arrays, read_arrays, write_torch_dist
from tests.support.scratch import scratch
from tests.support.tiny import sha256_tree, write_tiny

SNAPSHOT = Path(__file__).parents[2] / "docs" / "fault-table.md"
FAMILIES = ("deepseek_v3", "qwen3", "qwen2", "llama")
WORDS = {"deepseek_v3": "DeepSeek-V3", "qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "glm4_moe": "GLM-4.5"}
WORDS |= faults_bridge.CASES
PLACES = ("mapping row", "op", "executor", "artefact, Megatron", "artefact, Hugging Face", "artefact, FP8",
          "artefact, dialect bridge")  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A row of the table. ``make(models, family)`` plants the fault there and asks the checks."""

    name: str
    where: str
    families: tuple[str, ...]
    why_not: str
    mtp: bool
    tensor: str | None
    make: Callable[[Models, str], Outcome]


def _planted(models: Models, family: str, fault: Any) -> Outcome:
    return run(fault, family, models)


def _in_megatron(models: Models, family: str, fault: faults_megatron.Fault) -> Outcome:
    hf = _one_layer(models, family)
    config, clean = _handmade(hf)
    arrays = {name: value.copy() for name, value in clean.items()}
    fault.mutate(arrays, config)
    assert set(arrays) != set(clean) or any(not np.array_equal(arrays[n], clean[n]) for n in clean), "no fault"
    folder = models.folder()
    write_torch_dist(folder / "mc", arrays, megatron_args(config, 128))
    wanted = Wanted(fault.code, fault.tensor or None, fault.cause)
    seen = None
    if family == fault.families.split()[0]:
        seen = audit(hf, folder / "mc", level="headers").verdict() == "fail"
    found = verdict(audit(hf, folder / "mc"), wanted)
    shutil.rmtree(folder)
    return Outcome(headers=seen, bits=found)


def _in_huggingface(models: Models, family: str, fault: faults_huggingface.Fault) -> Outcome:
    left = _one_layer(models, family)
    right = models.folder() / "right"
    shutil.copytree(left, right)
    fault.harm(right)
    assert sha256_tree(right) != sha256_tree(left), "no fault"
    return _both_levels(left, right, fault)


def _in_fp8(models: Models, family: str, fault: faults_fp8.Fault) -> Outcome:
    return _both_levels(*_fp8_sides(models.root).pair(fault, models.folder() / "right"), fault)


@cache
def _fp8_sides(root: Path) -> faults_fp8.Sides:
    return faults_fp8.Sides(root / "fp8")


def _both_levels(left: Path, right: Path, fault: faults_huggingface.Fault | faults_fp8.Fault) -> Outcome:
    hits = []
    for level in ("headers", "bits"):
        report = audit(left, right, level=level)
        hits.append([f for f in report.failing("warning") if f.code == fault.code and f.side != "left"
                     and fault.tensor in (None, f.tensor) and fault.words in f.message])  # fmt: skip
    said = "; ".join(f"{f.code} {f.tensor} {f.message}" for f in report.failing("warning"))
    shutil.rmtree(right.parent)
    return Outcome(headers=bool(hits[0]), bits=hits[1][0].code if hits[1] else f"MISSED: {said[:600]}")


@dataclass(frozen=True)
class Wanted:
    """What ``fault_model.verdict`` looks for."""

    code: str
    tensor: str | None
    words: str


@cache
def _handmade(hf: Path) -> tuple[dict[str, Any], Arrays]:
    """Its config, and its Megatron side by hand."""
    config = json.loads((hf / "config.json").read_text())
    return config, megatron_arrays(read_arrays(hf), config, rows=128)


def _one_layer(models: Models, family: str) -> Path:
    """With one MTP layer, as the published model has it."""
    path = models.root / f"{family}-one"
    return path if path.exists() else write_tiny(family, path)


def _entries() -> Iterator[Entry]:
    for fault in (*MAPPING_FAULTS, *OP_FAULTS, *EXECUTOR_FAULTS, *GLM_FAULTS, *BRIDGE_ROW_FAULTS):
        make = partial(_planted, fault=fault)
        yield Entry(fault.name, fault.where, fault.families, fault.why_not, fault.mtp, fault.tensor, make)
    for name, mc in faults_megatron.FAULTS.items():
        families = tuple(mc.families.split())
        mtp = mc.tensor.startswith("mtp.")
        why = "" if families == FAMILIES else _why_not(families, mtp, mc.tensor)
        make_mc = partial(_in_megatron, fault=mc)
        yield Entry(name, "artefact, Megatron", families, why, mtp, mc.tensor or None, make_mc)
    for name, hf in faults_huggingface.FAULTS.items():
        mtp = hf.code.startswith("mtp") or (hf.tensor or "").startswith(faults_huggingface.L3)
        why = "files, names and numbers of one framework are compared alike in every family"
        yield Entry(name, "artefact, Hugging Face", MLA, why, mtp, hf.tensor, partial(_in_huggingface, fault=hf))
    for name, fp8 in faults_fp8.FAULTS.items():
        mtp = (fp8.tensor or "").startswith((faults_fp8.L3, "mtp."))
        why = "codes and scales are read alike in every family"
        entry = f"{name} ({fp8.way})"
        yield Entry(entry, "artefact, FP8", MLA, why, mtp, fp8.tensor, partial(_in_fp8, fault=fp8))
    for bridge in faults_bridge.BRIDGE_FAULTS:
        why, make = "stock megatron-core has no such modules", partial(faults_bridge.plant, fault=bridge)
        where = "artefact, dialect bridge"
        yield Entry(bridge.name, where, bridge.families, why, bridge.mtp, bridge.tensor, make)


def _why_not(families: tuple[str, ...], mtp: bool, tensor: str) -> str:
    if mtp:
        return NO_MTP
    if families == ("qwen2",):
        return "no biases, or o_proj is not square: its shape gives it away"
    if families == ("qwen3",):
        return "no norms of q and k, or of two sizes"
    if tensor == "output_layer.weight":
        return TIED
    if families == MLA:
        return NO_EXPERTS if ".mlp." in tensor else "no latent attention in these families"
    return NO_GROUPS if "qkv" in tensor else "layers of two kinds: not every layer has such a tensor"


ENTRIES = list(_entries())


@contextmanager
def models() -> Iterator[Models]:
    """Models in memory, without waiting for a disk."""
    with scratch() as root, patch("os.fsync"):
        yield Models(root)


def render(outcomes: dict[tuple[str, str, str], Outcome]) -> str:
    """The page; ``outcomes`` by (where, fault, family)."""
    lines = [*_HEAD, *_summary(outcomes), ""]
    for where in PLACES:
        lines += [f"## Faults in: {where}", "", "| fault | families | converter | round trip | headers | bits |"]
        lines += ["|---|---|---|---|---|---|"]
        for entry in ENTRIES:
            if entry.where == where:
                lines.append(_row(entry, [outcomes[where, entry.name, family] for family in entry.families]))
        lines.append("")
    return "\n".join(lines)


_HEAD = [
    "# Fault table",
    "",
    "Faults planted on purpose, and what each check says. Written by `python -m tests.support.fault_table`;",
    "`tests/audit/test_fault_table.py` runs every line again in every family and compares. Do not edit.",
    "",
    "- **converter**: the error with which it refuses before anything stands under the final name (loading and proving",
    "  the mapping, the closed world of names, counting the bytes moved). Nothing is written then, so there is nothing",
    "  to audit.",
    "- **round trip**: `mtpconvert roundtrip` under the same fault. A bijection comes back equal however wrong it is.",
    "- **headers**, **bits**: the two levels of `mtpconvert audit`, source against result. For bits the code, and the",
    "  tensor that it must name (layers under one key: the key).",
    "- Round trip and headers are of the first family named; bits holds for all of them. A dash: not found. Empty:",
    "  does not apply.",
    "",
]


def _summary(outcomes: dict[tuple[str, str, str], Outcome]) -> list[str]:
    lines = ["| faults in | faults | of MTP alone | runs | refused | found at bits |", "|---|---|---|---|---|---|"]
    total = [0] * 5
    for where in PLACES:
        mine = [entry for entry in ENTRIES if entry.where == where]
        runs = [outcomes[where, entry.name, family] for entry in mine for family in entry.families]
        found = sum(bool(one.bits) and not one.bits.startswith("MISSED") for one in runs)
        row = [len(mine), sum(entry.mtp for entry in mine), len(runs), sum(bool(one.converter) for one in runs), found]
        total = [a + b for a, b in zip(total, row, strict=True)]
        lines.append(f"| {where} | {' | '.join(map(str, row))} |")
    return [*lines, f"| all | {' | '.join(map(str, total))} |"]


def _row(entry: Entry, outcomes: list[Outcome]) -> str:
    first = outcomes[0]
    families = ", ".join(WORDS[family] for family in entry.families)
    if set(entry.families) != set(FAMILIES):
        assert entry.why_not, f"{entry.name}: no reason why not in every family"
        families += f" (others: {entry.why_not})"
    converters, codes = ({getattr(o, name) for o in outcomes} for name in ("converter", "bits"))
    bits = ", ".join(f"`{code}`" for code in sorted(codes) if code)
    if bits and entry.tensor:
        bits += f" `{entry.tensor}`"
    cells = [entry.name, families, ", ".join(sorted(filter(None, converters)))]
    cells += ["" if seen is None else "found" if seen else "-" for seen in (first.roundtrip, first.headers)]
    return "| " + " | ".join([*cells, bits]) + " |"


def main() -> None:
    with models() as made:
        outcomes = {(e.where, e.name, f): e.make(made, f) for e in ENTRIES for f in e.families}
    SNAPSHOT.write_text(render(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
