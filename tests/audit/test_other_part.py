"""Vision beside a language model: counted, kept and compared, and never a fault of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpconvert.audit.api import audit
from tests.support.family_tables import write_case
from tests.support.frameworks_convert import to_mcore
from tests.support.sabotage import change_tensor, drop
from tests.support.scratch import scratch

KEPT = "hf_assets/mtpconvert/aside"
BIAS = "model.visual.merger.norm.bias"


@pytest.fixture
def pair() -> Iterator[tuple[Path, Path]]:
    with scratch() as root:
        write_case("Qwen3.5 with vision", root / "hf")
        to_mcore(root / "hf", root / "mcore")
        yield root / "hf", root / "mcore"


def test_all_kept(pair: tuple[Path, Path]) -> None:
    report = audit(*pair)
    assert report.verdict() == "pass"
    (note,) = [found for found in report.findings if found.code == "other-part"]
    assert note.message.startswith("21 tensors (")
    assert note.message.endswith(f"all are kept in {KEPT}, byte for byte")


def test_one_changed_and_one_lost(pair: tuple[Path, Path]) -> None:
    change_tensor(BIAS, lambda values: values ^ 1)(pair[1] / KEPT)
    (fault,) = [found for found in audit(*pair).findings if found.code == "kept-tensors"]
    assert (fault.tensor, "with other bytes" in fault.message) == (BIAS, True)
    drop(lambda name: name == BIAS)(pair[1] / KEPT)
    (fault,) = [found for found in audit(*pair).findings if found.code == "kept-tensors"]
    assert (fault.tensor, "not among the tensors kept" in fault.message) == (BIAS, True)


def test_none_kept(pair: tuple[Path, Path]) -> None:
    """As when the Megatron checkpoint was saved by training: said, and no fault."""
    for file in (pair[1] / KEPT).iterdir():
        file.unlink()
    (pair[1] / KEPT).rmdir()
    report = audit(*pair)
    assert report.verdict() == "pass"
    assert any(found.message.endswith(f"none are kept in {KEPT}") for found in report.findings)
