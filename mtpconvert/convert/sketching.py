"""``mappings new``: from a Hugging Face directory's headers to the text of a drafted mapping, and whether it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconvert.convert.configs import read_config
from mtpconvert.convert.packings import packing_of
from mtpconvert.errors import ConfigError, MtpConvertError, UsageError
from mtpconvert.garbage import no_gc
from mtpconvert.mapping import catalogue
from mtpconvert.mapping.closest import by_tensors
from mtpconvert.mapping.expand import expand, proven
from mtpconvert.mapping.mtp import MtpCount, declared_mtp, looks_like_mtp
from mtpconvert.mapping.sites import Site, sites_of, text_key
from mtpconvert.mapping.sketch import known_mapping, sketch
from mtpconvert.mapping.sketch_toml import Counts, Model, draft_toml
from mtpconvert.stores.detect import detect
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from mtpconvert.tensors import Inventory


@dataclass(frozen=True)
class Draft:
    """``verdict``: whether the drafted rows, expanded on the config, cover what they name exactly once."""

    text: str
    counts: Counts
    mtp: MtpCount
    verdict: str


@no_gc()
def draft_of(source: Path) -> Draft:
    """Draft a mapping for the model in ``source``; reads headers only.

    Raises UsageError for what is no Hugging Face directory, ConfigError for a config without a number of layers.
    """
    if (found := detect(source)).kind != "hf":
        raise UsageError(f"{source} is no Hugging Face directory but {found.kind}", next_step="give the HF directory")
    config = read_config(source)
    inventory = _as_decoded(SafetensorsReader(source).inventory(), config, source)
    model = Model(config, text_key(config))
    count = model.language.get("num_hidden_layers")
    if not isinstance(count, int) or isinstance(count, bool):
        key = "num_hidden_layers" if model.text is None else f"{model.text}.num_hidden_layers"
        raise ConfigError(f"'{key}' is {count!r}, no number of layers", where=f"config.json: {key}")
    sites = sites_of(inventory, count)
    mappings = [catalogue.load(catalogue.file_of(name)) for name in catalogue.architectures()]
    ranked = [mapping for mapping, shared in by_tensors(inventory, mappings) if shared]
    result = sketch(sites, [known_mapping(mapping, model.language) for mapping in ranked])
    start = _arguments(ranked[0].file) if ranked else ""
    text, counts = draft_toml(result, model, count, start)
    mtp = _mtp(config, sites, inventory, count)
    return Draft(text, counts, mtp, _verdict(text, config, inventory, mtp.present))


def _as_decoded(stored: Inventory, config: dict[str, Any], source: Path) -> Inventory:
    """The tensors as a mapping sees them: packed ones decoded, without their scales, where that can be done."""
    try:
        return packing_of(config, stored, str(source)).decoded(stored)
    except MtpConvertError:
        return stored  # of a packing that cannot be decoded every part is marked as not placed


def _arguments(file: Path) -> str:
    """The [arguments] table of the closest mapping."""
    text = file.read_text(encoding="utf-8")
    _, found, rest = text.partition("\n[arguments]")
    table = rest.split("\n[")[0].strip("\n")
    return f"[arguments] is not drafted; that of {file.stem} to start from:\n[arguments]{table}" if found else ""


def _verdict(text: str, config: dict[str, Any], inventory: Inventory, mtp_layers: int) -> str:
    """What the loader and the proof say of the draft."""
    with tempfile.TemporaryDirectory(prefix="mtpconvert-draft-") as folder:
        file = Path(folder) / "draft.toml"
        file.write_text(text, encoding="utf-8")
        try:
            mapping = catalogue.load(file)
            scope = mapping.scope(config, {"mtp_layers": mtp_layers})
            proven(mapping, expand(mapping, scope, scope.integer("vocab_size"), inventory))
        except MtpConvertError as error:
            return f"the draft does not hold yet: {error.what}"
    return "its rows are a bijection"


def _mtp(config: Mapping[str, Any], sites: list[Site], inventory: Inventory, trunk: int) -> MtpCount:
    """Layers by their numbers; tensors are all of MTP's, those that layers share and those of unknown names too."""
    declared = declared_mtp(config, None)
    numbers = {number for site in sites if site.mtp and site.numbered for number in site.layers}
    names = [name for site in sites for name in site.names if site.mtp or looks_like_mtp(name, trunk)]
    specs = [inventory[name] for name in names]
    return MtpCount(declared.key, declared.count, len(numbers), 0, len(specs), sum(spec.nbytes for spec in specs))
