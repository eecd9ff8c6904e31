"""``mtpconvert inspect PATH``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from mtpconvert.audit.drafts import MTP, Kind, counts_of, kind_of
from mtpconvert.audit.findings import Severity
from mtpconvert.audit.mtp import count_keys, declared_by, layers_of, trunk_layers
from mtpconvert.audit.readers.opening import is_gguf, is_torch_files, open_side
from mtpconvert.cli.options import EXISTING, json_option
from mtpconvert.cli.output import mtp_json, mtp_line, print_json, print_notes
from mtpconvert.convert.configs import read_config
from mtpconvert.convert.packings import packing_in_words
from mtpconvert.errors import CheckpointError, ConfigError
from mtpconvert.evidence.speed import cost_of_dropping, lines_of, speed_report
from mtpconvert.garbage import no_gc
from mtpconvert.mapping.catalogue import architectures, file_of, load
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.model import MtpRule
from mtpconvert.mapping.mtp import (
    MtpCount,
    declared_mtp,
    default_note,
    looks_like_mtp,
    present_in_hf,
    present_in_mcore,
    published_none,
)
from mtpconvert.stores.detect import Found, detect
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from mtpconvert.tensors import Inventory, size_words

_NUMBER = re.compile(r"\.\d+\.")


@dataclass
class Inspection:
    kind: str
    path: Path
    architecture: str | None
    has_mapping: bool
    inventory: Inventory
    mtp: MtpCount
    facts: dict[str, Any]  # what only this kind of checkpoint has
    config: dict[str, Any]  # config.json, or the Megatron arguments
    notes: list[str] = field(default_factory=list)
    draft: Kind = MTP  # what the draft part is, where there is one

    @property
    def dtypes(self) -> dict[str, int]:
        """Bytes by dtype, the largest first."""
        count: Counter[str] = Counter()
        for spec in self.inventory.values():
            count[spec.dtype] += spec.nbytes
        return dict(count.most_common())


@click.command()
@click.argument("path", type=EXISTING)
@click.option("--speed", is_flag=True, help="Add what a decoded token reads, and what MTP is worth.")
@json_option
def inspect(path: Path, speed: bool, as_json: bool) -> None:
    """Say what PATH holds, from its headers: kind, architecture, tensors, bytes, MTP."""
    if is_gguf(path):
        result = _gguf(path)
    elif is_torch_files(path) or _has_params(path):
        result = _unconverted(path)
    else:
        found = detect(path)
        result = _torch_dist(found) if found.kind == "torch_dist" else _hugging_face(found)
    report = speed_report(result.config, result.inventory) if speed and result.draft.part is None else None
    if speed and report is None:
        result.notes.append(f"--speed models a trunk and its MTP layers; {result.draft.many} are neither")
    if as_json:
        print_json(_document(result) | ({} if report is None else {"speed": report.document()}))
        return
    print_notes(result.notes)
    total = sum(spec.nbytes for spec in result.inventory.values())
    mapped = "" if result.architecture is None else f", {'a mapping' if result.has_mapping else 'no mapping'} for it"
    click.echo(f"{result.path}: {result.kind}; {result.architecture or 'architecture not recorded'}{mapped}")
    click.echo(f"{len(result.inventory):,} tensors, {size_words(total)}")
    for dtype, nbytes in result.dtypes.items():
        click.echo(f"  {dtype:8} {size_words(nbytes)}")
    for name, value in result.facts.items():
        click.echo(f"{name.replace('_', ' ')}: {value}")
    if report is not None:
        for line in [*lines_of(report), *([cost_of_dropping(report)] if report.mtp else [])]:
            click.echo(line)
    if result.draft.remark:
        click.echo(f"{result.draft.many} with {result.draft.remark}")
    click.echo(mtp_line(result.mtp, writes=False, parts=result.draft.many))


def _gguf(path: Path) -> Inspection:
    """By the auditor's reader: nothing of it is converted. Raises CheckpointError for a file without a header."""
    side = open_side(path, "left")
    if side.findings:
        raise CheckpointError(side.findings[0].message, where=str(path), next_step="get the file again from its source")
    arguments, described = side.arguments or {}, side.config or {}
    layers = layers_of(side.inventory, arguments, MTP).names
    mtp = _count(side.inventory, layers, "nextn_predict_layers", arguments.get("num_nextn_predict_layers"))
    types = Counter(described.get("types", {}).values())
    facts = {"files": len(side.files), "types": ", ".join(f"{count} {kind}" for kind, count in types.most_common())}
    notes = ["a GGUF file is not converted: use the safetensors checkpoint that it was made from"]
    architecture = described.get("metadata", {}).get("general.architecture")
    return Inspection("GGUF", path, architecture, False, side.inventory, mtp, facts, described, notes)


def _has_params(path: Path) -> bool:
    """safetensors with params.json in place of config.json: a checkpoint in Meta's own form."""
    alone = (path / "params.json").is_file() and not (path / "config.json").exists()
    return alone and any(path.glob("*.safetensors"))


@no_gc()
def _unconverted(path: Path) -> Inspection:
    """What drafts are published as and no command converts, by the auditor's reader. Raises CheckpointError for
    files that are not in order, ConfigError for a config that cannot be read."""
    side = open_side(path, "left")
    wrong = [found for found in side.findings if found.severity is Severity.ERROR]
    for found in wrong:
        if found.code != "config-missing":
            error = ConfigError if found.code.startswith("config-") else CheckpointError
            raise error(found.message, where=str(path), next_step="get the files again from their source")
    config = side.config or {}
    architecture = _architecture(config)
    kind, mtp = _drafts(side.inventory, config, architecture)
    notes = [found.message for found in side.findings]
    is_torch = is_torch_files(path)
    if is_torch:
        notes.append("files of torch.save are inspected and audited, not converted: that needs safetensors")
    return Inspection(
        "torch.save files" if is_torch else "safetensors with params.json", path, architecture,
        architecture in architectures() and not kind.whole, side.inventory, mtp, {"files": len(side.files)}, config,
        notes, kind,
    )  # fmt: skip


