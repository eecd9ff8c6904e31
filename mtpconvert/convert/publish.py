"""Nothing appears under its final name until it is complete: build beside it, sync, rename."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtpconvert.convert.execute import target_error
from mtpconvert.errors import AuditFailedError, TargetError, UsageError


class Staging:
    """A directory beside ``target`` in which the target is built. ``publish`` renames it; otherwise it is removed."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.partial")
        self.failed_path = target.with_name(f"{target.name}.failed")
        self.published = False
        self._overwrite = overwrite

    def publish(self) -> None:
        """Give the finished directory its final name, replacing what stood there if that was asked for."""
        old = self.target.with_name(f".{self.target.name}.replaced")
        if self.target.exists() or self.target.is_symlink():
            _refuse_existing(self.target, self._overwrite)
            self.target.rename(old)
            try:
                self.path.rename(self.target)
            except OSError:
                old.rename(self.target)
                raise
        else:
            self.path.rename(self.target)
        self.published = True
        sync_directory(self.target.parent)
        if old.exists():
            shutil.rmtree(old)

    def set_failed(self) -> Path:
        """Keep the directory as ``<target>.failed`` for a person to look at; the final name stays as it was."""
        if self.failed_path.exists():
            shutil.rmtree(self.failed_path)
        self.path.rename(self.failed_path)
        return self.failed_path


@contextmanager
def staged(target: Path, *, overwrite: bool, needed: int) -> Iterator[Staging]:
    """A Staging whose disk has room for ``needed`` bytes; whatever is not published is removed on the way out.

    Only what an audit rejected (AuditFailedError) is kept, as ``<target>.failed``.

    Raises UsageError where the target exists or another run is building it, TargetError where there is no room.
    """
    target = target.absolute()
    _refuse_existing(target, overwrite)
    staging = Staging(target, overwrite)
    if not target.parent.is_dir():
        raise TargetError("the folder for the target does not exist", where=str(target.parent), next_step="create it")
    with _lock(staging):
        if staging.path.exists():
            shutil.rmtree(staging.path)  # left by a run that was killed: the lock says that nobody builds it now
        _check_room(target.parent, needed)
        try:
            staging.path.mkdir()
            yield staging
        except AuditFailedError as error:
            error.where = str(staging.set_failed())
            raise
        except OSError as error:
            raise target_error(error, Path(error.filename or staging.path)) from error
        finally:
            if not staging.published and staging.path.exists():
                shutil.rmtree(staging.path, ignore_errors=True)


@contextmanager
def _lock(staging: Staging) -> Iterator[None]:
    """Hold a lock that the kernel drops when the process dies, so that a killed run leaves nothing locked."""
    path = staging.target.with_name(f".{staging.target.name}.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise target_error(error, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            "another mtpconvert is building this target", where=str(staging.path), next_step="wait for it, or stop it"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if (target.exists() or target.is_symlink()) and not overwrite:
        empty = target.is_dir() and not any(target.iterdir())
        raise UsageError(
            f"the target exists{' (an empty folder)' if empty else ''}",
            where=str(target),
            next_step="choose another name, or pass --overwrite: it is replaced only when the new one is complete",
        )


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TargetError(
            f"{needed:,} bytes are needed, {free:,} are free",
            where=str(folder),
            next_step="free space or choose another disk; nothing was written",
        )


def sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync every file and folder below and including ``folder``."""
    for root, _, files in os.walk(folder):
        for name in files:
            descriptor = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(root))
