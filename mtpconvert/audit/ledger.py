"""The MTP ledger: per layer what is expected, present on either side, equal; and the sentence a person acts on."""

from __future__ import annotations

from collections.abc import Iterable

from mtpconvert.audit.describe import Description
from mtpconvert.audit.drafts import Kind, number_of
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.mtp import MtpLayers, declared, expected_prefix, owed
from mtpconvert.audit.packed import scales_of, without_scale
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.report_model import LayerLedger, MtpLedger

_MOST_DECLARED = 1000  # layers that are listed without a tensor; a count may be out of all proportion


def make_ledger(
    left: Side, right: Side, here: MtpLayers, there: MtpLayers,
    one: Description, two: Description, equal: set[str] | None, plan: Plan,
) -> MtpLedger:  # fmt: skip
    """``equal``: names on the right all of whose bytes were found equal; None if no byte was read. ``plan``: which
    names of either side have no answer on the other."""
    ledger = MtpLedger(declared(left), declared(right), _totals(left, here), _totals(right, there))
    ledger.kinds = {side.label: part.kind.key if part.names else None for side, part in ((left, here), (right, there))}
    kind = here.kind if here.names else there.kind
    count = min(max(owed(left, bool(here.names)), owed(right, bool(there.names))), _MOST_DECLARED)
    unexpected, missing = set(plan.unexpected), set(plan.missing)
    scales, before = scales_of(right) | without_scale(right), scales_of(left)
    for layer in sorted({*here.names, *there.names, *range(count)}):
        mine, theirs = here.names.get(layer, []), there.names.get(layer, [])
        present = len(theirs) - len(unexpected.intersection(theirs))
        if left.kind == right.kind and mine:  # what the left has, in the right's layout
            expected = present + len(missing.intersection(mine))
        else:
            expected = _expected(layer, [name for name in mine if name not in before], theirs, one, two)
            if left.stored or right.stored or left.kind != right.kind:
                expected += len(scales.intersection(theirs))
        prefix = there.prefix.get(layer) or _prefix_of(layer, right, here, two) or here.prefix.get(layer, "")
        same = None if equal is None else sum(name in equal for name in theirs)
        ledger.layers.append(LayerLedger(
            layer, prefix, expected, len(mine), len(theirs), same, _bytes(left, mine), _bytes(right, theirs),
            _sentence(kind, layer, expected, len(theirs), present, same, prefix),
        ))  # fmt: skip
    ledger.sentences = [_summary(side, layers, ledger.layers) for side, layers in ((left, here), (right, there))]
    return ledger


def _totals(side: Side, layers: MtpLayers) -> dict[str, int]:
    names = layers.all_names()
    return {"layers": layers.layers, "tensors": len(names), "bytes": _bytes(side, names)}


def _bytes(side: Side, names: Iterable[str]) -> int:
    inventory = (side.stored or side).inventory
    return sum(inventory[name].nbytes for name in names)


def _expected(
    layer: int, mine: list[str], theirs: list[str], one: Description, two: Description
) -> int:  # fmt: skip
    """What the right side's description places in that layer (copies where they are there), else the left's own.
    The right's scales are not among them."""
    described = {name for name, place in two.places_of().items() if place == f"mtp.{layer}"}
    if described:
        return len(described | ({p.block.tensor for p in two.usable if p.copy} & set(theirs)))
    return len(mine) or len({name for name, place in one.places_of().items() if place == f"mtp.{layer}"})


def _prefix_of(layer: int, side: Side, other: MtpLayers, description: Description) -> str:
    names = [name for name, place in description.places_of().items() if place == f"mtp.{layer}"]
    if names:
        head = names[0]
        for name in names:
            while not name.startswith(head):
                head = head[:-1]
        return head[: head.rfind(".") + 1]
    return expected_prefix(side, other if side.is_huggingface else None) if layer == 0 else ""


