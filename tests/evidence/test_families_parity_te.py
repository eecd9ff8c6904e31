"""Families that megatron-core has in its Transformer Engine spec only compute the same in both frameworks on a CPU.

Its own modules run on ``tests/support/te_kernels.py``. With one thing made wrong in them the two must part, and where.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from mtpconvert.evidence.differences import TOLERANCES, differences
from mtpconvert.evidence.trace import Trace
from tests.support import mtp_as_model
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
DELTA_NETS = ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE", "Qwen3.6-MoE as published")
# what is made wrong in Megatron's model, and the first point that must show it
DELTA_CONTROLS = {
    "two_value_heads": "layer 0",
    "alpha_and_beta": "layer 0",
    "values_and_gate": "layer 0",
    "norm_not_less_one": "layer 0",
    "decay_and_bias": "layer 0",
    "convolution_reversed": "layer 0",
    "query_and_gate": "layer 3",
    "halves_of_eh_proj": "MTP 1: eh_proj",
    "enorm_and_hnorm": "MTP 1: eh_proj",
}
SPARSE_CONTROLS = {
    "indexer_heads": "layer 0",
    "indexer_rotary_part": "layer 0",
    "indexer_other_pairs": "layer 0",
    "keys_and_values": "layer 0",
    "indexer_of_mtp": "MTP 1: layer",
    "halves_of_eh_proj": "MTP 1: eh_proj",
    "enorm_and_hnorm": "MTP 1: eh_proj",
}
# fewer keys than there are, so that the indexer decides; a size that a Hadamard matrix has; heads enough that no two
# keys of a query score 0 alike, each of its heads cut off at 0
SPARSE = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 8}
CONTROLS = dict.fromkeys(DELTA_NETS, DELTA_CONTROLS) | dict.fromkeys(("DeepSeek-V3.2", "GLM-5.2"), SPARSE_CONTROLS)
CONTROLS = {name: controls for name, controls in CONTROLS.items() if INSTALLED not in CASES[name].unsupported}


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
        for number, (name, controls) in enumerate(CONTROLS.items()):
            folder, changes = root / str(number), SPARSE if controls is SPARSE_CONTROLS else {}
            source = write_case(name, folder / "hf", fill="normal", **changes)
            config = CASES[name].config()
            vocabulary = config.get("text_config", config)["vocab_size"]
            tokens = torch.randint(0, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(7))
            wanted[name] = mtp_as_model.trunk_and_mtp(source, folder / "reference", tokens)
            runs.append(
                {
                    "directory": to_mcore(source, folder / "mcore", spec="te", mcore_version=INSTALLED),
                    "tokens": tokens.tolist(),
                    "controls": list(controls),
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
def test_what_is_made_wrong_is_seen(name: str, control: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].first_departing(control) == CONTROLS[name][control]
