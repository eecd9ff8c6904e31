"""Side files: everything of a Hugging Face directory that is no weight, carried byte for byte through ``hf_assets/``.

hf_assets/                  the source's files as they are: config.json, tokenizer, remote code, licence, index
hf_assets/passthrough/      ours: tensors of other modalities and what else a row sets aside
hf_assets/mtpconvert/       ours: shard headers, FP8 scales, originals, manifest.json; like passthrough/ never restored
                            as files
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtpconvert.errors import CheckpointError, some
from mtpconvert.stores.detect import HEADERS

OWN = HEADERS.partition("/")[0]
ASIDE = "passthrough"
OLD_ASIDE = f"{OWN}/aside"  # where earlier conversions put them
OURS = (OWN, ASIDE)  # names that no source may have
SCALES = f"{OWN}/scales"  # of block-scaled FP8 weights
ORIGINALS = f"{OWN}/originals"  # of tensors that a row's codec does not give back
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ckpt", ".npz",
    ".distcp",
)  # fmt: skip
_INDEX = ".index.json"
_BLOCK = 4096


def side_files(folder: Path) -> list[Path]:
    """Relative paths of the files to carry: no weights, no indices of weights, no hidden folders (.git, .cache)."""
    return [file for file in _files(folder) if not file.name.endswith((*_WEIGHTS, _INDEX))]


def left_out_notes(folder: Path) -> list[str]:
    """A sentence naming the files that are neither side files nor read: weights in another format or in a subfolder."""
    names = [
        str(file)
        for file in _files(folder)
        if file.name.endswith((*_WEIGHTS, _INDEX)) and not (file.parent == Path() and ".safetensors" in file.name)
    ]
    if not names:
        return []
    return [f"{len(names)} files are weights that are not converted, and are left out: {some(names, 10)}"]


def _files(folder: Path) -> list[Path]:
    """Relative paths of all files below ``folder``, hidden folders and what is ours in ``hf_assets`` left out.

    Raises CheckpointError for a link to a folder that it stands in.
    """
    found: list[Path] = []
    ours = (folder / HEADERS).is_dir()
    for root, folders, files in os.walk(folder, followlinks=True):
        relative = Path(root).relative_to(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if ours and relative == Path():
            folders[:] = [name for name in folders if name not in OURS]
        above = [(folder / parent).resolve() for parent in (relative, *relative.parents)]
        for name in folders:
            inner = (Path(root) / name).resolve()
            if any(one.is_relative_to(inner) for one in above):
                raise CheckpointError(
                    "this link leads back into its own folder",
                    where=str(Path(root) / name),
                    next_step="remove it, or convert a copy without it",
                )
        found += [relative / name for name in sorted(files)]
    return found


def checked_side_files(folder: Path) -> list[Path]:
    """The side files of ``folder``, after it is known that they can be carried; before any weight is moved.

    Raises CheckpointError for a broken link, what is no file, and an ``auto_map`` naming a module that is not there.
    """
    files = side_files(folder)
    for file in files:
        if not (folder / file).is_file() or not os.access(folder / file, os.R_OK):
            broken = (folder / file).is_symlink() and not (folder / file).exists()
            raise CheckpointError(
                f"{file} {'is a broken link' if broken else 'is no file that can be read'}",
                where=str(folder / file),
                next_step="remove it, or fetch what it points to" if broken else "check what it is and its rights",
            )
    check_remote_code(folder, files)
    return files


def room_for(sizes: Iterable[int]) -> int:
    """Bytes that files of these sizes take on a disk with blocks of 4 KiB, each with a folder of its own at worst."""
    return sum(-(-size // _BLOCK) * _BLOCK + _BLOCK for size in sizes)


def room_for_side_files(folder: Path, files: Iterable[Path]) -> int:
    return room_for((folder / file).stat().st_size for file in files)


def copy_side_files(source: Path, target: Path, files: list[Path] | None = None) -> None:
    """Copy ``files``, by default ``checked_side_files``, of ``source`` into ``target``; links become files."""
    for file in checked_side_files(source) if files is None else files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)


def check_remote_code(source: Path, files: list[Path]) -> None:
    """Every module that the ``auto_map`` of config.json, tokenizer_config.json and the like names is among ``files``.

    Nothing of it is ever imported.
    """
    for file in files:
        if len(file.parts) > 1 or not file.name.endswith("config.json"):
            continue
        for reference in _remote_code(source / file):
            module = Path(f"{reference.split('.')[0]}.py")
            if module not in files:
                raise CheckpointError(
                    f"{file} names the remote code {reference}, and {module} is not there",
                    where=str(source / file),
                    next_step="fetch the file, or remove the entry from auto_map",
                )


def _remote_code(config: Path) -> list[str]:
    """``module.Class`` of every entry of a config's auto_map that is code of its own repository."""
    try:
        table = json.loads(config.read_text(encoding="utf-8-sig"))
    except ValueError:
        return []  # carried byte for byte like any other file; whether it is JSON is its reader's business
    auto_map = table.get("auto_map") if isinstance(table, dict) else None
    if not isinstance(auto_map, dict):
        return []
    references = [one for entry in auto_map.values() for one in (entry if isinstance(entry, list) else [entry])]
    return [one for one in references if isinstance(one, str) and "--" not in one]


def write_manifest(assets: Path, manifest: dict[str, Any]) -> None:
    (assets / OWN).mkdir(parents=True, exist_ok=True)
    (assets / OWN / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