def _sentence(
    kind: Kind, layer: int, expected: int, theirs: int, present: int, same: int | None, prefix: str
) -> str:  # fmt: skip
    part = f"{kind.one} {layer}"
    if not theirs:
        many = f"0 of {expected} tensors" if expected else "no tensor"
        speculation = "MTP speculation" if kind.one == "MTP layer" else "speculation"
        return f"{part}: {many} present on the right (expected under {prefix}); {speculation} will not work"
    text = f"{part}: {present} of {expected} tensors present under {prefix}"
    if same is None:
        text += ", bytes not read"
    else:
        text += ", all equal" if same == present else f", {present - same} of them not equal"
    return text if present == theirs else f"{text}; {theirs - present} unexpected"


def _summary(side: Side, layers: MtpLayers, rows: list[LayerLedger]) -> str:
    count, kind = declared(side), layers.kind
    if side.is_huggingface or side.kind == "gguf":
        where = "config" if side.is_huggingface else "metadata"
        says = f"{where} declares {number_of(count, kind)}" if count is not None else f"{where} says nothing about MTP"
    elif side.arguments is None:
        says = "no arguments in the checkpoint"
    else:
        says = f"arguments declare {number_of(count, kind)}" if count is not None else "arguments say nothing about MTP"
    tensors = len(layers.all_names())
    if tensors == 0 and count and not owed(side, there=False):
        return (
            f"{side.label}: declared {count}, published none, as in every checkpoint of this family; 0 tensors present"
        )
    if tensors == 0 and count:
        expected = sum(row.expected for row in rows)
        prefix = rows[0].prefix if rows and side.label == "right" else expected_prefix(side)
        return f"{side.label}: {says}; 0 of {expected or '?'} tensors present (expected under {prefix})"
    nbytes = _bytes(side, layers.all_names())
    remark = f" ({kind.remark})" if kind.remark and tensors else ""
    return f"{side.label}: {says}; {number_of(layers.layers, kind)} present{remark}, {tensors} tensors, {nbytes} bytes"


def ledger_findings(left: Side, right: Side, here: MtpLayers, there: MtpLayers, ledger: MtpLedger) -> list[Finding]:
    """MTP declared and none found (either side), or none published, and whole layers lost on the way."""
    found: list[Finding] = []
    for side, layers, sentence in ((left, here, ledger.sentences[0]), (right, there, ledger.sentences[1])):
        if declared(side) and not layers.names:
            code = "mtp-none-found" if owed(side, there=False) else "mtp-none-published"
            found.append(finding(code, sentence, side=side.label, mtp=True))
    rows = {row.layer: row for row in ledger.layers}
    for layer in here.names:
        if layer not in there.names:
            row = rows[layer]
            text = f"{row.sentence}; {len(here.names[layer])} tensors, {row.left_bytes} bytes on the left"
            pattern = f"{here.prefix.get(layer, '')}*" if left.kind == right.kind else f"{row.prefix}*"
            found.append(finding("mtp-layer-missing", text, tensor=pattern, mtp=True, count=len(here.names[layer])))
    return found


def trunk_lost(left: Side, missing: list[str], here: MtpLayers) -> list[Finding]:
    """Trunk tensors missing from the very shards whose MTP tensors are missing: said as such."""
    if not missing:
        return []
    mtp_names = here.all_names()
    gone = set(missing)
    found: list[Finding] = []
    shards: dict[str, list[str]] = {}
    for name, home in left.home.items():
        shards.setdefault(home, []).append(name)
    for shard, names in sorted(shards.items()):
        lost = [name for name in names if name in gone]
        lost_mtp = [name for name in lost if name in mtp_names]
        lost_trunk = [name for name in lost if name not in mtp_names]
        if lost_mtp and lost_trunk and set(names) <= gone:
            text = (
                f"the whole shard {shard} of the left is missing: {len(lost_trunk)} trunk tensors were lost with its "
                f"{len(lost_mtp)} MTP tensors ({', '.join(lost_trunk[:3])}{' ...' if len(lost_trunk) > 3 else ''})"
            )
            found.append(finding("trunk-lost-with-mtp", text, tensor=None, count=len(lost_trunk), file=shard))
    return found
