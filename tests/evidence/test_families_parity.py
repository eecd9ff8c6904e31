"""What both frameworks can run on a CPU of ``tests/support/family_tables.py`` computes the same in both."""

from pathlib import Path

import pytest
import torch

from mtpconvert.evidence import megatron_forward
from mtpconvert.evidence.differences import TOLERANCES, differences
from mtpconvert.evidence.megatron_checkpoint import open_megatron
from mtpconvert.evidence.parity import ParityOptions, parity
from tests.support.family_references import trunk_and_mtp
from tests.support.family_tables import CASES, transformers_shapes, write_case
from tests.support.frameworks_convert import to_mcore
from tests.support.mcore_cpu import version

LENGTH = 24
INSTALLED = version().rpartition(".")[0]
RUNNABLE = {name: case for name, case in CASES.items() if "local" in case.specs and INSTALLED not in case.unsupported}
MTP = [name for name, case in RUNNABLE.items() if case.depths and INSTALLED not in case.not_run]
TRUNK = [name for name, case in RUNNABLE.items() if case.trunk is transformers_shapes and not case.depths]


@pytest.mark.parametrize("name", TRUNK)
def test_trunk(name: str, tmp_path: Path) -> None:
    report = parity(write_case(name, tmp_path / "hf", fill="normal"), None, ParityOptions(length=LENGTH))
    assert report.trunk == "pass", report.first
    assert not report.apart


@pytest.mark.parametrize("name", MTP)
def test_trunk_and_mtp(name: str, tmp_path: Path) -> None:
    source = write_case(name, tmp_path / "hf", fill="normal")
    tokens = torch.randint(
        0, CASES[name].config()["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(7)
    )
    (tmp_path / "renamed").mkdir()
    wanted = trunk_and_mtp(source, tmp_path / "renamed", tokens)
    ours = open_megatron(to_mcore(source, tmp_path / "mcore", spec="local"), dtype="float32")
    found, apart = differences(wanted, megatron_forward.trace(ours.model, tokens))
    assert not apart
    assert {one.depth for one in found} == set(range(CASES[name].depths + 1))
    assert [one.point for one in found if not one.within(TOLERANCES["float32"])] == []
