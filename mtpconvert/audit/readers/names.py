"""What the names and dtypes of an inventory say, each thing worked out once, when it is first asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from mtpconvert.tensors import Inventory

EXPERTS = ".experts."
Stems = dict[str, list[str]]  # what stands before ".experts." in a name (the name itself where there is none) -> names

_NO_DIGITS = {ord(digit): "#" for digit in "0123456789"}


def stems_of(names: Iterable[str]) -> Stems:
    """``names`` by their stems, which are a fiftieth of them in a model with hundreds of experts."""
    stems: Stems = defaultdict(list)
    for name in names:
        stems[name.partition(EXPERTS)[0]].append(name)
    return dict(stems)


class Names:
    """Of one ``inventory``, which does not change."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory

    @cached_property
    def stems(self) -> Stems:
        return stems_of(self.inventory)

    @cached_property
    def templates(self) -> list[str]:
        """One name for each set of names that differ in their numbers only, for checks that read names as words.

        Of experts only those of number 0: the others differ from it by their number, or another check says so.
        """
        first = EXPERTS + "0."
        names = [
            name
            for stem, members in self.stems.items()
            for name in members
            if name == stem or name.startswith(first, len(stem))
        ]
        return list({name.translate(_NO_DIGITS): name for name in reversed(names)}.values())

    @cached_property
    def dtypes(self) -> set[tuple[str, int]]:
        """Every dtype that occurs, with every number of axes that its tensors have."""
        return {(spec.dtype, len(spec.shape)) for spec in self.inventory.values()}
