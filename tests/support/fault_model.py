"""One row of the fault table: a seeded fault, and what each check said about it.

A fault is planted either in the converter (a row of its mapping, an op, the executor), which then converts a tiny
checkpoint with its audit off, or straight into an artefact. What must be found, and on which tensor, is written down
with the fault. ``tests/support/fault_table.py`` runs them all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mtpconvert.audit.api import audit
from mtpconvert.audit.report_model import Report
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.roundtrip import roundtrip
from mtpconvert.convert.to_hf import ToHf, mcore2hf
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from mtpconvert.errors import MtpConvertError
from mtpconvert.mapping.dialect import DialectName
from tests.support.bridge_tables import write_bridge_case
from tests.support.tiny import sha256_tree, write_tiny
from tests.support.tiny_glm import write_glm

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",  # and Mistral: the same rows, ops and roles
    "glm4_moe": "Glm4MoeForCausalLM",
    "mimo_v2": "MiMoV2FlashForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "pangu": "PanguUltraMoEForCausalLM",
}
GLM = ("glm4_moe",)  # only the faults where it differs: tests/support/faults_glm.py
# Only the faults in what the dialect's mappings have of their own: tests/support/faults_bridge_rows.py.
BRIDGE = {"mimo_v2": "MiMo-V2-Flash", "minimax_m2": "MiniMax-M2", "pangu": "openPangu-Ultra-MoE"}
ALL = tuple(family for family in ARCHITECTURES if family not in (*GLM, *BRIDGE))
MLA = ("deepseek_v3",)
GQA = tuple(family for family in ALL if family not in MLA)
UNTIED = tuple(family for family in ALL if family != "qwen2")
NO_MTP = "no MTP layer in these families"
NO_EXPERTS = "no experts in these families"
NO_GROUPS = "no grouped q, k, v: latent attention"
TIED = "the head is tied: no tensor of its own"

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """``tensor``: the Megatron (``mcore2hf``: HF) name that must be named, None for faults of no one tensor.

    ``refused``: the converter must refuse with this error and write nothing. ``why_not``: why it is not planted in
    the other families. ``mapping``: (old, new) texts of the family's mapping file; ``plant``: patches of its code.
    """

    name: str
    where: str
    families: tuple[str, ...]
    tensor: str | None = None
    code: str = "bytes-differ"
    words: str = ""
    why_not: str = ""
    refused: str | None = None
    mapping: Callable[[str], str] | None = None
    plant: Patch = nullcontext
    direction: str = "hf2mcore"
    mtp: bool = False
    source: Callable[[Path], None] | None = None  # changes a copy of the source first, where the fault needs it
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What each check said. ``converter``: the error it refused with, or "". The others: True for found.

    ``roundtrip`` is None where it does not apply (an artefact, a conversion to HF or one that was refused), both it and
    ``headers`` in families where they were not asked.
    """

    converter: str = ""
    roundtrip: bool | None = None
    headers: bool | None = None
    bits: str = ""  # the code that names the right tensor


def replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """Each old text by the new one; every one of them must be there."""

    def edit(text: str) -> str:
        for old, new in pairs:
            assert old in text, f"the mapping has no {old!r}"
            text = text.replace(old, new)
        return text

    return edit


def exchanged(one: str, two: str) -> Callable[[str], str]:
    mark = "\0"
    return replaced((one, mark), (two, one), (mark, two))


def mapping_text(family: str) -> str:
    return written_out(ARCHITECTURES[family])


def written_out(architecture: str) -> str:
    """The mapping file with the shared row groups written out in it."""
    folder = Path(__file__).parents[2] / "mappings"
    text = (folder / f"{architecture}.toml").read_text(encoding="utf-8")
    included = re.search(r"^include *= *\[(.*)\]\n", text, re.M)
    assert included is not None
    text = text.replace(included[0], "")
    groups = ""
    for name in re.findall(r'"(\w+)"', included[1]):
        groups += (folder / "_shared" / f"{name}.toml").read_text(encoding="utf-8").partition("[rows]\n")[2]
    if "\n[rows]\n" not in text:
        text = text.replace("\n[arguments]", "\n[rows]\n\n[arguments]", 1)
    return text.replace("\n[rows]\n", f"\n[rows]\n{groups}", 1)


def dialect_of(family: str) -> DialectName:
    return "bridge" if family in BRIDGE else "stock"


