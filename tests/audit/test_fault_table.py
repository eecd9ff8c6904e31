"""Every fault of the table, in every family: it changed something, and was refused or found, on the right tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fault_model import Models, Outcome
from tests.support.fault_table import ENTRIES, SNAPSHOT, Entry, models, render

CASES = [(entry, family) for entry in ENTRIES for family in entry.families]
_outcomes: dict[tuple[str, str, str], Outcome] = {}


@pytest.fixture(scope="module")
def made() -> Iterator[Models]:
    with models() as tiny:
        yield tiny


def outcome(made: Models, entry: Entry, family: str) -> Outcome:
    key = (entry.where, entry.name, family)
    if key not in _outcomes:
        _outcomes[key] = entry.make(made, family)
    return _outcomes[key]


def test_the_table_is_large_enough() -> None:
    assert len({(entry.where, entry.name) for entry in ENTRIES}) == len(ENTRIES) >= 60
    assert sum(entry.mtp for entry in ENTRIES) >= 15


@pytest.mark.parametrize(("entry", "family"), CASES, ids=[f"{e.where}: {e.name}, {f}" for e, f in CASES])
def test_a_fault_is_refused_or_found(made: Models, entry: Entry, family: str) -> None:
    found = outcome(made, entry, family)
    assert bool(found.converter) != bool(found.bits)
    assert not found.bits.startswith("MISSED"), found.bits


def test_the_snapshot_stands(made: Models) -> None:
    """Lowered or raised, what the checks find changes only together with docs/fault-table.md."""
    every = {(entry.where, entry.name, family): outcome(made, entry, family) for entry, family in CASES}
    assert render(every) == SNAPSHOT.read_text(encoding="utf-8"), "python -m tests.support.fault_table writes it anew"
