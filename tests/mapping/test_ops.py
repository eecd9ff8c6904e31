"""Each op against a rearrangement in plain numpy, written from megatron-core's sources and not from the op.

An op's tiles are applied by ``apply`` below, which knows only what Tile and Block say of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconvert.errors import NotABijectionError
from mtpconvert.mapping.ops import OPS, Op, expert_stack
from mtpconvert.mapping.prove import prove
from mtpconvert.tensors import Fill, Tile

Arrays = dict[str, np.ndarray]
small = st.integers(1, 4)
rest = st.lists(st.integers(1, 3), max_size=2)


def unique(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Every element of every tensor is a number of its own, never 0."""
    at, arrays = 1, {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        arrays[name] = np.arange(at, at + count).reshape(shape)
        at += count
    return arrays


def apply(pieces: Sequence[object], hf: Arrays) -> Arrays:
    """The Megatron side that the tiles make of ``hf``; what no tile writes is -1, what a Fill covers 0."""
    mcore: Arrays = {}
    for piece in pieces:
        assert isinstance(piece, Tile | Fill)
        block = piece.mcore
        if block.tensor not in mcore:
            mcore[block.tensor] = np.full(block.shape, -1)
        target = mcore[block.tensor].reshape(block.grid)[(..., *(slice(a, b) for a, b in block.box))]
        if isinstance(piece, Fill):
            target[...] = 0
            continue
        source = hf[piece.hf.tensor]
        assert source.shape == piece.hf.shape
        part = source.reshape(piece.hf.grid)[tuple(slice(a, b) for a, b in piece.hf.box)]
        if piece.perm is not None:
            part = part.reshape(piece.hf.extents).transpose(piece.perm)
        target[...] = part.reshape(target.shape)
    return mcore


def made(op: Op, hf: Sequence[str], dims: Sequence[int], arrays: Arrays, padded: int = 0) -> np.ndarray:
    """The one Megatron tensor "m" that the op makes, its tiles proven first."""
    pieces = list(op(hf, ["m"], tuple(dims), padded))
    prove([p for p in pieces if isinstance(p, Tile)], [p for p in pieces if isinstance(p, Fill)])
    mcore = apply(pieces, arrays)
    assert list(mcore) == ["m"]
    return mcore["m"]


@given(st.lists(small, max_size=4))
def test_rename(dims: list[int]) -> None:
    arrays = unique({"a": tuple(dims)})
    assert np.array_equal(made(OPS["rename"], ["a"], dims, arrays), arrays["a"])


@given(small, rest)
def test_gate_up_concat(units: int, others: list[int]) -> None:
    """mlp.py: torch.chunk(x, 2, dim=-1) of fc1's output, activation on the first chunk: all of gate comes first."""
    arrays = unique({"gate": (units, *others), "up": (units, *others)})
    expected = np.concatenate([arrays["gate"], arrays["up"]], axis=0)
    assert np.array_equal(made(OPS["gate_up_concat"], ["gate", "up"], [units, *others], arrays), expected)


@given(small, small, small, rest)
def test_qkv_interleave(groups: int, queries: int, head: int, others: list[int]) -> None:
    """attention.py: "q1 q2 k1 v1 | q3 q4 k2 v2 | ...": head by head, here in loops instead of a reshape."""
    arrays = unique(
        {"q": (groups * queries * head, *others), "k": (groups * head, *others), "v": (groups * head, *others)}
    )
    rows = []
    for group in range(groups):
        for query in range(queries):
            number = group * queries + query
            rows += list(arrays["q"][number * head : (number + 1) * head])
        rows += list(arrays["k"][group * head : (group + 1) * head])
        rows += list(arrays["v"][group * head : (group + 1) * head])
    got = made(OPS["qkv_interleave"], ["q", "k", "v"], [groups, queries, head, *others], arrays)
    assert np.array_equal(got, np.stack(rows))


@given(small, small, small, rest)
def test_fused_qkv_interleave(groups: int, queries: int, head: int, others: list[int]) -> None:
    """modeling_phi3.py:Phi3Attention slices qkv_proj's rows into all queries, all keys, all values."""
    arrays = unique({"qkv": (groups * (queries + 2) * head, *others)})
    sizes = [groups * queries * head, groups * head]
    split = dict(zip("qkv", np.split(arrays["qkv"], np.cumsum(sizes)), strict=True))
    dims = [groups, queries, head, *others]
    wanted = made(OPS["qkv_interleave"], ["q", "k", "v"], dims, split)
    assert np.array_equal(made(OPS["fused_qkv_interleave"], ["qkv"], dims, arrays), wanted)


@given(small, small, small, rest)
def test_gated_qkv_interleave(groups: int, queries: int, head: int, others: list[int]) -> None:
    """attention.py:get_query_key_value_tensors (output_gate): per group Q queries, Q gates, key, value. In transformers
    ``chunk(q_proj(x).view(.., heads, 2 * head_dim), 2)`` gives each head's query and gate."""
    heads = groups * queries
    arrays = unique({"q": (heads * 2 * head, *others), "k": (groups * head, *others), "v": (groups * head, *others)})
    query, gate = np.split(arrays["q"].reshape(heads, 2 * head, *others), 2, axis=1)
    rows = []
    for group in range(groups):
        mine = slice(group * queries, (group + 1) * queries)
        rows += [*query[mine], *gate[mine]]
        rows += [arrays[one].reshape(groups, head, *others)[group] for one in ("k", "v")]
    expected = np.concatenate(rows)
    dims = [groups, queries, head, *others]
    assert np.array_equal(made(OPS["gated_qkv_interleave"], ["q", "k", "v"], dims, arrays), expected)


@given(small, small, small, small, rest)
def test_qkv_interleave_uneven(groups: int, queries: int, head: int, value: int, others: list[int]) -> None:
    """Bridge's MiMoV2FlashSelfAttention.get_query_key_value_tensors views the rows as [groups, Q D + D + DV] and splits
    them so; modeling_mimo_v2_flash.py:MiMoV2FlashAttention views q, k and v as [heads, head] and [heads, value]."""
    arrays = unique(
        {"q": (groups * queries * head, *others), "k": (groups * head, *others), "v": (groups * value, *others)}
    )
    got = made(OPS["qkv_interleave_uneven"], ["q", "k", "v"], [groups, queries, head, value, *others], arrays)
    assert got.shape == (groups * (queries * head + head + value), *others)
    split = np.split(got.reshape(groups, -1, *others), np.cumsum([queries * head, head]), axis=1)
    for name, part, size in zip("qkv", split, (head, head, value), strict=True):
        heads = arrays[name].reshape(groups, -1, size, *others)
        assert np.array_equal(part.reshape(heads.shape), heads)
    if value == head:
        even = made(OPS["qkv_interleave"], ["q", "k", "v"], [groups, queries, head, *others], arrays)
        assert np.array_equal(got, even)


@given(small, st.lists(small, min_size=2, max_size=4), rest)
def test_rows_split(groups: int, parts: list[int], others: list[int]) -> None:
    """modeling_qwen3_next.py:fix_query_key_value_ordering: a view by key head, split along its rows, flattened."""
    arrays = unique({"a": (groups * sum(parts), *others)})
    names = [f"m{number}" for number in range(len(parts))]
    pieces = list(OPS["rows_split"](["a"], names, (groups, *parts, *others), 0))
    prove([piece for piece in pieces if isinstance(piece, Tile)], [])
    split = np.split(arrays["a"].reshape(groups, sum(parts), *others), np.cumsum(parts)[:-1], axis=1)
    made_of = apply(pieces, arrays)
    assert list(made_of) == names
    for name, part in zip(names, split, strict=True):
        assert np.array_equal(made_of[name], part.reshape(-1, *others))


@given(small, small, rest)
def test_gate_up_alternate(experts: int, units: int, others: list[int]) -> None:
    """modeling_gpt_oss.py:GptOssExperts: gate is [..., ::2], up [..., 1::2] of x @ weight; the bias has no rows."""
    arrays = unique({"gate_up": (experts, *others, 2 * units)})
    halves = [np.moveaxis(arrays["gate_up"][..., first::2], -1, 1) for first in (0, 1)]
    got = made(OPS["gate_up_alternate"], ["gate_up"], [experts, units, *others], arrays)
    assert np.array_equal(got, np.concatenate(halves, axis=1))


@given(small, small, rest)
def test_transposed(rows: int, columns: int, lead: list[int]) -> None:
    arrays = unique({"a": (*lead, columns, rows)})
    got = made(OPS["transposed"], ["a"], [*lead, rows, columns], arrays)
    assert np.array_equal(got, np.swapaxes(arrays["a"], -1, -2))


@given(small, st.integers(1, 5))
def test_halves_swap(rows: int, half: int) -> None:
    arrays = unique({"a": (rows, 2 * half)})
    expected = np.hstack([arrays["a"][:, half:], arrays["a"][:, :half]])
    assert np.array_equal(made(OPS["halves_swap"], ["a"], [rows, 2 * half], arrays), expected)


@pytest.mark.parametrize("columns", [1, 3, 7])
def test_halves_swap_of_an_odd_number_of_columns_is_no_bijection(columns: int) -> None:
    tiles = [piece for piece in OPS["halves_swap"](["a"], ["m"], (2, columns), 0) if isinstance(piece, Tile)]
    with pytest.raises(NotABijectionError, match="does not refine"):
        prove(tiles, [])


@given(small, st.integers(0, 5), rest)
def test_pad_vocab(vocab: int, padding: int, others: list[int]) -> None:
    arrays = unique({"a": (vocab, *others)})
    expected = np.concatenate([arrays["a"], np.zeros((padding, *others), int)])
    assert np.array_equal(made(OPS["pad_vocab"], ["a"], [vocab, *others], arrays, vocab + padding), expected)


def test_pad_vocab_to_fewer_rows_is_no_bijection() -> None:
    tiles = [piece for piece in OPS["pad_vocab"](["a"], ["m"], (4, 2), 3) if isinstance(piece, Tile)]
    with pytest.raises(NotABijectionError, match="outside its grid"):
        prove(tiles, [])


@given(small, small, rest)
def test_expert_stack_of_rename(experts: int, units: int, others: list[int]) -> None:
    """moe/experts.py:sharded_state_dict: one key for all experts, expert e at index e of a leading axis."""
    arrays = unique({f"x.{e}.down": (units, *others) for e in range(experts)})
    expected = np.stack([arrays[f"x.{e}.down"] for e in range(experts)])
    got = made(expert_stack(OPS["rename"], experts), ["x.{e}.down"], [units, *others], arrays)
    assert np.array_equal(got, expected)


@given(small, small, rest)
def test_expert_stack_of_gate_up_concat(experts: int, units: int, others: list[int]) -> None:
    names = [f"x.{e}.{part}" for e in range(experts) for part in ("gate", "up")]
    arrays = unique(dict.fromkeys(names, (units, *others)))
    expected = np.stack([np.concatenate([arrays[f"x.{e}.gate"], arrays[f"x.{e}.up"]]) for e in range(experts)])
    op = expert_stack(OPS["gate_up_concat"], experts)
    assert np.array_equal(made(op, ["x.{e}.gate", "x.{e}.up"], [units, *others], arrays), expected)


@given(small, small, small, small)
def test_swapped_sources_make_another_tensor(groups: int, queries: int, head: int, width: int) -> None:
    """The same op with k and v exchanged is a bijection too: the proof cannot see it, these tests must."""
    arrays = unique({"q": (groups * queries * head, width), "k": (groups * head, width), "v": (groups * head, width)})
    op, dims = OPS["qkv_interleave"], [groups, queries, head, width]
    assert not np.array_equal(made(op, ["q", "k", "v"], dims, arrays), made(op, ["q", "v", "k"], dims, arrays))
