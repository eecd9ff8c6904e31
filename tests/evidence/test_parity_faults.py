"""The parity table of docs/evidence.md is what parity says of the damaged conversions."""

from __future__ import annotations

import pytest

from tests.support.parity_faults import ARGUMENT_FAULTS, TRUNK_FAULTS, Row, documented, rows

FAILS = "**fails**"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return rows(tmp_path_factory.mktemp("faults"))


def test_every_fault_is_seen_and_the_original_passes(measured: list[Row]) -> None:
    unharmed = [row for row in measured if row.fault.startswith("none")]
    damaged = [row for row in measured if not row.fault.startswith("none")]
    for row in unharmed:
        assert (row.verdict, row.bfloat16, row.bits) == ("pass", "pass", "pass")
        assert row.trunk is not None and row.trunk < 1e-5
        assert row.mtp is not None and row.mtp < 1e-5
    assert (len(unharmed), len(damaged) >= 10) == (2, True)
    assert {row.verdict for row in damaged} == {FAILS, "**refused**: MtpLostError"}


def test_wrong_arguments_break_it(measured: list[Row]) -> None:
    """The weights are right in these; only what the model is built from is not."""
    found = {row.fault: row for row in measured if row.fault in ARGUMENT_FAULTS}
    assert found.keys() == ARGUMENT_FAULTS.keys()
    for name in ("norm_epsilon", "rotary_base", "qk_layernorm"):
        (row,) = [row for fault, row in found.items() if f"`{name}`" in fault]
        assert row.trunk is not None and row.trunk > 1000 * 1e-5, name


def test_the_first_point_that_departs_is_where_the_damage_is(measured: list[Row]) -> None:
    first = {row.fault: row.first for row in measured}
    assert first["halves of `eh_proj` exchanged"] == "MTP 1: eh_proj"
    assert first["gate and up of MTP's experts exchanged"] == "MTP 1: layer"
    assert first["GLM: halves of depth 2's `eh_proj` exchanged"] == "MTP 2: eh_proj"
    assert first["head norm of MTP the trunk's"] == "MTP 1: final norm"
    places = {"keys and values": "layer 1", "gate and up": "layer 0", "two experts": "layer 1"}
    for start, place in places.items():
        (fault,) = [fault for fault in TRUNK_FAULTS if fault.startswith(start)]
        assert first[fault] == place


def test_the_page_says_what_is_measured(measured: list[Row]) -> None:
    told = documented()
    assert [cells[:4] + cells[8:] for cells in told] == [
        [row.fault, row.bits, row.verdict, row.first, row.bfloat16] for row in measured
    ]
    for cells, row in zip(told, measured, strict=True):
        for cell, value in zip(cells[4:7], (row.trunk, row.mtp, row.kl), strict=True):
            assert (cell == "-") == (value is None), row.fault
            if value is not None and value > 1e-5:  # below: rounding, another on every machine
                assert value / 2 < float(cell) < value * 2, row.fault
        if row.greedy is not None:
            assert float(cells[7].rstrip("%")) / 100 == pytest.approx(row.greedy, abs=0.03), row.fault
