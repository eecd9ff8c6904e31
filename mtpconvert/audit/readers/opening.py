"""What kind of checkpoint a path holds, and the Side for it."""

from __future__ import annotations

import re
from pathlib import Path

from mtpconvert.audit.readers.headers import Seen
from mtpconvert.audit.readers.huggingface import open_huggingface
from mtpconvert.audit.readers.side import Side
from mtpconvert.errors import CheckpointError

WEIGHTS = re.compile(r"(?:pytorch_model|model|consolidated|medusa_lm_head)(?:[-.]\d+(?:-of-\d+)?)?\.(?:bin|pt|pth)")
_LATEST = "latest_checkpointed_iteration.txt"


def open_side(path: Path, label: str, seen: Seen | None = None) -> Side:
    """A Hugging Face directory (safetensors, else files of ``torch.save``), a Megatron root, one iteration of it, or
    GGUF (a file, or the folder of a split one). CheckpointError says what was looked for.

    ``seen``: what the files of the other side said.
    """
    if is_gguf(path):
        from mtpconvert.audit.readers.gguf import open_gguf

        return open_gguf(path, label)
    if not path.is_dir():
        raise CheckpointError("no such directory", where=str(path), next_step="audits read local directories only")
    folder = _iteration(path)
    if (folder / ".metadata").is_file():
        from mtpconvert.audit.readers.torch_dist import open_torch_dist

        return open_torch_dist(folder, label)
    if any(folder.glob("mp_rank_*")):
        raise CheckpointError(
            "a checkpoint of the torch format (mp_rank_*), which the auditor does not read",
            where=str(folder),
            next_step="audit the torch_dist form, or the Hugging Face directory that mcore2hf makes of it",
        )
    if is_torch_files(path):
        from mtpconvert.audit.readers.torch_files import open_torch_files

        return open_torch_files(path, label, seen)
    if folder == path:
        return open_huggingface(path, label, seen)
    raise CheckpointError(
        "no torch_dist or torch checkpoint here", where=str(folder), next_step="was the save interrupted?"
    )


def is_gguf(path: Path) -> bool:
    """A GGUF file, or a folder that has some and no safetensors."""
    if path.is_file():
        return path.suffix == ".gguf"
    return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))


def is_torch_files(path: Path) -> bool:
    """A folder with files of ``torch.save`` under the names of weights, and neither safetensors nor a tracker."""
    others = any(path.glob("*.safetensors*")) or (path / _LATEST).exists() or (path / ".metadata").exists()
    return path.is_dir() and not others and any(WEIGHTS.fullmatch(file.name) for file in path.iterdir())


def _iteration(root: Path) -> Path:
    """The folder that the tracker file of a Megatron root points to; ``root`` itself where there is no tracker."""
    tracker = root / _LATEST
    if not tracker.is_file():
        return root
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not re.fullmatch(r"\d+", text):
        raise CheckpointError(
            f"it says {text!r}, neither a number nor 'release'",
            where=str(tracker),
            next_step="give the folder of one iteration",
        )
    folder = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise CheckpointError(
            f"it points to {folder.name}, which is not there",
            where=str(tracker),
            next_step="give the folder of an iteration that is there",
        )
    return folder
