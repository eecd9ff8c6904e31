"""Side files: everything of a Hugging Face directory that is no weight, carried byte for byte through ``hf_assets/``.

hf_assets/                  the source's files as they are: config.json, tokenizer, remote code, licence, index
hf_assets/mtpconvert/       ours: shard headers, tensors set aside, manifest.json; never part of a restored directory
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from mtpconvert.errors import CheckpointError

ASSETS = "hf_assets"
OWN = "mtpconvert"
HEADERS = f"{OWN}/shard_headers"
ASIDE = f"{OWN}/aside"
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ckpt", ".npz",
    ".distcp",
)  # fmt: skip
_INDEX = ".index.json"


def side_files(folder: Path) -> list[Path]:
    """Relative paths of the files to carry: no weights, no indices of weights, no hidden folders (.git, .cache)."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder, followlinks=True):
        relative = Path(root).relative_to(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if relative == Path():
            folders[:] = [name for name in folders if name not in (OWN, ASSETS)]
        for name in folders:
            if Path(root).resolve().is_relative_to((Path(root) / name).resolve()):
                raise CheckpointError("this link leads back into its own folder", where=str(Path(root) / name))
        for name in sorted(files):
            if not name.endswith((*_WEIGHTS, _INDEX)):
                found.append(relative / name)
    return found


def copy_side_files(source: Path, target: Path) -> list[Path]:
    """Copy the side files of ``source`` into ``target``; links become files. Returns their relative paths.

    Raises CheckpointError where config.json's ``auto_map`` names a module that is not there.
    """
    files = side_files(source)
    check_remote_code(source, files)
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)
    return files


def check_remote_code(source: Path, files: list[Path]) -> None:
    """Every module that ``auto_map`` of a config names is among ``files``; nothing of it is ever imported."""
    config = source / "config.json"
    if Path("config.json") not in files:
        return
    auto_map = json.loads(config.read_text(encoding="utf-8")).get("auto_map") or {}
    for entry in auto_map.values():
        for reference in entry if isinstance(entry, list) else [entry]:
            if not isinstance(reference, str) or "--" in reference:
                continue  # null, or code of another repository
            module = Path(f"{reference.split('.')[0]}.py")
            if module not in files:
                raise CheckpointError(
                    f"config.json names the remote code {reference}, and {module} is not there",
                    where=str(config),
                    next_step="fetch the file, or remove the entry from auto_map",
                )


def write_manifest(assets: Path, manifest: dict[str, Any]) -> None:
    (assets / OWN).mkdir(parents=True, exist_ok=True)
    (assets / OWN / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
