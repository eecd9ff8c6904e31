"""Most names unknown to the other side: one fault, not thousands. The likely prefix change is worked out and named."""

from __future__ import annotations

from collections import Counter

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.side import Side

_SHARE = 0.05  # beyond this share of names missing *and* unexpected, a rename is likelier than a loss


def check_mass(left: Side, right: Side, plan: Plan) -> list[Finding]:
    """A finding when many names miss on both sides; the tensors keep their own findings too."""
    if left.kind != right.kind or not left.inventory:
        return []
    lost, extra = plan.missing, plan.unexpected
    if len(lost) < 4 or len(extra) < 4 or len(lost) < _SHARE * len(left.inventory):
        return []
    change = likely_prefix(lost, extra)
    hint = "no single prefix explains it"
    if change is not None:
        old, new, count = change
        hint = f"likely prefix: {old!r} became {new!r} ({count} names)"
        if not old:
            hint = f"likely prefix: {new!r} was put in front of {count} names"
    text = (
        f"{len(lost)} of {len(left.inventory)} names are not on the right, {len(extra)} there are new; {hint}; "
        f"left has {', '.join(lost[:3])}; right has {', '.join(extra[:3])}"
    )
    return [finding("mass-mismatch", text, side="both", count=len(lost))]


def likely_prefix(lost: list[str], extra: list[str]) -> tuple[str, str, int] | None:
    """(old prefix, new prefix, names explained) of the change that explains most names, if it explains half of them."""
    by_tail: dict[str, list[str]] = {}
    for name in extra:
        parts = name.split(".")
        for cut in range(len(parts)):
            by_tail.setdefault(".".join(parts[cut:]), []).append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in lost:
        parts = name.split(".")
        for cut in range(len(parts)):
            tail = ".".join(parts[cut:])
            matches = by_tail.get(tail, [])
            if len(matches) == 1:
                votes[name.removesuffix(tail), matches[0].removesuffix(tail)] += 1
                break
    if not votes:
        return None
    (old, new), count = votes.most_common(1)[0]
    return (old, new, count) if count * 2 >= len(lost) else None
