"""Bytes that stay written: whole writes and syncs, for the stores and for whoever fills their files."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

from mtpconvert.errors import TargetError


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


class OpenFiles:
    """Descriptors of numbered files, opened when first asked for and shared by threads; positions are never used.

    After ``close`` a file that is asked for again is opened again.
    """

    def __init__(self, path: Callable[[int], Path], flags: int) -> None:
        self._path, self._flags = path, flags | os.O_CLOEXEC
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def get(self, file: int) -> int:
        """The descriptor. Raises OSError; a checkpoint may have more files than the system's soft limit, which is then
        raised as far as it goes."""
        with self._lock:
            if file not in self._open:
                try:
                    self._open[file] = os.open(self._path(file), self._flags)
                except OSError as error:
                    if error.errno != errno.EMFILE or not _more_descriptors():
                        raise
                    self._open[file] = os.open(self._path(file), self._flags)
            return self._open[file]

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()


def _more_descriptors() -> bool:
    """Raise this process's limit of open files to the hard one; whether that is more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


class TargetFiles(OpenFiles):
    """Files that exist at their full size, to be filled by any thread."""

    def __init__(self, path: Callable[[int], Path]) -> None:
        super().__init__(path, os.O_WRONLY)

    def write(self, file: int, content: bytes | memoryview, offset: int) -> None:
        """Write all of ``content``. Raises TargetError naming the file."""
        try:
            write_exactly(self.get(file), content, offset)
        except OSError as error:
            raise target_error(error, self._path(file)) from error

    def write_back(self, file: int, offset: int, nbytes: int) -> None:
        """Let the system begin to bring these bytes to the disk, so that the final sync has little left to do."""
        os.posix_fadvise(self.get(file), offset, nbytes, os.POSIX_FADV_DONTNEED)


def target_error(error: OSError, path: Path) -> TargetError:
    """The refusal for an OSError while writing ``path``."""
    step = "free space or choose another disk" if error.errno == errno.ENOSPC else "check the target's disk and rights"
    return TargetError(f"the target cannot be written: {error.strerror}", where=str(path), next_step=step)