class Models:
    """Unharmed sources and their unharmed conversions, made once; ``root`` is a folder that the caller removes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Path] = {}
        self._number = 0

    def source(self, family: str) -> Path:
        if family not in self._made:
            if family in BRIDGE:
                self._made[family] = write_bridge_case(BRIDGE[family], self.root / f"{family}-rows")
            elif family in GLM:
                self._made[family] = write_glm(self.root / family, num_nextn_predict_layers=2)
            else:
                layers = {"mtp_layers": 2} if family == "deepseek_v3" else {}
                self._made[family] = write_tiny(family, self.root / family, **layers)
        return self._made[family]

    def megatron(self, family: str) -> Path:
        """The clean conversion."""
        if f"{family} megatron" not in self._made:
            target = self.root / f"{family}-megatron"
            hf2mcore(self.source(family), target, ToMcore(dialect=dialect_of(family)), Callbacks(gate=None))
            self._made[f"{family} megatron"] = target
        return self._made[f"{family} megatron"]

    def folder(self) -> Path:
        self._number += 1
        folder = self.root / f"run{self._number}"
        folder.mkdir()
        return folder


def weights_of(root: Path) -> dict[str, str]:
    """SHA-256 of what a result says: everything but the record of the plan that made it."""
    return {name: digest for name, digest in sha256_tree(root).items() if not name.startswith("hf_assets/mtpconvert/")}


def run(fault: Fault, family: str, models: Models) -> Outcome:
    """Convert with the fault planted, and let every check look; round trip and headers only in the first family.

    AssertionError where the fault changed nothing, or the converter refused, or did not, other than is written down.
    """
    folder = models.folder()
    try:
        return _run(fault, family, models, folder, everything=family == fault.families[0])
    finally:
        shutil.rmtree(folder)


def _run(fault: Fault, family: str, models: Models, folder: Path, everything: bool) -> Outcome:
    mapping = None
    if fault.mapping is not None:
        clean = mapping_text(family)
        mapping = folder / "mapping.toml"
        mapping.write_text(fault.mapping(clean), encoding="utf-8")
        assert mapping.read_text() != clean, "no fault"
    there = fault.direction == "hf2mcore"
    source = models.source(family) if there else models.megatron(family)
    if fault.source is not None:
        source = shutil.copytree(source, folder / "source")
        fault.source(source)
    with fault.plant():
        try:
            if there:
                options = ToMcore(mapping=mapping, dialect=dialect_of(family), **fault.options)
                hf2mcore(source, folder / "out", options, Callbacks(gate=None))
            else:
                mcore2hf(source, folder / "out", ToHf(mapping=mapping, **fault.options), Callbacks(gate=None))
        except MtpConvertError as error:
            assert fault.refused == type(error).__name__, f"refused: {error!r}"
            assert not (folder / "out").exists()
            return Outcome(converter=type(error).__name__)
        back = _comes_back_other(source, mapping, family) if there and everything else None
    assert fault.refused is None, "not refused"
    unharmed = models.megatron(family) if there else models.source(family)
    if fault.source is None:
        assert weights_of(folder / "out") != weights_of(unharmed), "no fault"
    headers = audit(source, folder / "out", level="headers").verdict() == "fail" if everything else None
    return Outcome("", back, headers, verdict(audit(source, folder / "out"), fault))


def _comes_back_other(source: Path, mapping: Path | None, family: str) -> bool:
    """What ``mtpconvert roundtrip`` finds, all tensors in one group: layer by layer takes eight times as long."""
    with patch("mtpconvert.convert.roundtrip._groups", lambda plan: {"all": set(plan.mcore)}):
        try:
            roundtrip(
                source, ToMcore(mapping=mapping, dialect=dialect_of(family)), lambda _total: lambda _count, _name: None
            )
        except MtpConvertError:
            return True
    return False


def verdict(report: Report, fault: Any) -> str:
    """The code of the finding that names the fault's tensor; "MISSED" where none does."""
    wanted = {fault.tensor, None if fault.tensor is None else stacked(fault.tensor)}
    hits = [f for f in report.failing("error") if f.code == fault.code and f.tensor in wanted]
    hits = [f for f in hits if fault.words in f.message]
    if not hits:
        return "MISSED: " + "; ".join(f"{f.code} {f.tensor} {f.message}" for f in report.failing("error"))[:600]
    return hits[0].code


def stacked(name: str) -> str:
    """Megatron's name of a trunk tensor where all layers are kept under one key."""
    return re.sub(r"^decoder\.layers\.\d+\.", "decoder.layers.", name)


def patched(target: str, value: Any) -> Patch:
    return lambda: patch(target, value)


def patched_op(name: str, op: Any) -> Patch:
    from mtpconvert.mapping.ops import OPS

    return lambda: patch.dict(OPS, {name: op})
