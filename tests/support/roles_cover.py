"""Whether Placements are an exact cover of an inventory, by counting; shares nothing with the auditor's own check."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.vocabulary import ROLES
from mtpconvert.tensors import Inventory


def extents(box: Any) -> list[int]:
    return [stop - start for start, stop in box if stop - start != 1]


def check_exact_cover(found: Iterable[Placement], held: Inventory) -> None:
    """Every element of every tensor placed once; every role whole, from one holder, shaped as the vocabulary says."""
    elements = {key: np.zeros(spec.shape, int) for key, spec in held.items()}
    roles: dict[Any, Any] = defaultdict(int)
    for p in found:
        assert len(ROLES[p.role.name][0]) == len(p.role.shape) == len(p.part)
        stored = extents(p.block.box)
        assert [stored[axis] for axis in p.perm or range(len(stored))] == extents(p.part), p
        assert p.block.shape == held[p.block.tensor].shape, p
        elements[p.block.tensor].reshape(p.block.grid)[tuple(slice(*i) for i in p.block.box)] += 1
        if not p.copy:
            roles[p.role] += np.zeros(p.role.shape, int)
            roles[p.role][tuple(slice(*i) for i in p.part)] += 1
    assert {key for key, counts in elements.items() if not (counts == 1).all()} == set()
    assert [role for role, counts in roles.items() if not (counts == 1).all()] == []
