"""Sentences about a conversion that both directions say."""

from __future__ import annotations

from mtpconvert.convert.arguments import mtp_spec_layer
from mtpconvert.mapping.plan import Plan


def drop_notes(plan: Plan) -> list[str]:
    """What ``--mtp drop`` left out, and what config.json says after."""
    if not plan.dropped:
        return []
    total = sum(spec.nbytes for spec in plan.dropped)
    after = "" if plan.mtp.key is None else f"; config.json now says {plan.mtp.key} = 0"
    return [f"MTP DROPPED BY REQUEST: {len(plan.dropped)} tensors, {total:,} bytes{after}"]


def spec_notes(plan: Plan) -> list[str]:
    """What a launch has to do by itself where the MTP layers are not like the last decoder layer."""
    like = mtp_spec_layer(plan.mcore)
    if like < 0:
        return []
    return [
        f"the MTP layers are like decoder layer {like}, not like the last one, whose spec Megatron's stock MTP block"
        f" repeats: give get_gpt_mtp_block_spec the spec of layer {like}, or the checkpoint does not load"
    ]
