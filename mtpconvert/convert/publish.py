"""Nothing appears under its final name until it is complete: build beside it, sync, rename."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtpconvert.errors import AuditFailedError, CheckpointError, MtpConvertError, TargetError, UsageError
from mtpconvert.stores.durable import sync, target_error


class Staging:
    """A directory beside ``target`` in which the target is built. ``publish`` renames it; otherwise it is removed."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.partial")
        self.failed_path = target.with_name(f"{target.name}.failed")
        self.replaced_path = target.with_name(f".{target.name}.replaced")
        self.published = False
        self._overwrite = overwrite

    def publish(self) -> None:
        """Give the finished directory its final name, replacing what stood there if that was asked for."""
        old = self.replaced_path
        if exists(self.target):
            _refuse_existing(self.target, self._overwrite)
            self.target.rename(old)
            try:
                self.path.rename(self.target)
            except BaseException:
                old.rename(self.target)
                raise
        else:
            self.path.rename(self.target)
        self.published = True
        sync(self.target.parent)
        if exists(old):
            remove(old)

    def clean(self) -> None:
        """Undo what a run that was killed left beside the target; only for the holder of the lock.

        The target that it was about to replace gets its name back, unless the new one already has it.
        """
        if exists(self.replaced_path):
            if exists(self.target):
                remove(self.replaced_path)
            else:
                self.replaced_path.rename(self.target)
        if exists(self.path):
            remove(self.path)

    def set_failed(self) -> Path:
        """Keep the directory as ``<target>.failed`` for a person to look at; the final name stays as it was."""
        if exists(self.failed_path):
            remove(self.failed_path)
        self.path.rename(self.failed_path)
        return self.failed_path


def exists(path: Path) -> bool:
    """Whether anything has this name, a broken link included."""
    return path.exists() or path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file, a link (not what it points to) or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def refuse_overlap(target: Path, source: Path, *, inside: bool) -> None:
    """Raise UsageError where writing ``target`` would remove ``source``, or, unless ``inside``, change a folder in it.

    A Hugging Face directory may not hold the target: what lies in it is carried as side files.
    """
    one, other = target.resolve(), source.resolve()
    if other.is_relative_to(one) or (not inside and one.is_relative_to(other)):
        raise UsageError(
            "the target would replace what is read" if other.is_relative_to(one) else "the target is inside the source",
            where=f"{target} and {source}",
            next_step="choose a target beside it",
        )


@contextmanager
def staged(target: Path, *, overwrite: bool, needed: int) -> Iterator[Staging]:
    """A Staging whose disk has room for ``needed`` bytes; whatever is not published is removed on the way out.

    Only what an audit rejected (AuditFailedError) is kept, as ``<target>.failed``.

    Raises UsageError where the target exists or another run is building it, TargetError where there is no room.
    """
    target = target.absolute()
    if not target.name or target.name == "..":
        raise UsageError(
            "the target needs a name of its own", where=str(target), next_step="give a folder that is not there yet"
        )
    _refuse_existing(target, overwrite)
    staging = Staging(target, overwrite)
    if not target.parent.is_dir():
        raise TargetError("the folder for the target does not exist", where=str(target.parent), next_step="create it")
    with _lock(staging):
        try:
            staging.clean()
            _refuse_existing(target, overwrite)
            _check_room(target.parent, needed)
            staging.path.mkdir()
            yield staging
        except AuditFailedError as error:
            error.where = str(staging.set_failed())
            raise
        except OSError as error:
            raise io_error(error, staging) from error
        finally:
            if not staging.published and staging.path.exists():
                shutil.rmtree(staging.path, ignore_errors=True)


def io_error(error: OSError, staging: Staging) -> MtpConvertError:
    """The refusal for an OSError while ``staging`` is built: of the source, if the error names a file elsewhere."""
    named = Path(str(error.filename2 or error.filename or staging.path))  # copyfile: from filename to filename2
    ours = any(named.is_relative_to(path) for path in (staging.path, staging.target, staging.replaced_path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or ours:
        return target_error(error, named if ours else staging.path)
    return CheckpointError(
        f"{named.name} cannot be read: {error.strerror}", where=str(named), next_step="check the file and its rights"
    )


@contextmanager
def _lock(staging: Staging) -> Iterator[None]:
    """Hold a lock that the kernel drops when the process dies, so that a killed run leaves nothing locked."""
    path = staging.target.with_name(f".{staging.target.name}.lock")
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise target_error(error, path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UsageError(
                "another mtpconvert is building this target",
                where=str(staging.path),
                next_step="wait for it, or stop it",
            ) from error
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)  # the run before removed the file between our two calls
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if exists(target) and not overwrite:
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


def sync_tree(folder: Path) -> None:
    """Sync every file and folder below and including ``folder``."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))
