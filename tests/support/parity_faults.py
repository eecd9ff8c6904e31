"""The parity table of docs/evidence.md: what ``parity`` says when the Megatron side is a damaged conversion.

The Hugging Face side is the unharmed fixture of the same family. ``python -m tests.support.parity_faults``
writes the table anew; ``tests/evidence/test_parity_faults.py`` holds it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtpconvert.audit.api import audit
from mtpconvert.errors import MtpConvertError
from mtpconvert.evidence.parity import ParityOptions, ParityReport, Reference, against, reference
from tests.support import trained
from tests.support.acceptance_faults import FAULTS, GLM_FAULTS, PAGE
from tests.support.frameworks_convert import to_mcore
from tests.support.trained import DEEPSEEK, GLM, Damage, Tensors

BEGIN, END = "<!-- parity table: written by tests/support/parity_faults.py -->", "<!-- end of the parity table -->"
NOPE, VALUE, HEADS = 16, 20, 4  # rows of one head in the fixture's kv_b_proj


def keys_and_values(values: Tensors) -> None:
    """In layer 1, the value rows of each head before its key rows."""
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    heads = values[name].reshape(HEADS, NOPE + VALUE, -1)
    values[name] = np.concatenate([heads[:, NOPE:], heads[:, :NOPE]], axis=1).reshape(values[name].shape)


def two_experts(values: Tensors) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        trained.exchange(values, *(f"model.layers.1.mlp.experts.{e}.{part}.weight" for e in (0, 1)))


def zero_layer(values: Tensors) -> None:
    """All matrices of trunk layer 1 that write to the residual stream."""
    for name, value in values.items():
        if name.startswith("model.layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            value[...] = 0


def grouped_keys_and_values(values: Tensors) -> None:
    """GLM: in layer 1, each group's key for its value, biases too."""
    for part in ("weight", "bias"):
        trained.exchange(values, *(f"model.layers.1.self_attn.{name}_proj.{part}" for name in "kv"))


def gate_and_up_dense(values: Tensors) -> None:
    trained.exchange(values, "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")


def two_layers(values: Tensors) -> None:
    for name in [name for name in values if name.startswith("model.layers.1.")]:
        trained.exchange(values, name, name.replace("layers.1.", "layers.2."))


TRUNK_FAULTS: dict[str, Damage] = {
    "keys and values of trunk layer 1 exchanged": keys_and_values,
    "gate and up of trunk layer 0 exchanged": gate_and_up_dense,
    "two experts of trunk layer 1 exchanged": two_experts,
    "trunk layer 1 zeroed": zero_layer,
    "trunk layers 1 and 2 exchanged": two_layers,
}

