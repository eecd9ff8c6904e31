"""The reference of ``mcore2hf``: the Hugging Face checkpoint whose names, files and side files shall come back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtpconvert.convert.assets import ASIDE, ORIGINALS, SCALES
from mtpconvert.errors import CheckpointError, ConfigError, UsageError
from mtpconvert.stores.detect import ASSETS, HEADERS, detect
from mtpconvert.stores.safetensors.layout import SafetensorsLayout
from mtpconvert.stores.safetensors.reader import SafetensorsReader, load_layout

WANTED = "the HF directory, or the hf2mcore output, that training started from"


@dataclass(frozen=True)
class Reference:
    """Where the HF side's shape comes from. ``folder``: its side files. ``layout``: None without weights.

    ``asides``, ``scales``, ``originals``: readers of the tensors that Megatron has no place for.
    """

    folder: Path
    layout: SafetensorsLayout | None
    asides: SafetensorsReader | None
    scales: SafetensorsReader | None
    originals: SafetensorsReader | None


def find_reference(given: Path | None, assets: Path | None, source: Path) -> Reference:
    folder = assets if given is None else _given_reference(given)
    if folder is None:
        raise CheckpointError(
            "this Megatron checkpoint carries no hf_assets, as every one that training saved",
            where=str(source),
            next_step=f"pass --reference: {WANTED}",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError("there is no config.json in the reference", where=str(folder), next_step=f"give {WANTED}")
    if (folder / HEADERS).is_dir():
        kept = [
            SafetensorsReader(folder / own) if (folder / own).is_dir() else None for own in (ASIDE, SCALES, ORIGINALS)
        ]
        return Reference(folder, load_layout(folder / HEADERS), *kept)
    names = [entry.name for entry in folder.iterdir()]
    if any(".safetensors" in name for name in names):
        detect(folder)  # refuses pointer files, missing config and the like by name
        reader = SafetensorsReader(folder)
        return Reference(folder, reader.layout, reader, reader, reader)
    return Reference(folder, None, None, None, None)


def _given_reference(given: Path) -> Path:
    """The folder with config.json and side files that ``--reference`` names: a Megatron checkpoint has it inside, one
    of its iterations beside itself."""
    if not given.is_dir():
        raise UsageError("the reference is no directory", where=str(given), next_step=f"give {WANTED}")
    beside = given.parent / ASSETS if (given / ".metadata").exists() else given
    return next((folder for folder in (given / ASSETS, beside) if folder.is_dir()), given)
