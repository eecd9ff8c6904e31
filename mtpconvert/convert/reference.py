"""The reference of ``mcore2hf``: the Hugging Face checkpoint whose names, files and side files shall come back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpconvert.convert.assets import ASIDE, OLD_ASIDE, ORIGINALS, SCALES
from mtpconvert.convert.configs import read_config
from mtpconvert.convert.packings import CONFIG_KEYS
from mtpconvert.errors import CheckpointError, ConfigError, UnmappedTensorError, UsageError
from mtpconvert.mapping.model import Mapping as MappingFile
from mtpconvert.stores.detect import ASSETS, HEADERS, detect
from mtpconvert.stores.safetensors.layout import SafetensorsLayout
from mtpconvert.stores.safetensors.reader import SafetensorsReader, load_layout
from mtpconvert.tensors import Inventory

WANTED = "the HF directory, or the hf2mcore output, that training started from"


@dataclass(frozen=True)
class Reference:
    """Where the HF side's shape comes from. ``folder``: its side files. ``layout``: None without weights.

    ``asides``, ``scales``, ``originals``: readers of the tensors that Megatron has no place for. ``own``: the
    checkpoint's own ``hf_assets``, where the reference is another folder and lacks one of them.
    """

    folder: Path
    layout: SafetensorsLayout | None
    asides: SafetensorsReader | None
    scales: SafetensorsReader | None
    originals: SafetensorsReader | None
    own: Reference | None = None

    @property
    def before(self) -> Inventory:
        """The tensors that the HF side had, by the reference or else by ``own``; empty where neither says."""
        layout = self.own.layout if self.layout is None and self.own is not None else self.layout
        return {} if layout is None else layout.inventory()


def find_reference(given: Path | None, assets: Path | None, source: Path) -> Reference:
    """``given`` is what ``--reference`` names, ``assets`` the ``hf_assets`` of the checkpoint ``source``."""
    folder = assets if given is None else _given_reference(given)
    if folder is None:
        raise CheckpointError(
            "this Megatron checkpoint carries no hf_assets, as every one that training saved",
            where=str(source),
            next_step=f"pass --reference: {WANTED}",
        )
    reference = _opened(folder)
    if assets is None or assets.resolve() == folder.resolve() or not (assets / HEADERS).is_dir():
        return reference
    lacking = None in (reference.asides, reference.scales, reference.originals)
    return replace(reference, own=_opened(assets)) if lacking else reference


def _opened(folder: Path) -> Reference:
    if not (folder / "config.json").is_file():
        raise ConfigError("there is no config.json in the reference", where=str(folder), next_step=f"give {WANTED}")
    if (folder / HEADERS).is_dir():
        asides, scales, originals = (_kept(folder, *names) for names in ((ASIDE, OLD_ASIDE), (SCALES,), (ORIGINALS,)))
        return Reference(folder, load_layout(folder / HEADERS), asides, scales, originals)
    names = [entry.name for entry in folder.iterdir()]
    if any(".safetensors" in name for name in names):
        detect(folder)  # refuses pointer files, missing config and the like by name
        reader = SafetensorsReader(folder)
        return Reference(folder, reader.layout, reader, reader, reader)
    return Reference(folder, None, None, None, None)


def _kept(folder: Path, *names: str) -> SafetensorsReader | None:
    """The first of the folders ``names`` that is there."""
    return next((SafetensorsReader(folder / name) for name in names if (folder / name).is_dir()), None)


def completed(reference: Reference, mapping: MappingFile, config: Mapping[str, Any]) -> tuple[Reference, list[str]]:
    """``reference`` with what it lacks from the checkpoint's own ``hf_assets``, where those are of the same model; and
    what is to be said of that. ``config``: of the reference."""
    own = reference.own
    if own is None:
        return reference, []
    if why := _another_model(mapping, config, read_config(own.folder)):
        return without_own(reference, why)
    filled = replace(
        reference,
        asides=reference.asides or own.asides,
        scales=reference.scales or own.scales,
        originals=reference.originals or own.originals,
    )
    return filled, []


def without_own(reference: Reference, why: str) -> tuple[Reference, list[str]]:
    """``reference`` without the checkpoint's ``hf_assets``, and a note of why."""
    assert reference.own is not None
    return replace(reference, own=None), [f"nothing is taken from {reference.own.folder}: {why}"]


def other_parts(mapping: MappingFile, config: Mapping[str, Any]) -> list[str]:
    """Keys of config.json that describe another part of the model than the language model (``vision_config``)."""
    if not mapping.passthrough:
        return []
    ours = (mapping.text, *CONFIG_KEYS)
    return [
        key for key, value in config.items() if key.endswith("_config") and isinstance(value, dict) and key not in ours
    ]


def _another_model(mapping: MappingFile, config: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Why ``hf_assets`` are of another model than ``config``; None if they are not, as far as configs say."""
    if config.get("architectures") != own.get("architectures"):
        return f"its architectures are {own.get('architectures')}, the reference's {config.get('architectures')}"
    for key in other_parts(mapping, config):
        there = own.get(key)
        if not isinstance(there, dict):
            return f"its config.json has no {key}"
        if other := _other_number(config[key], there):
            return f"its config.json says another {key}.{other}"
    return None


def _other_number(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    """The first whole number that both tables have and disagree about: sizes, and no key that a version added."""
    for key, value in one.items():
        other = two.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if inner := _other_number(value, other):
                return f"{key}.{inner}"
        elif type(value) is int and type(other) is int and value != other:
            return key
    return None


def refuse_lost_parts(
    reference: Reference, mapping: MappingFile, config: Mapping[str, Any], notes: Iterable[str]
) -> None:
    """Raise UnmappedTensorError where config.json has another part and nothing says what its tensors are.

    ``notes``: why ``hf_assets`` do not count."""
    if reference.before:
        return  # names every one of them, or shows that there were none
    if parts := other_parts(mapping, config):
        raise UnmappedTensorError(
            f"config.json has a {' and a '.join(parts)}, whose tensors ({', '.join(mapping.passthrough)}*) Megatron has"
            " no place for, and the reference has no weights to take them from"
            + "".join(f"; {note}" for note in notes),
            where=str(reference.folder),
            next_step=f"pass --reference: {WANTED}; or one whose config.json is the language model's alone",
        )


def layout_notes(reference: Reference, variants: Mapping[str, str], asides: Collection[str]) -> list[str]:
    """What is said where a reference without weights leaves open what the HF side shall look like."""
    if reference.layout is not None:
        return []
    if reference.own is not None:
        words = f"; {len(asides)} tensors that Megatron has no place for come from there" if asides else ""
        return [f"the reference has no weights: names are as {reference.own.folder} lists them{words}"]
    chosen = sorted({f"{place.partition(' @ ')[0]} as {group}" for place, group in variants.items()})
    if not chosen:
        return []
    return [
        f"the reference has no weights whose names say how they were kept: {', '.join(chosen)}, which the mapping lists"
        " first; a reference with weights decides"
    ]


def _given_reference(given: Path) -> Path:
    """The folder with config.json and side files that ``--reference`` names: a Megatron checkpoint has it inside, one
    of its iterations beside itself."""
    if not given.is_dir():
        raise UsageError("the reference is no directory", where=str(given), next_step=f"give {WANTED}")
    beside = given.parent / ASSETS if (given / ".metadata").exists() else given
    return next((folder for folder in (given / ASSETS, beside) if folder.is_dir()), given)
