"""Pieces that stand in each other's place, in words: gate and up, k and v, halves, experts, layers."""

from __future__ import annotations

from mtpconvert.audit.compose import role_words
from mtpconvert.audit.pairs import Pair
from mtpconvert.audit.roles.vocabulary import ROLES

_SAID: dict[frozenset[str], str] = {
    frozenset({"mlp.gate", "mlp.up"}): "gate and up exchanged",
    frozenset({"expert.gate", "expert.up"}): "gate and up exchanged",
    frozenset({"shared.gate", "shared.up"}): "gate and up of the shared expert exchanged",
    frozenset({"attn.k", "attn.v"}): "k and v exchanged",
    frozenset({"attn.q", "attn.k"}): "q and k exchanged",
    frozenset({"attn.k.bias", "attn.v.bias"}): "k and v exchanged",
    frozenset({"mtp.proj.embedding", "mtp.proj.hidden"}): "halves exchanged (embedding and hidden state)",
    frozenset({"mtp.embedding_norm", "mtp.hidden_norm"}): "enorm and hnorm exchanged",
    frozenset({"attn.q_norm", "attn.k_norm"}): "q_norm and k_norm exchanged",
    frozenset({"attn.input_norm", "mlp.norm"}): "input norm and feed-forward norm exchanged",
    frozenset({"embedding", "head"}): "embedding and head exchanged",
}


def exchange_words(moves: list[tuple[Pair, Pair, bool]]) -> str:
    """``moves``: (piece, piece whose bytes stand in its place, whether the other way holds too)."""
    piece, other, mutual = moves[0]
    if piece.role is None or other.role is None:
        verb = "exchanged with" if mutual else "holds the bytes of"
        return f"{verb} {other.left.tensor}"
    if all(_key(a) == _key(b) for a, b, _ in moves):
        return _indices(moves)
    if all(a.role and b.role and a.role.name == b.role.name for a, b, _ in moves):
        verb = "exchanged with" if all(mutual for _, _, mutual in moves) else "holds the values of"
        place = other.role.place
        return f"{verb} {_layer(place)} ({other.left.tensor})"
    names = frozenset({piece.role.name, other.role.name})
    if all(mutual for _, _, mutual in moves) and piece.role.place == other.role.place:
        return _SAID.get(names, f"{piece.role.name} and {other.role.name} exchanged")
    if names in _SAID and piece.role.place == other.role.place:
        return f"{role_words(piece.role)} holds the values of {other.role.name}"
    return f"holds the values of {role_words(other.role)} ({other.left.tensor})"


def _key(pair: Pair) -> tuple[str, str] | None:
    return (pair.role.place, pair.role.name) if pair.role is not None else None


def _layer(place: str) -> str:
    return (
        f"MTP layer {place[4:]}" if place.startswith("mtp.") else f"trunk layer {place[6:]}" if place else "the model's"
    )


def _indices(moves: list[tuple[Pair, Pair, bool]]) -> str:
    """Same meaning, other index along the first axis: experts (or heads) that changed places."""
    role = moves[0][0].role
    assert role is not None
    axis = ROLES.get(role.name, (("part",), ""))[0][0]
    take = {a.part[0][0]: b.part[0][0] for a, b, _ in moves if a.part and b.part}
    if len(moves) == 1 and moves[0][2]:
        take |= {j: i for i, j in take.items()}  # the other half of the exchange is in another tensor
    return permutation_words(take, axis, role.shape[0])


def permutation_words(take: dict[int, int], axis: str, count: int) -> str:
    """``take[i] = j``: place i holds what belongs to place j."""
    swaps = sorted((i, j) for i, j in take.items() if i < j and take.get(j) == i)
    if 2 * len(swaps) == len(take):
        if len(swaps) > 2 and all(i + j == count - 1 for i, j in swaps):
            return f"{axis}s in reverse order"
        if len(swaps) <= 3:
            return (
                f"{axis}s {' and '.join(f'{i} and {j}' if len(swaps) == 1 else f'{i}/{j}' for i, j in swaps)} exchanged"
            )
    shifts = {(j - i) % count for i, j in take.items()}
    if len(shifts) == 1 and len(take) == count:
        shift = shifts.pop()
        if 2 * shift == count:
            return f"halves exchanged along {axis}s"
        return f"{axis}s rotated by {shift if shift <= count // 2 else shift - count}"
    if len(take) == 1:
        i, j = next(iter(take.items()))
        return f"{axis} {i} holds the values of {axis} {j}"
    half = count // 2
    if count % 2 == 0 and all(j == (i % 2) * half + i // 2 for i, j in take.items()) and len(take) >= count - 2:
        return f"{axis}s interleaved (halves taken alternately)"
    if count % 2 == 0 and all(i == (j % 2) * half + j // 2 for i, j in take.items()) and len(take) >= count - 2:
        return f"{axis}s de-interleaved (even ones first)"
    if len(take) == count or set(take) == set(take.values()):
        return f"{axis}s permuted"
    shown = ", ".join(f"{i} holds {j}'s" for i, j in sorted(take.items())[:4])
    return f"{axis}s misplaced ({shown}{' ...' if len(take) > 4 else ''})"