# What the weights do not say. None takes the argument away, as a launch without the flag would.
ARGUMENT_FAULTS: dict[str, dict[str, Any]] = {
    "args: `norm_epsilon` 1e-5 for 1e-6": {"norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5},
    "args: `rotary_base` 500000 for 10000": {"rotary_base": 500000},
    "args: no `qk_layernorm`": {"qk_layernorm": False},
    "args: `moe_router_topk_scaling_factor` 1": {"moe_router_topk_scaling_factor": 1.0},
    "args: `moe_router_topk` 1 for 2": {"moe_router_topk": 1},
    "args: no `mtp_num_layers`": {"mtp_num_layers": None},
}


def with_args(iteration_dir: Path, changes: dict[str, Any]) -> None:
    """Other training arguments in the ``common.pt`` of a checkpoint."""
    file = iteration_dir / "common.pt"
    common = torch.load(file, weights_only=False)
    before = dict(vars(common["args"]))
    vars(common["args"]).update(changes)
    assert vars(common["args"]) != before, "no fault"
    torch.save(common, file)


GLM_TRUNK_FAULTS: dict[str, Damage] = {
    "GLM: keys and values of trunk layer 1 exchanged": grouped_keys_and_values,
    "GLM: rows of trunk layer 1's queries rotated by one head": trained.rotate_rows(
        "model.layers.1.self_attn.q_proj.weight", 20
    ),
}
GLM_ARGUMENT_FAULTS: dict[str, dict[str, Any]] = {
    "GLM args: `rotary_percent` 1 for 0.5": {"rotary_percent": 1.0},
    "GLM args: no `qk_layernorm`": {"qk_layernorm": False},
}


@dataclass(frozen=True)
class Row:
    """``trunk`` and ``mtp``: largest difference of their logits relative to the largest logit, None where not run; of
    several MTP depths the worst, ``kl`` and ``greedy`` are that one's.

    ``first``: the first point that departs in float32, or why nothing ran. ``bits``: the audit's verdict on the pair.
    """

    fault: str
    bits: str
    verdict: str
    first: str
    trunk: float | None
    mtp: float | None
    kl: float | None
    greedy: float | None
    bfloat16: str

    def line(self) -> str:
        numbers = [_shown(value, ".0e") for value in (self.trunk, self.mtp, self.kl)]
        cells = [self.fault, self.bits, self.verdict, self.first, *numbers, _shown(self.greedy, ".0%"), self.bfloat16]
        return "| " + " | ".join(cells) + " |"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def bold(verdict: str) -> str:
    return "**fails**" if verdict == "fail" else verdict


class Bench:
    """The fixture run by transformers once in each dtype; rows measured against it."""

    def __init__(self, hf: Path, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.hf, self.folder, self.number = hf, folder, 0
        self.references = {dtype: reference(hf, ParityOptions(dtype=dtype)) for dtype in ("float32", "bfloat16")}

    def path(self) -> Path:
        self.number += 1
        return self.folder / str(self.number)

    def row(self, fault: str, make: Callable[[], Path]) -> Row:
        """``make`` gives the iteration's folder of the damaged conversion."""
        try:
            iteration_dir = make()
        except MtpConvertError as error:
            refused = f"**refused**: {type(error).__name__}"
            return Row(fault, "-", refused, "not converted", None, None, None, None, "-")
        bits = bold(audit(self.hf, iteration_dir).verdict())
        report = self.report(self.references["float32"], iteration_dir)
        coarse = self.report(self.references["bfloat16"], iteration_dir)
        points = {found.point: found for found in report.found}
        depths = [found for found in report.found if found.depth and found.point.endswith("logits")]
        mtp = max(depths, key=lambda found: found.relative, default=None)
        first = report.mtp.why if report.first is None and report.mtp.state == "lost" else ""
        return Row(
            fault,
            bits,
            bold(report.verdict),
            first or ("-" if report.first is None else report.first.point),
            points["trunk logits"].relative,
            mtp.relative if mtp else None,
            mtp.kl if mtp else None,
            mtp.greedy if mtp else None,
            bold(coarse.verdict),
        )

    @staticmethod
    def report(theirs: Reference, iteration_dir: Path) -> ParityReport:
        return against(theirs, iteration_dir)

    def rows(self, healthy: str, faults: dict[str, Damage], arguments: dict[str, dict[str, Any]]) -> list[Row]:
        found = [self.row(healthy, lambda: self.damaged(None))]
        for fault, damage in faults.items():
            found.append(self.row(fault, lambda damage=damage: self.damaged(damage)))
        for fault, changes in arguments.items():
            found.append(self.row(fault, lambda changes=changes: self.argued(changes)))
        return found

    def damaged(self, damage: Damage | None) -> Path:
        source = self.hf if damage is None else trained.damaged(self.hf, self.path(), damage)
        return to_mcore(source, self.path(), spec="local", mtp_copies="use-trunk")

    def argued(self, changes: dict[str, Any]) -> Path:
        iteration_dir = self.damaged(None)
        with_args(iteration_dir, changes)
        return iteration_dir


def rows(folder: Path) -> list[Row]:
    bench = Bench(DEEPSEEK, folder)
    found = bench.rows("none: DeepSeek-V3", FAULTS | TRUNK_FAULTS, ARGUMENT_FAULTS)
    dropped = lambda: to_mcore(DEEPSEEK, bench.path(), spec="local", mtp="drop")  # noqa: E731
    found.append(bench.row("converted with `--mtp drop`", dropped))
    glm = Bench(GLM, folder / "glm")
    return found + glm.rows("none: GLM-4.5, two MTP layers", GLM_FAULTS | GLM_TRUNK_FAULTS, GLM_ARGUMENT_FAULTS)


HEAD = (
    "| Megatron side | bits | parity, float32 | first point that departs | trunk logits | MTP logits | MTP KL"
    " | MTP greedy | parity, bfloat16 |"
)


def table(found: list[Row]) -> str:
    return "\n".join([BEGIN, HEAD, "|" + "---|" * 9, *(one.line() for one in found), END])


def documented() -> list[list[str]]:
    """The cells of the rows that the page has."""
    inside = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.strip().splitlines()[2:]]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        new = table(rows(Path(folder)))
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    if begin:
        PAGE.write_text(before + new + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(new + "\n")


if __name__ == "__main__":
    main()
