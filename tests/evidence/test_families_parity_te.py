"""Families that megatron-core has in its Transformer Engine spec only compute the same in both frameworks on a CPU.

Its own modules run on ``tests/support/te_kernels.py``; with one role of weights exchanged they must not agree.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from mtpconvert.evidence.differences import TOLERANCES, differences
from mtpconvert.evidence.trace import Trace
from tests.support import qwen_reference
from tests.support.family_tables import CASES, write_case
from tests.support.frameworks_convert import to_mcore
from tests.support.mcore_cpu import version
from tests.support.mcore_ranks import run
from tests.support.scratch import scratch

LENGTH = 24
INSTALLED = version().rpartition(".")[0]
# A delta net magnifies rounding: transformers alone, its embedding changed by half a unit in the last place, moves by
# up to 2e-5 of the largest value at these layers; measured between the frameworks: 9.3e-6.
TOLERANCE = replace(TOLERANCES["float32"], limit=5e-5)
DELTA_NETS = ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")
# what is made wrong in Megatron's weights, and the first point that must show it
DELTA_CONTROLS = {
    "two_value_heads": "layer 0",
    "alpha_and_beta": "layer 0",
    "values_and_gate": "layer 0",
    "norm_not_less_one": "layer 0",
    "query_and_gate": "layer 3",
    "halves_of_eh_proj": "MTP 1: eh_proj",
    "enorm_and_hnorm": "MTP 1: eh_proj",
}
CONTROLS = dict.fromkeys(DELTA_NETS, DELTA_CONTROLS)


@dataclass(frozen=True)
class Outcome:
    """``wanted``: of transformers. ``found``: of Megatron, by control, "" for the model as converted."""

    wanted: Trace
    found: dict[str, Trace]
    nan: list[str]

    def first_departing(self, control: str) -> str | None:
        found, apart = differences(self.wanted, self.found[control])
        assert not apart
        return next((one.point for one in found if not one.within(TOLERANCE)), None)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Outcome]]:
    """Of every case; one process builds, loads and runs Megatron's models."""
    with scratch() as root:
        wanted, runs = {}, []
        for number, name in enumerate(CONTROLS):
            folder = root / str(number)
            source = write_case(name, folder / "hf", fill="normal")
            tokens = torch.randint(
                0, CASES[name].config()["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(7)
            )
            (folder / "reference").mkdir()
            wanted[name] = qwen_reference.trunk_and_mtp(source, folder / "reference", tokens)
            directory = to_mcore(source, folder / "mcore", spec="te", mcore_version=INSTALLED)
            runs.append(
                {
                    "directory": directory,
                    "tokens": tokens.tolist(),
                    "controls": list(CONTROLS[name]),
                    "out": folder / "traces.pt",
                }
            )
        (results,) = run("tests.support.mcore_te_runs:traces", kernels=True, runs=runs)
        yield {
            name: Outcome(wanted[name], torch.load(one["out"]), result["nan"])
            for name, one, result in zip(wanted, runs, results, strict=True)
        }


@pytest.mark.parametrize("name", CONTROLS)
def test_trunk_and_mtp(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.nan == []
    assert outcome.first_departing("") is None
    found, _ = differences(outcome.wanted, outcome.found[""])
    assert {one.depth for one in found} == {0, 1}


@pytest.mark.parametrize(("name", "control"), [(name, control) for name, of in CONTROLS.items() for control in of])
def test_weights_of_another_role_are_seen(name: str, control: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].first_departing(control) == CONTROLS[name][control]
