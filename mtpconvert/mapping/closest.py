"""Which known mapping an unknown model is closest to: by the architecture's name, and by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches

from mtpconvert.mapping.model import Mapping

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|\{[^{}]*\}")


def pattern_of(name: str) -> str:
    """The name with every number that is a path segment, and all in braces, as ``#``."""
    return _NUMBER.sub("#", name)


def patterns(names: Collection[str]) -> set[str]:
    """One pattern for all names that differ in their numbers only."""
    return {pattern_of(name) for name in names}


def row_patterns(mapping: Mapping) -> set[str]:
    """The patterns of all HF names that the rows of ``mapping`` may have, whatever a config switches off."""
    groups = {name: mapping.variants.get(name, (name,)) for place in mapping.places for name in place.rows}
    return {
        pattern_of(place.hf + name)
        for place in mapping.places
        for chosen in place.rows
        for group in groups[chosen]
        for row in mapping.rows[group]
        for name in row.hf
    }


def by_name(architecture: str, known: Collection[str]) -> str:
    """The closest name of ``known``, which is not empty."""
    return get_close_matches(architecture, sorted(known), n=1, cutoff=0.0)[0]


def by_tensors(names: Collection[str], mappings: Collection[Mapping]) -> list[tuple[Mapping, int]]:
    """Mappings with the number of the source's patterns that their rows have, best first.

    Of two with the same number the one with fewer rows beside them comes first.
    """
    wanted = patterns(names)
    scored = []
    for mapping in mappings:
        rows = row_patterns(mapping)
        scored.append((mapping, len(wanted & rows), len(rows - wanted)))
    scored.sort(key=lambda entry: (-entry[1], entry[2], entry[0].architecture))
    return [(mapping, shared) for mapping, shared, _ in scored]
