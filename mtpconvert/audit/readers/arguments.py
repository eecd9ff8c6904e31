"""The arguments that a Megatron checkpoint was trained with, from ``common.pt`` or the ``common_state`` object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtpconvert.audit.readers.pickles import Inert
from mtpconvert.audit.readers.records import read_archive
from mtpconvert.errors import CheckpointError


def arguments_of(folder: Path, where: dict[Any, tuple[str, int, int]]) -> dict[str, Any] | None:
    """``args`` as a plain dict of what is a number, string, list or None; None where the checkpoint carries none."""
    common = folder / "common.pt"
    place = next((value for (name, _), value in where.items() if name.startswith("common_state/")), None)
    try:
        if common.is_file():
            graph, _ = read_archive(common, 0, common.stat().st_size)
        elif place is not None:
            graph, _ = read_archive(folder / place[0], place[1], place[2])
        else:
            return None
    except CheckpointError:
        if common.is_file():
            raise
        return None  # the object of a lost file: the file itself is reported by its own check
    return plain_arguments(graph)


def plain_arguments(graph: Any) -> dict[str, Any] | None:
    """Find ``args`` in an unpickled common dict (some writers wrap it in a list) and keep its plain values."""
    while isinstance(graph, list) and len(graph) == 1:
        graph = graph[0]
    args = graph.get("args") if isinstance(graph, dict) else None
    fields = args.fields() if isinstance(args, Inert) else args
    if not isinstance(fields, dict) or not fields:
        return None
    return {str(key): value for key, value in fields.items() if _plain(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