def _drafts(inventory: Inventory, config: dict[str, Any], architecture: str | None) -> tuple[Kind, MtpCount]:
    """What drafts in a Hugging Face checkpoint, and how much of it there is."""
    kind = kind_of(inventory, config)
    if (rule := _rule(architecture)) is not None and kind is MTP:
        declared = declared_mtp(config, rule)
        layers = present_in_hf(inventory, rule, Scope(config))
        trunk = trunk_layers(config)
        others = [name for name in inventory if looks_like_mtp(name, trunk)]
        mtp = _count(inventory, layers, declared.key, declared.count, others)
        return kind, replace(mtp, published_none=published_none(declared, len(layers), rule))
    layers = layers_of(inventory, config, kind).names  # the auditor knows every published layout
    shared = [name for names in layers.values() for name in names]
    if kind is MTP:  # what all layers share, it counts to layer 0
        layers = {n: names for n, names in layers.items() if any(_NUMBER.search(name) for name in names)}
    return kind, _count(inventory, layers, _count_key(config, kind), declared_by(config, kind), shared)


def _taken_for_granted(config: dict[str, Any], architecture: str | None, mtp: MtpCount) -> list[str]:
    """A note where config.json lacks a count that readers take for granted."""
    rule = _rule(architecture)
    note = default_note(declared_mtp(config, rule), rule)
    if note is None:
        return []
    return [note if mtp.tensors else f"{note}, and no MTP tensor is present: hf2mcore refuses that"]


@no_gc()
def _hugging_face(found: Found) -> Inspection:
    config = read_config(found.root)
    reader = SafetensorsReader(found.root)
    inventory = reader.inventory()
    architecture = _architecture(config)
    kind, mtp = _drafts(inventory, config, architecture)
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    packing = packing_in_words(config, inventory, str(found.root))
    facts = {"files": len(reader.shards), "quantisation": method, "packing": packing}
    notes = [*reader.notes, *(_taken_for_granted(config, architecture, mtp) if kind is MTP else [])]
    return Inspection(
        reader.kind, found.root, architecture, architecture in architectures() and not kind.whole, inventory, mtp,
        {name: value for name, value in facts.items() if value is not None}, config, notes, kind,
    )  # fmt: skip


@no_gc()
def _torch_dist(found: Found) -> Inspection:
    from mtpconvert.stores.torch_dist.reader import TorchDistReader
    from mtpconvert.stores.torch_dist.run_config import RUN_CONFIG

    assert found.iteration_dir is not None  # detect: a torch_dist checkpoint has one
    reader = TorchDistReader(found.iteration_dir)
    inventory = reader.inventory()
    args = reader.args or {}
    count = args.get("mtp_num_layers")
    key = "model.mtp_num_layers" if reader.args_file.endswith(RUN_CONFIG) else "args.mtp_num_layers"
    mtp = _count(inventory, present_in_mcore(inventory), key, count if isinstance(count, int) else None)
    config = read_config(found.assets) if found.assets is not None else {}
    architecture = _architecture(config)
    facts = {
        "iteration": reader.iteration,
        "layers": "stacked under one key each" if reader.stacked else "one by one",
        "arguments": len(args) if reader.args is not None else "none",
        "arguments from": RUN_CONFIG if reader.args_file.endswith(RUN_CONFIG) else None,
        "other entries": ", ".join(f"{number} {kind}" for kind, number in reader.objects.items() if number) or "none",
        "unknown objects": ", ".join(reader.unknown_objects) or None,
        "hf_assets": "present" if found.assets is not None else "none: mcore2hf needs --reference",
    }
    return Inspection(
        reader.kind, found.root, architecture, architecture in architectures(), inventory, mtp,
        {name: value for name, value in facts.items() if value is not None}, args, list(reader.notes),
    )  # fmt: skip


def _architecture(config: dict[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _count_key(config: dict[str, Any], kind: Kind) -> str | None:
    """Where ``config`` says the number of draft parts, if anywhere."""
    found = counts_of(config, kind) if kind.counts else [(count.path, count.value) for count in count_keys(config)]
    return max(found, key=lambda entry: entry[1] or 0)[0] if found else None


def _rule(architecture: str | None) -> MtpRule | None:
    return load(file_of(architecture)).mtp if architecture in architectures() and architecture else None


def _count(
    inventory: Inventory, layers: dict[int, list[str]], key: str | None, declared: int | None, more: Iterable[str] = ()
) -> MtpCount:
    """``more``: tensors of MTP that are of no one layer, or of these layers."""
    names = dict.fromkeys([*(name for layer in layers.values() for name in layer), *more])
    return MtpCount(key, declared, len(layers), 0, len(names), sum(inventory[name].nbytes for name in names))


def _document(result: Inspection) -> dict[str, Any]:
    mtp = {"kind": result.draft.key if result.mtp.tensors else None} | mtp_json(result.mtp)
    del mtp["written"]
    return {
        "schema_version": 1,
        "path": str(result.path),
        "kind": result.kind,
        "architecture": result.architecture,
        "has_mapping": result.has_mapping,
        "tensors": len(result.inventory),
        "bytes": sum(spec.nbytes for spec in result.inventory.values()),
        "bytes_by_dtype": result.dtypes,
        **{name.replace(" ", "_"): value for name, value in result.facts.items()},
        "notes": result.notes,
        "mtp": mtp,
    }
