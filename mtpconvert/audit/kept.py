"""Tensors that a Megatron checkpoint keeps beside itself for the way back, against those of its source.

Scales of FP8 weights (docs/codecs.md): numbers in bf16 do not show them, since a scale that is off by its last bit
gives equal bf16 and other FP8 bytes. Another part of the model, vision, for which Megatron's GPTModel has no place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mtpconvert.audit.compare import Bench, is_equal
from mtpconvert.audit.cover import other_part
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.huggingface import open_huggingface
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.huggingface import other_prefixes
from mtpconvert.audit.windows import Operand
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import size_words, whole

SCALES = "hf_assets/mtpconvert/scales"
PASSTHROUGH = "hf_assets/passthrough"
OLD_PASSTHROUGH = "hf_assets/mtpconvert/aside"  # as the first versions of this tool called it
_OTHER_CONFIGS = ("vision_config", "audio_config", "image_config", "speech_config", "video_config")


@dataclass(slots=True)
class OtherPart:
    """``tensors`` and ``nbytes`` of another part of the model that were compared with those kept for the way back."""

    findings: list[Finding]
    tensors: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a Megatron checkpoint keeps in its folder ``where``; ``side``: None where it cannot be read, for ``why``."""

    where: str
    side: Side | None
    why: str = ""


def check_kept_scales(left: Side, right: Side, plan: Plan) -> list[Finding]:
    """Every scale of the left whose weight is on the right is kept there, byte for byte; nothing if none are kept."""
    if left.stored is None or right.is_huggingface or not left.is_huggingface:
        return []
    kept = _kept(right, SCALES)
    names = [p.scales for name, p in left.packed.items() if name in plan.matched and p.scheme == "fp8"]
    return [] if kept is None else _compared("kept-scales", left.stored, kept, names, read=True)


def check_other_part(left: Side, right: Side, *, read: bool) -> OtherPart:
    """What becomes of the tensors of another part of the model, in words; those that are kept must be the source's.

    ``read``: compare bytes too, not only names, shapes and dtypes.
    """
    result = OtherPart([])
    left, right = left.stored or left, right.stored or right  # kept as they are stored, codes and scales
    for side, megatron in ((left, right), (right, left)):
        if not side.is_huggingface or megatron.is_huggingface:
            continue
        kept, names = _kept(megatron, PASSTHROUGH, OLD_PASSTHROUGH), sorted(other_part(side))
        if names:
            result.findings += _told(result, side, kept, names, read=read)
        if side is right:
            result.findings += _lost(right, kept, names)
    return result


def _told(result: OtherPart, side: Side, kept: _Kept | None, names: list[str], *, read: bool) -> list[Finding]:
    """The note that says how many there are and whether they are kept, and a fault for each that is not."""
    nbytes = sum(side.inventory[name].nbytes for name in names)
    text = f"{len(names)} tensors ({size_words(nbytes)}) belong to another part of the model, which Megatron has no"
    text += f" place for; the first is {names[0]}"
    faults = [] if kept is None else _compared("kept-tensors", side, kept, names, read=read)
    if kept is None:
        text += f"; none are kept in {PASSTHROUGH}"
    elif kept.side is not None:
        there = [name for name in names if name in kept.side.inventory]
        result.tensors = len(there)
        result.nbytes = sum(side.inventory[name].nbytes for name in there) if read else 0
        if not faults:
            text += f"; all are kept in {kept.where}, {'byte for byte' if read else 'bytes not read'}"
    return [finding("other-part", text, side=side.label, count=len(names)), *faults]


def _lost(right: Side, kept: _Kept | None, names: list[str]) -> list[Finding]:
    """What the left side keeps of another part and the Hugging Face right side has not, though its config wants it.

    ``names``: of those that it has. A config of the language model alone wants none.
    """
    config = right.config or {}
    wanted = [key for key in _OTHER_CONFIGS if isinstance(config.get(key), dict)]
    prefixes = other_prefixes(config)
    if not prefixes or not (wanted or names):
        return []
    held = {} if kept is None or kept.side is None else kept.side.inventory
    lost = sorted(name for name in held if name.startswith(prefixes) and name not in right.inventory)
    if kept is not None and names:
        text = f"is not on the right, and the left side keeps it in {kept.where}"
        return [finding("tensor-missing", f"{name} {text}", side="right", tensor=name) for name in lost]
    if kept is not None and lost:
        size = size_words(sum(held[name].nbytes for name in lost))
        text = f"config.json has a {wanted[0]}, and none of its tensors is there: the left side keeps {len(lost)}"
        text += f" ({size}) in {kept.where}, the first is {lost[0]}"
        return [finding("other-part-missing", text, side="right", tensor=None, count=len(lost))]
    if not names:
        text = f"config.json has a {wanted[0]}, and neither side has a tensor of it"
        return [finding("other-part", text, side="right", count=0)]
    return []


def _kept(megatron: Side, *places: str) -> _Kept | None:
    """What ``megatron`` keeps in the first of ``places`` that is there, None where there is none of them."""
    for where in places:
        for folder in (root / where for root in (megatron.root, megatron.root.parent)):
            if folder.is_dir():
                return _read(folder, where, megatron.label)
    return None


def _read(folder: Path, where: str, label: str) -> _Kept:
    try:
        return _Kept(where, open_huggingface(folder, label))  # not the source's label: a Bench keeps readers by it
    except CheckpointError as error:
        return _Kept(where, None, f"{error.what} ({error.where}); the way back needs them")


def _compared(code: str, source: Side, kept: _Kept, names: Iterable[str], *, read: bool) -> list[Finding]:
    """A finding for each tensor that is not kept as the source has it."""
    if kept.side is None:
        return [finding(code, kept.why, tensor=None)]
    found = [fault for fault in kept.side.findings if fault.code.startswith("file-")]
    bench = Bench(source, kept.side)
    try:
        for name in names:
            why = _fault(source, kept.side, name, bench if read else None, kept.where)
            if why is not None:
                found.append(finding(code, f"{name}: {why}", tensor=name))
    finally:
        bench.close()
    return found


def _fault(source: Side, kept: Side, name: str, bench: Bench | None, where: str) -> str | None:
    if name not in kept.inventory:
        return f"not among the tensors kept in {where}; the way back cannot give its bytes"
    here, there = source.inventory[name], kept.inventory[name]
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        return f"kept as {there.dtype} {list(there.shape)}, the source has {here.dtype} {list(here.shape)}"
    if bench is None or name in source.broken or name in kept.broken:
        return None  # a finding of their own
    block = whole(name, here.shape)
    try:
        same = is_equal(bench, Operand(source, block), Operand(kept, block))
    except CheckpointError as error:
        return f"{error.what} ({error.where})"
    return None if same else f"kept in {where} with other bytes than the source has; the way back gives other bytes"
