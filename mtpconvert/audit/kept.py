"""Tensors that a Megatron checkpoint keeps beside itself for the way back, against those of its source.

Scales of FP8 weights (docs/codecs.md): numbers in bf16 do not show them, since a scale that is off by its last bit
gives equal bf16 and other FP8 bytes. Another part of the model, vision, for which Megatron's GPTModel has no place.
"""

from __future__ import annotations

from mtpconvert.audit.compare import Bench, is_equal
from mtpconvert.audit.cover import other_part
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.huggingface import open_huggingface
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.windows import Operand
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import size_words, whole

SCALES = "hf_assets/mtpconvert/scales"
ASIDE = "hf_assets/mtpconvert/aside"


def check_kept_scales(left: Side, right: Side, plan: Plan) -> list[Finding]:
    """Every scale of the left whose weight is on the right is kept there, byte for byte; nothing if none are kept."""
    if left.stored is None or right.is_huggingface or not left.is_huggingface:
        return []
    names = [p.scales for name, p in left.packed.items() if name in plan.matched and p.scheme == "fp8"]
    return _compared("kept-scales", left.stored, right, SCALES, names) or []


def check_other_part(left: Side, right: Side, level: str) -> list[Finding]:
    """What becomes of the tensors of another part of the model, in words; those that are kept must be the source's."""
    found: list[Finding] = []
    for side, other in ((left, right), (right, left)):
        names = sorted(other_part(side)) if not other.is_huggingface else []
        if not names:
            continue
        nbytes = sum(side.inventory[name].nbytes for name in names)
        text = f"{len(names)} tensors ({size_words(nbytes)}) belong to another part of the model, which Megatron has no"
        text += f" place for; the first is {names[0]}"
        faults = _compared("kept-tensors", side, other, ASIDE, names) if level == "bits" else []
        if faults is None:
            text += f"; none are kept in {ASIDE}"
        elif level == "bits" and not faults:
            text += f"; all are kept in {ASIDE}, byte for byte"
        found += [finding("other-part", text, side=side.label, count=len(names)), *(faults or [])]
    return found


def _compared(code: str, source: Side, megatron: Side, where: str, names: list[str]) -> list[Finding] | None:
    """A finding for each tensor that is not kept as the source has it; None where nothing is kept at all."""
    folder = next((root / where for root in (megatron.root, megatron.root.parent) if (root / where).is_dir()), None)
    if folder is None:
        return None
    try:
        kept = open_huggingface(folder, megatron.label)  # not the source's: a Bench keeps readers by label
    except CheckpointError as error:
        return [finding(code, f"{error.what} ({error.where}); the way back needs them", tensor=None)]
    found = [fault for fault in kept.findings if fault.code.startswith("file-")]
    bench = Bench(source, kept)
    try:
        for name in names:
            why = _fault(source, kept, name, bench, where)
            if why is not None:
                found.append(finding(code, f"{name}: {why}", tensor=name))
    finally:
        bench.close()
    return found


def _fault(source: Side, kept: Side, name: str, bench: Bench, where: str) -> str | None:
    if name not in kept.inventory:
        return f"not among the tensors kept in {where}; the way back cannot give its bytes"
    here, there = source.inventory[name], kept.inventory[name]
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        return f"kept as {there.dtype} {list(there.shape)}, the source has {here.dtype} {list(here.shape)}"
    if name in source.broken or name in kept.broken:
        return None  # a finding of their own
    block = whole(name, here.shape)
    try:
        same = is_equal(bench, Operand(source, block), Operand(kept, block))
    except CheckpointError as error:
        return f"{error.what} ({error.where})"
    return None if same else f"kept in {where} with other bytes than the source has; the way back gives other bytes"
