"""Causes that show in the order of elements: a transposition, groups concatenated, ranks interleaved, rows moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any

from mtpconvert.audit.exchange import permutation_words
from mtpconvert.audit.roles.algebra import Placement

_RANKS = (2, 4, 8, 16)


def layout_cause(expected: Any, found: Any, roles: dict[str, Placement]) -> str | None:
    """``expected`` and ``found``: the whole tensor of the right, as it should be and as it is."""
    import numpy as np

    for words, rearrange in _hypotheses(expected.shape, roles):
        guess = rearrange(expected)
        if guess is not None and guess.size == found.size and np.array_equal(guess.reshape(found.shape), found):
            return words
    for shift in _row_shifts(expected, found, 0) if expected.ndim > 1 else ():
        if np.array_equal(np.roll(expected, -shift, 0), found):
            return (
                "halves exchanged along rows"
                if 2 * shift == len(found)
                else f"rows rotated by {_signed(shift, len(found))}"
            )
    return None


def _signed(shift: int, count: int) -> int:
    return shift if 2 * shift <= count else shift - count


def _row_shifts(expected: Any, found: Any, row: int) -> list[int]:
    """Shifts by which the row of ``expected`` that stands at ``row`` of ``found`` came there (the first few)."""
    import numpy as np

    flat, wanted = expected.reshape(len(expected), -1), found[row].reshape(-1)
    return [int(at) - row for at in np.flatnonzero((flat == wanted).all(axis=1))[:4] if at != row]


def _hypotheses(shape: tuple[int, ...], roles: dict[str, Placement]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    for names in (("attn.q", "attn.k", "attn.v"), ("attn.q.bias", "attn.k.bias", "attn.v.bias")):
        if all(name in roles for name in names):
            (heads, dim), groups = roles[names[0]].role.shape[:2], roles[names[1]].role.shape[0]
            sizes = {"groups": groups, "per": heads // groups, "dim": dim}
            yield "query groups concatenated instead of interleaved", partial(_concatenated, **sizes)
            yield "query groups interleaved instead of concatenated", partial(_interleaved, **sizes)
            yield "query groups strided (heads h, h + groups, ...)", partial(_strided, **sizes)
    for gate, up in (("mlp.gate", "mlp.up"), ("shared.gate", "shared.up"), ("expert.gate", "expert.up")):
        if gate in roles and up in roles:
            lead = len(shape) - 2
            for ranks in _RANKS:
                words = f"gate and up interleaved by {ranks} tensor-parallel ranks"
                yield words, partial(_per_rank, ranks=ranks, lead=lead)
            yield "gate and up alternate row by row", partial(_per_rank, ranks=shape[lead] // 2, lead=lead)
    if len(shape) >= 2:
        yield "transposed", lambda e: e.swapaxes(-1, -2)
        yield "transposed as a whole", lambda e: e.T


def _concatenated(e: Any, groups: int, per: int, dim: int) -> Any:
    import numpy as np

    if e.shape[0] != groups * (per + 2) * dim:
        return None
    parts = e.reshape(groups, per + 2, dim, -1)
    pieces = (parts[:, :per], parts[:, per : per + 1], parts[:, per + 1 :])
    return np.concatenate([piece.reshape(-1, parts.shape[-1]) for piece in pieces])


def _interleaved(e: Any, groups: int, per: int, dim: int) -> Any:
    import numpy as np

    if e.shape[0] != groups * (per + 2) * dim:
        return None
    rows = e.reshape(groups * (per + 2), dim, -1)
    q, k, v = rows[: groups * per], rows[groups * per :][:groups], rows[groups * (per + 1) :]
    return np.concatenate([q.reshape(groups, per, dim, -1), k[:, None], v[:, None]], axis=1)


def _strided(e: Any, groups: int, per: int, dim: int) -> Any:
    import numpy as np

    if e.shape[0] != groups * (per + 2) * dim or groups == 1 or per == 1:
        return None
    parts = e.reshape(groups, per + 2, dim, -1)
    q = parts[:, :per].reshape(groups * per, dim, -1).reshape(per, groups, dim, -1).swapaxes(0, 1)
    return np.concatenate([q, parts[:, per:]], axis=1)


def _per_rank(e: Any, ranks: int, lead: int) -> Any:
    if lead < 0 or e.shape[lead] % (2 * ranks) or ranks < 2:
        return None
    half = e.shape[lead] // 2
    return e.reshape(*e.shape[:lead], 2, ranks, half // ranks, *e.shape[lead + 1 :]).swapaxes(lead, lead + 1)


def tail_cause(expected: Any, found: Any) -> str | None:
    """From some element on nothing was written (zeros), or everything stands a few elements too far."""
    import numpy as np

    one, two = expected.reshape(-1), found.reshape(-1)
    differs = np.flatnonzero(one != two)
    if not len(differs):
        return None
    first, last = int(differs[0]), int(differs[-1])
    if first and not two[first:].any():
        return f"zero from element {first} of {one.size} on (a copy that stopped early)"
    if not two[first : last + 1].any():
        return f"{last + 1 - first} elements from {first} on are zero (a stretch that was never written)"
    columns = expected.shape[-1] if expected.ndim > 1 else 1
    shifts = {1, 2, columns, 2 * columns}
    if expected.ndim > 1 and first // columns < len(expected):
        row = first // columns
        both = _row_shifts(expected, found, row) + _row_shifts(found, expected, row)
        shifts |= {abs(shift) * columns for shift in both} if expected.ndim == 2 else set()
    for shift in sorted(shifts):
        if shift < one.size and one.size - first > 2 * shift:
            if np.array_equal(one[first : -shift or None], two[first + shift :]):
                return f"everything from element {first} on stands {_elements(shift, columns)} too far"
            if np.array_equal(one[first + shift :], two[first : one.size - shift]):
                return f"everything from element {first} on stands {_elements(shift, columns)} too early"
    return None


def _elements(shift: int, columns: int) -> str:
    if columns > 1 and shift % columns == 0:
        return f"{shift // columns} row{'s' if shift > columns else ''}"
    return f"{shift} element{'s' if shift > 1 else ''}"


def slice_cause(expected: Any, found: Any, axes: tuple[str, ...]) -> str | None:
    """Slices along one axis that changed places; leading axes together are rows."""
    import numpy as np

    if expected.shape != found.shape:
        return None
    for axis, name in enumerate(axes):
        take = _moved(np.moveaxis(expected, axis, 0), np.moveaxis(found, axis, 0))
        if take:
            return permutation_words(take, name, expected.shape[axis])
    if expected.ndim > 2:
        rows = (-1, expected.shape[-1])
        take = _moved(expected.reshape(rows), found.reshape(rows))
        if take:
            return permutation_words(take, "row", expected.size // expected.shape[-1])
    if (
        expected.ndim >= 2
        and expected.shape[-1] == expected.shape[-2]
        and np.array_equal(expected.swapaxes(-1, -2), found)
    ):
        return "transposed"
    if expected.ndim >= 2 and np.array_equal(expected.swapaxes(-1, -2).reshape(found.shape), found):
        return "transposed"
    return None


def _moved(one: Any, two: Any) -> dict[int, int] | None:
    """{place: whose slice stands there} for the slices that differ, if all of them are found; None otherwise."""
    owners: dict[bytes, int] = {}
    before = [blake2b(part.tobytes(), digest_size=16).digest() for part in one]
    after = [blake2b(part.tobytes(), digest_size=16).digest() for part in two]
    for place, digest in enumerate(before):
        owners.setdefault(digest, place)
    take = {place: owners.get(digest, -1) for place, digest in enumerate(after) if digest != before[place]}
    return None if -1 in take.values() or not take else take
