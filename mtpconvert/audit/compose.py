"""What must equal what: the pairs of two sides, through the roles, or by name where both are of one framework."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from mtpconvert.audit.pairs import Pair, meet, narrowed, order_within
from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.audit.roles.vocabulary import is_minus_one, scale_of
from mtpconvert.tensors import Box

Key = tuple[str, str]
Holders = dict[Key, list[Placement]]


def holders_of(placements: list[Placement]) -> Holders:
    held: Holders = defaultdict(list)
    for placement in placements:
        held[key_of(placement.role)].append(placement)
    for group in held.values():
        group.sort(key=lambda placement: (placement.copy, placement.part))
    return held


def key_of(role: Role) -> Key:
    """Place and name. The scale of a norm and the scale less one say the same of the model, so they share a key."""
    return role.place, scale_of(role.name)


def elect(group: list[Placement], side: str) -> tuple[list[Placement], list[Pair]]:
    """The holders that count (disjoint, in order), and the pairs that prove the others equal to them."""
    chosen: list[Placement] = []
    copies: list[Pair] = []
    for placement in group:
        hits = [other for other in _near(chosen, placement.part) if meet(other.part, placement.part)]
        if not hits:
            position = bisect_left([other.part for other in chosen], placement.part)
            chosen.insert(position, placement)
        for other in hits:
            copies.append(_pair(other, placement, meet(other.part, placement.part) or (), side))
    return chosen, copies


def _near(group: list[Placement], part: Box) -> list[Placement]:
    """Those of a sorted group that may meet ``part``. Exact where all are one wide along the first axis (experts)."""
    if len(group) < 8 or not part or any(other.part[0][1] - other.part[0][0] != 1 for other in (group[0], group[-1])):
        return group
    low = bisect_left(group, part[0][0], key=lambda other: other.part[0][0])
    high = bisect_left(group, part[0][1], key=lambda other: other.part[0][0])
    if low and group[low - 1].part[0][1] > part[0][0]:
        return group  # not one wide after all
    return group[low:high]


def _pair(first: Placement, second: Placement, part: Box, copy: str = "") -> Pair:
    return Pair(
        narrowed(first, part), narrowed(second, part), first.role, part,
        order_within(first, part), order_within(second, part), copy, _less_one(first.role, second.role),
    )  # fmt: skip


def _less_one(first: Role, second: Role) -> str:
    if first.name == second.name:
        return ""
    return "left" if is_minus_one(first.name) else "right"


def compose(left: list[Placement], right: list[Placement]) -> list[Pair]:
    """Pairs between the elected holders of two groups of one role, over the region that both hold."""
    return [
        _pair(first, second, part)
        for first in left
        for second in _near(right, first.part)
        if (part := meet(first.part, second.part)) is not None
    ]


def uncovered(group: list[Placement], other: list[Placement]) -> bool:
    """Whether the elements held by ``group`` are not all held by ``other`` (volumes; both are disjoint)."""

    def volume(box: Box) -> int:
        size = 1
        for start, stop in box:
            size *= stop - start
        return size

    shared = sum(volume(part) for a in group for b in _near(other, a.part) if (part := meet(a.part, b.part)))
    return shared != sum(volume(a.part) for a in group)


def role_words(role: Role) -> str:
    """ "queries of MTP layer 0", for people: the role's name with where it is."""
    place = role.place
    if place.startswith("mtp."):
        return f"{role.name} of MTP layer {place[4:]}"
    return f"{role.name} of trunk layer {place[6:]}" if place.startswith("trunk.") else role.name
