"""Other prefixes that published files of one architecture have, and the mapping in the words of the file at hand.

transformers renames while it loads (``conversion_mapping.py``), so both spellings are of one model. The names of the
source, or of the reference on the way back, choose: what came in one spelling is written in that one again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Mapping as MappingOf
from dataclasses import replace
from pathlib import Path

from mtpconvert.errors import CheckpointError
from mtpconvert.mapping.model import Mapping, Place, Row, Spelling
from mtpconvert.mapping.toml_values import fail, known, table_of, tables_of, text

Prefixes = list[tuple[str, int]]  # prefix of a name, and the spelling it belongs to: 0 is the mapping's own


def load_spellings(
    file: Path,
    value: object,
    places: tuple[Place, ...],
    variants: MappingOf[str, tuple[str, ...]],
) -> tuple[Spelling, ...]:
    """The ``[[spelling]]`` tables of a mapping file.

    Raises MappingError for a prefix without its dot at the end, for one that goes on behind the prefix of a place, and
    for a row group whose names are whole in one place and parts in another.
    """
    spellings = tuple(
        _one(file, f"[[spelling]], entry {number}", entry)
        for number, entry in enumerate(tables_of(value, file, "[[spelling]]"), 1)
    )
    for own in {own for spelling in spellings for own, _ in spelling.prefixes}:
        for place in places:
            if place.hf and own.startswith(place.hf) and own != place.hf:
                fail(file, "[[spelling]]", f"'{own}' goes on behind the place '{place.hf}': give the place less")
    rooted, others = (_groups([p for p in places if (p.hf == "") == at_root], variants) for at_root in (True, False))
    if spellings and (both := sorted(rooted & others)):
        fail(file, "[[spelling]]", f"row group {both[0]} is placed with and without a prefix")
    return spellings


def _one(file: Path, where: str, entry: MappingOf[str, object]) -> Spelling:
    known(entry, {"prefixes", "source"}, file, where)
    table = table_of(entry.get("prefixes", {}), file, f"{where}, prefixes")
    if not table:
        fail(file, where, "'prefixes' renames nothing")
    pairs = tuple((own, text(file, where, table, own)) for own in table)
    for prefix in (one for pair in pairs for one in pair):
        if not prefix.endswith(".") or prefix.startswith("."):
            fail(file, where, f"'{prefix}' is no prefix of names, which ends with a dot")
    return Spelling(pairs, text(file, where, entry, "source"))


def _groups(places: list[Place], variants: MappingOf[str, tuple[str, ...]]) -> set[str]:
    return {group for place in places for name in place.rows for group in variants.get(name, (name,))}


def spelled(mapping: Mapping, names: Iterable[str]) -> Mapping:
    """``mapping`` with every text of the HF side in the spelling that ``names`` have; its own where they show none.

    Raises CheckpointError where they show two, naming a tensor of either.
    """
    if not mapping.spellings:
        return mapping
    number = _shown(mapping, names)
    if number == 0:
        return mapping
    # a longer prefix says more: "model.language_model." before "model."
    pairs = sorted(mapping.spellings[number - 1].prefixes, key=lambda pair: len(pair[0]), reverse=True)

    def other(name: str) -> str:
        for own, instead in pairs:
            if name.startswith(own):
                return instead + name.removeprefix(own)
        return name

    rooted = _groups([place for place in mapping.places if not place.hf], mapping.variants)
    rows = {
        group: tuple(_row(row, other, whole=group in rooted) for row in rows) for group, rows in mapping.rows.items()
    }
    mtp = mapping.mtp
    if mtp is not None and mtp.present is not None:
        mtp = replace(mtp, present=other(mtp.present))
    return replace(
        mapping,
        places=tuple(replace(place, hf=other(place.hf)) for place in mapping.places),
        rows=rows,
        mtp=mtp,
        passthrough=tuple(other(prefix) for prefix in mapping.passthrough),
    )


def _row(row: Row, other: Callable[[str], str], *, whole: bool) -> Row:
    """``whole``: the row's HF names are whole names, and not parts behind the prefix of a place."""
    names = tuple(other(name) for name in row.hf) if whole else row.hf
    return replace(row, hf=names, source=None if row.source is None else other(row.source))


def _shown(mapping: Mapping, names: Iterable[str]) -> int:
    """The spelling that all ``names`` may have: 0 is the mapping's own, n that of its n-th table."""
    prefixes: Prefixes = []
    for number, spelling in enumerate(mapping.spellings, 1):
        for own, instead in spelling.prefixes:
            prefixes += [(own, 0), (instead, number)]
    prefixes.sort(key=lambda entry: len(entry[0]), reverse=True)
    left, first = set(range(len(mapping.spellings) + 1)), ""
    for name in names:
        found = next((prefix for prefix, _ in prefixes if name.startswith(prefix)), None)
        if found is None:
            continue
        shows = {number for prefix, number in prefixes if prefix == found}
        if not left & shows:
            raise CheckpointError(
                f"names of one model are spelled in two ways: {first} and {name}",
                where="the tensor names of the checkpoint",
                next_step="the file was put together of two saves: rename the tensors of one of them as the other's",
            )
        first = first if left <= shows else name
        left &= shows
    return min(left)
