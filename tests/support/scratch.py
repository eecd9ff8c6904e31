"""Folders in memory: these tests write thousands of small files and sync each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, removed at the end; on disk where there is no /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="mtpconvert-test-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def memory() -> Iterator[Path]:
    with scratch() as folder:
        yield folder
