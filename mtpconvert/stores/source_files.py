"""Bytes of source files, read whole or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mtpconvert.errors import CheckpointError, IncompleteError
from mtpconvert.stores.durable import OpenFiles


class SourceFiles(OpenFiles):
    """Numbered files to read from, by any thread."""

    def __init__(self, path: Callable[[int], Path]) -> None:
        super().__init__(path, os.O_RDONLY)

    def read(self, file: int, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``. Raises as ``read_exactly``, and IncompleteError for a file that is gone."""
        try:
            descriptor = self.get(file)
        except OSError as error:
            raise IncompleteError(
                f"the file cannot be opened: {error.strerror}",
                where=str(self._path(file)),
                next_step="it was there when the run began: is another process moving or deleting files?",
            ) from error
        read_exactly(descriptor, buffer, offset)


def read_exactly(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``offset``. Raises IncompleteError where the file ends before, CheckpointError where the
    disk fails."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"byte {offset + done} cannot be read: {error.strerror}",
                where=_name(descriptor),
                next_step="check the disk that the source is on",
            ) from error
        if count == 0:
            raise IncompleteError(
                f"the file ends at byte {offset + done}, {len(buffer) - done} bytes before the end of a tensor's data",
                where=_name(descriptor),
                next_step="the file was truncated after it was opened, or another process is writing it",
            )
        done += count


def _name(descriptor: int) -> str | None:
    """The path of an open file, where the system tells."""
    link = Path(f"/proc/self/fd/{descriptor}")
    return str(link.readlink()) if link.is_symlink() else None
