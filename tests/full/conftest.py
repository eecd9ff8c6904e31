"""``make test-full``: the processes of the matrix, and the record of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.full import record
from tests.full.matrix import CELLS, Cell
from tests.full.sets import Seen, run_set
from tests.full.sources import Source
from tests.support.scratch import scratch

OUTCOMES = pytest.StashKey[dict[Cell, str]]()
BEGAN = pytest.StashKey[float]()


class Matrix:
    """The selected cells, set of processes after set; one set runs while the cells of the one before are checked."""

    def __init__(self, cells: list[Cell], root: Path) -> None:
        self.root = root
        self.sources = {
            family: Source(family, root / str(number))
            for number, family in enumerate(dict.fromkeys(cell.family for cell in cells))
        }
        self._sets: dict[tuple[str, int], list[Cell]] = {}
        for cell in cells:
            self._sets.setdefault((cell.version, cell.layout.world), []).append(cell)
        self._runner = ThreadPoolExecutor(max_workers=1)
        self._results: dict[tuple[str, int], Future[Any]] = {
            key: self._runner.submit(run_set, own, self.sources, self._folder(key)) for key, own in self._sets.items()
        }

    def _folder(self, key: tuple[str, int]) -> Path:
        return self.root / f"{key[0]} world {key[1]}"

    def seen(self, cell: Cell) -> tuple[list[Seen] | str, Path]:
        """What each rank saw, or an error; and the folder that the model was saved to."""
        key = (cell.version, cell.layout.world)
        return self._results[key].result()[cell], self._folder(key) / str(self._sets[key].index(cell))

    def close(self) -> None:
        self._runner.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    cells = [item.callspec.params["cell"] for item in request.session.items]  # type: ignore[attr-defined]
    with scratch() as root:
        made = Matrix(cells, root)
        yield made
        made.close()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[OUTCOMES] = {}
    session.stash[BEGAN] = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.failed:
        wrong = "" if call.excinfo is None else str(call.excinfo.value).partition("\n")[0]
        item.session.stash[OUTCOMES][item.callspec.params["cell"]] = wrong or report.outcome  # type: ignore[attr-defined]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The record is one of the whole matrix, or none."""
    outcomes = session.stash[OUTCOMES]
    if outcomes.keys() == set(CELLS):
        record.write({cell: outcomes[cell] for cell in CELLS}, time.monotonic() - session.stash[BEGAN])
