"""What a path is: a Hugging Face directory, a Megatron checkpoint, or something that is refused by name.

Looks at names and at the first bytes of small files only; whether the contents are in order is the readers' business.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from mtpconvert.errors import CheckpointError, ConfigError, IncompleteError, UsageError, some
from mtpconvert.stores.state_dicts import PICKLED

TRACKER = "latest_checkpointed_iteration.txt"  # megatron/training/checkpointing.py:get_checkpoint_tracker_filename
ASSETS = "hf_assets"  # beside the iteration folders: side files of the Hugging Face directory, no weights
HEADERS = "mtpconvert/shard_headers"  # in ASSETS
_LFS = b"version https://git-lfs"
_LFS_SIZE = 1024  # the git-LFS specification's bound for a pointer file
_MEGATRON_KEY = b"model.module."


@dataclass(frozen=True, slots=True)
class Found:
    """``kind``: "hf" (a Hugging Face directory) or "torch_dist" (a Megatron checkpoint; ``iteration_dir`` holds its
    ``.metadata``). ``root``: the path as given. ``assets``: the ``hf_assets`` directory, if there is one."""

    kind: str
    root: Path
    iteration_dir: Path | None = None
    assets: Path | None = None


def detect(path: Path) -> Found:
    """Say what ``path`` is.

    Raises UsageError when nothing is there, ConfigError for weights without config.json, IncompleteError when a
    Megatron tracker or an unfinished save points to what is not there, CheckpointError for what cannot be read here.
    """
    if not path.exists():
        looks_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None
        raise UsageError(
            f"{path} does not exist",
            next_step="if it is a model id, download it first (hf download), then give its directory"
            if looks_hub
            else "check the path",
        )
    if not path.is_dir():
        raise _file(path)
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be listed: {error.strerror}", where=str(path), next_step="check its permissions"
        ) from None

    weights = [name for name in names if name.endswith(".safetensors")]
    hf = bool(weights) or any(name.endswith(".safetensors.index.json") for name in names)
    tracked = TRACKER in names
    if not weights and (path / HEADERS).is_dir():
        raise CheckpointError(
            f"{path.name} holds the side files of a converted checkpoint, and no weights",
            where=str(path),
            next_step=f"give the Megatron checkpoint that it belongs to: {path.parent}",
        )
    iteration = _is_iteration(path, names)
    if weights and (tracked or iteration):
        raise CheckpointError(
            f"{path.name} holds both Hugging Face weights ({some(weights)}) and a Megatron checkpoint",
            where=str(path),
            next_step="move one of the two into a directory of its own",
        )
    if tracked:
        return Found("torch_dist", path, _tracked(path), _assets(path))
    if iteration:
        return Found("torch_dist", path, _iteration(path, names), _assets(path) or _assets(path.parent))
    if hf:
        return _hugging_face(path, names, weights)
    raise _neither(path, names)


def _hugging_face(path: Path, names: list[str], weights: list[str]) -> Found:
    pointers = [name for name in weights if _is_lfs_pointer(path / name)]
    if pointers:
        raise CheckpointError(
            f"{len(pointers)} of {len(weights)} weight files are git-LFS pointers, not weights: {some(pointers)}",
            where=str(path),
            next_step="run 'git lfs pull' there, or download the files",
        )
    if "config.json" not in names:
        adapter = "adapter_config.json" in names
        raise ConfigError(
            f"{path.name} is a PEFT adapter, not a model" if adapter else f"{path.name} has weights but no config.json",
            where=str(path),
            next_step="merge the adapter into its base model first"
            if adapter
            else "copy the model's config.json there",
        )
    return Found("hf", path)


def _is_iteration(folder: Path, names: list[str]) -> bool:
    """Whether something in ``folder`` is Megatron's alone; a ``metadata.json`` can be anyone's."""
    if ".metadata" in names or any(name.endswith(".distcp") or name.startswith("mp_rank_") for name in names):
        return True
    return "metadata.json" in names and b"sharded_backend" in (folder / "metadata.json").read_bytes()


def _tracked(root: Path) -> Path:
    """The iteration folder that the tracker of ``root`` names."""
    tracker = root / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{TRACKER} cannot be read: {error}", where=str(tracker), next_step="give an iteration's folder instead"
        ) from None
    if text != "release" and not re.fullmatch(r"[0-9]+", text):
        raise CheckpointError(
            f"{TRACKER} says {text[:40]!r}, neither 'release' nor a number",
            where=str(tracker),
            next_step="write the number of the iteration to read into it, or give that iteration's folder",
        )
    folder = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        others = sorted(p.name for p in root.iterdir() if p.is_dir() and (p / "metadata.json").exists())
        raise IncompleteError(
            f"{TRACKER} says {text}, but there is no folder {folder.name}",
            where=str(root),
            next_step=f"give one of the folders that are there: {some(others)}" if others else "copy that folder too",
        )
    return _iteration(folder, sorted(entry.name for entry in folder.iterdir()))


def _iteration(folder: Path, names: list[str]) -> Path:
    """``folder`` if it is a torch_dist iteration; the refusal of the other formats and of unfinished ones."""
    where = str(folder)
    if any(name.startswith("mp_rank_") for name in names):
        raise CheckpointError(
            f"{folder.name} is a legacy 'torch' checkpoint (mp_rank_* folders), whose files are pickles",
            where=where,
            next_step="load it in Megatron-LM and save it with --ckpt-format torch_dist",
        )
    if "metadata.json" in names:
        backend = _backend(folder / "metadata.json")
        if backend != "torch_dist":
            raise CheckpointError(
                f"{folder.name} is a {backend!r} checkpoint of Megatron-Core, not a torch_dist one",
                where=where,
                next_step="load it with the Megatron-Core that wrote it and save it with --ckpt-format torch_dist",
            )
        if ".metadata" not in names:
            raise IncompleteError(
                f"{folder.name} has no .metadata, which a save writes last: the save did not finish",
                where=where,
                next_step="take an earlier iteration",
            )
        return folder
    if ".metadata" in names:
        fsdp = _MEGATRON_KEY in (folder / ".metadata").read_bytes()
        raise CheckpointError(
            f"{folder.name} has .metadata but no metadata.json: "
            + ("an fsdp_dtensor checkpoint of Megatron-FSDP" if fsdp else "fsdp_dtensor, torch_dcp or plain torch DCP"),
            where=where,
            next_step="load it in Megatron-LM and save it with --ckpt-format torch_dist",
        )
    raise IncompleteError(
        f"{folder.name} has neither .metadata nor metadata.json: the save or the copy did not finish",
        where=where,
        next_step="copy hidden files too (.metadata), or take an earlier iteration",
    )


def _backend(path: Path) -> str:
    """``sharded_backend`` of a ``metadata.json`` (megatron/core/dist_checkpointing/core.py:CheckpointingConfig)."""
    try:
        backend = json.loads(path.read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(
            "metadata.json names no sharded_backend", where=str(path), next_step="copy or save the checkpoint again"
        ) from None
    return str(backend)[:40]


def _file(path: Path) -> CheckpointError:
    """The refusal of a path that is a file."""
    suffix = path.suffix
    if _is_lfs_pointer(path):
        kind, next_step = "a git-LFS pointer, not the file it stands for", "run 'git lfs pull', or download the file"
    elif suffix == ".safetensors":
        kind, next_step = "a single weights file", f"give its directory, with config.json in it: {path.parent}"
    elif suffix == ".gguf":
        kind, next_step = "a GGUF file", "use the safetensors checkpoint that it was made from"
    elif suffix == ".nemo":
        kind, next_step = "a NeMo archive", "export it with NeMo to Hugging Face or torch_dist first"
    elif suffix in (".bin", ".pt", ".pth"):
        kind, next_step = "a PyTorch pickle", "save the model with safe_serialization=True and give its directory"
    elif path.name in (TRACKER, ".metadata", "metadata.json", "config.json") or suffix == ".distcp":
        kind, next_step = "one file of a checkpoint", f"give its directory: {path.parent}"
    else:
        kind, next_step = "a file, not a checkpoint directory", "give a Hugging Face or a Megatron directory"
    return CheckpointError(f"{path.name} is {kind}", where=str(path), next_step=next_step)


def _neither(path: Path, names: list[str]) -> CheckpointError:
    """The refusal of a directory that has neither safetensors files nor a Megatron checkpoint directly in it."""
    where = str(path)
    pickles = [name for name in names if PICKLED.fullmatch(name)]
    gguf = [name for name in names if name.endswith(".gguf")]
    zarr = [name for name in names if (path / name / ".zarray").exists()]
    if pickles:
        what = f"{path.name} has PyTorch pickles only ({some(pickles)}), which can run code when they are read"
        next_step = "save the model with safe_serialization=True, or take the revision that has safetensors files"
    elif gguf:
        what = f"{path.name} has GGUF files only ({some(gguf)})"
        next_step = "use the safetensors checkpoint that they were made from"
    elif zarr:
        what = f"{path.name} is a zarr checkpoint of an old Megatron-Core ({some(zarr)})"
        next_step = "load it with the Megatron-Core that wrote it and save it with --ckpt-format torch_dist"
    elif {"weights", "context"} <= set(names) or any(name.endswith(".nemo") for name in names):
        what = f"{path.name} is a NeMo checkpoint"
        next_step = "export it with NeMo to Hugging Face first"
    else:
        inner = [n for n in names if (path / n).is_dir() and _promising(path / n)]
        what = f"{path.name} is neither a Hugging Face directory (*.safetensors) nor a Megatron checkpoint ({TRACKER})"
        next_step = f"perhaps you mean a folder in it: {some(inner)}" if inner else "check the path"
    return CheckpointError(what, where=where, next_step=next_step)


def _promising(folder: Path) -> bool:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return False
    return TRACKER in names or _is_iteration(folder, names) or any(name.endswith(".safetensors") for name in names)


def _assets(folder: Path) -> Path | None:
    return folder / ASSETS if (folder / ASSETS).is_dir() else None


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS and path.stat().st_size < _LFS_SIZE
    except OSError:
        return False  # the reader of the file reports that
