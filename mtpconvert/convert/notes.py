"""Sentences about a conversion that both directions say."""

from __future__ import annotations

from mtpconvert.mapping.plan import Plan


def drop_notes(plan: Plan) -> list[str]:
    """What ``--mtp drop`` left out, and what config.json says after."""
    if not plan.dropped:
        return []
    total = sum(spec.nbytes for spec in plan.dropped)
    after = "" if plan.mtp.key is None else f"; config.json now says {plan.mtp.key} = 0"
    return [f"MTP DROPPED BY REQUEST: {len(plan.dropped)} tensors, {total:,} bytes{after}"]
