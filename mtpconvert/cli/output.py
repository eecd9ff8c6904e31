"""What commands print: the MTP line, notes, JSON, progress. stdout is for results, stderr for everything else."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtpconvert.errors import TargetError

if TYPE_CHECKING:
    from mtpconvert.mapping.mtp import MtpCount


def mtp_line(mtp: MtpCount, *, writes: bool = True, parts: str = "MTP layers") -> str:
    """The line that every command ends with. ``parts``: what ``inspect`` calls draft parts of another kind."""
    declared = "nothing" if mtp.declared is None else str(mtp.declared)
    key = f" ({mtp.key})" if mtp.key else ""
    written = f", written {mtp.written}" if writes else ""
    found = f"declared {declared}{key}, present {mtp.present}"
    if mtp.published_none:
        found = f"declared {declared}, published none{key}"
    return f"{parts}: {found}{written}; {mtp.tensors} tensors, {mtp.nbytes:,} bytes"


def mtp_json(mtp: MtpCount) -> dict[str, Any]:
    return {
        "key": mtp.key,
        "declared": mtp.declared,
        "present": mtp.present,
        "written": mtp.written,
        "tensors": mtp.tensors,
        "bytes": mtp.nbytes,
    }


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))


def print_notes(notes: list[str]) -> None:
    for note in notes:
        click.echo(f"note: {note}", err=True)


def refuse_missing_folder(file: Path) -> None:
    """Raise TargetError where the folder of ``file`` is not there; before the work that the file is to tell of."""
    if not file.parent.is_dir():
        raise TargetError("the folder for this file does not exist", where=str(file), next_step="create it")


def write_file(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TargetError(
            f"{file.name} cannot be written: {error.strerror}", where=str(file), next_step="check its folder and rights"
        ) from error


Advance = Callable[[int, str], None]


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A bar of bytes, rate, time left and the tensor at hand; nothing at all where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _count, _name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    lock = threading.Lock()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(count: int, name: str) -> None:
            with lock:
                bar.update(task, advance=count, description=name)

        yield advance
