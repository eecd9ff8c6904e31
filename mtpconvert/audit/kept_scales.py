"""Scales that a Megatron checkpoint keeps for the way back to FP8 (docs/codecs.md), against those of its source.

Numbers in bf16 do not show them: a scale that is off by its last bit gives equal bf16 and other FP8 bytes.
"""

from __future__ import annotations

from mtpconvert.audit.compare import Bench, is_equal
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.huggingface import open_huggingface
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.windows import Operand
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import whole

FOLDER = "hf_assets/mtpconvert/scales"


def check_kept_scales(left: Side, right: Side, plan: Plan) -> list[Finding]:
    """Every scale of the left whose weight is on the right is kept there, byte for byte; nothing if none are kept."""
    folder = next((root / FOLDER for root in (right.root, right.root.parent) if (root / FOLDER).is_dir()), None)
    if folder is None or right.is_huggingface or not left.is_huggingface or left.stored is None:
        return []
    try:
        kept = open_huggingface(folder, "right")
    except CheckpointError as error:
        return [finding("kept-scales", f"{error.what} ({error.where}); the way back needs them", tensor=None)]
    found = [fault for fault in kept.findings if fault.code.startswith("file-")]
    bench = Bench(left.stored, kept)
    try:
        for name, packed in left.packed.items():
            if name in plan.matched and packed.scheme == "fp8":
                why = _fault(left.stored, kept, packed.scales, bench)
                if why is not None:
                    found.append(finding("kept-scales", f"{packed.scales}: {why}", tensor=packed.scales))
    finally:
        bench.close()
    return found


def _fault(source: Side, kept: Side, name: str, bench: Bench) -> str | None:
    if name not in kept.inventory:
        return f"not among the scales kept in {FOLDER}; the way back cannot give its bytes"
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
    return (
        None if same else f"kept in {FOLDER} with other bytes than the source has; the way back gives other FP8 bytes"
    )
