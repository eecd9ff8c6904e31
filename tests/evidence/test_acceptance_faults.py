"""The fault table of docs/evidence.md is what the damaged fixtures really show."""

from __future__ import annotations

import pytest

from tests.support.acceptance_faults import FAULTS, GLM_FAULTS, Row, documented, rows

TOLERANCE = 0.02  # of an accepted share: other kernels round otherwise, the page rounds to whole percents


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return rows(tmp_path_factory.mktemp("faults"))


def test_the_page_has_every_fault_with_its_verdicts(measured: list[Row]) -> None:
    assert len(FAULTS) + len(GLM_FAULTS) >= 10
    assert [(row.fault, row.headers, row.bits) for row in documented()] == [
        (row.fault, row.headers, row.bits) for row in measured
    ]


def test_the_page_has_the_acceptance_that_is_measured(measured: list[Row]) -> None:
    for said, found in zip(documented(), measured, strict=True):
        if said.by_position is None or found.by_position is None:
            assert said.by_position is found.by_position is None, said.fault
        else:
            assert said.by_position == pytest.approx(found.by_position, abs=TOLERANCE), said.fault


def test_bits_see_every_fault_and_acceptance_does_not(measured: list[Row]) -> None:
    """The lesson of the page: equality alone does not prove use, acceptance alone does not prove weights."""
    original, *others = measured
    damaged = [row for row in others if not row.fault.startswith("none")]
    assert all(row.bits == "**fails**" for row in damaged)
    assert original.by_position is not None
    unseen = [
        row.fault
        for row in damaged
        if row.by_position is not None and row.by_position[0] > original.by_position[0] - 0.03
    ]
    assert {"`enorm` and `hnorm` exchanged", "head norm of MTP the trunk's", "MTP's router bias zero"} <= set(unseen)
    seen = {row.fault: row.by_position[0] for row in damaged if row.by_position is not None}
    assert seen["halves of `eh_proj` exchanged"] < original.by_position[0] - 0.3
    assert seen["MTP layer freshly initialised"] < original.by_position[0] - 0.3
