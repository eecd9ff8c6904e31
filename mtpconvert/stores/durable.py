"""Bytes that stay written: whole writes and syncs, for the stores and for whoever fills their files."""

from __future__ import annotations

import os
from pathlib import Path


def write_exactly(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset``, in as many calls as it takes. Raises OSError."""
    view = memoryview(content)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
