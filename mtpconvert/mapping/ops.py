"""The closed set of ops. Each says which block of which HF tensor equals which block of which Megatron tensor.

An op yields Tiles, Fills and Copies and nothing else; ``prove`` trusts none of them. ``dims`` are those of the row,
evaluated; shapes given below are in their terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mtpconvert.tensors import Block, Copy, Fill, Shape, Tile, whole

Piece = Tile | Fill | Copy
Op = Callable[[Sequence[str], Sequence[str], Shape, int], Iterator[Piece]]


def _full(shape: Shape) -> tuple[tuple[int, int], ...]:
    return tuple((0, n) for n in shape)


def rename(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """The same tensor under two names; shape ``dims``."""
    yield Tile(whole(hf[0], dims), whole(mcore[0], dims))


def gate_up_concat(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """gate and up, each ``[F, ...]``, against ``[2 F, ...]`` with all of gate first.

    Layout: megatron/core/transformer/mlp.py:apply_swiglu_sharded_factory.
    """
    units, rest = dims[0], dims[1:]
    for half in (0, 1):
        box = ((half, half + 1), (0, units), *_full(rest))
        yield Tile(whole(hf[half], dims), Block(mcore[0], (2 * units, *rest), (2, units, *rest), box))


def qkv_interleave(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """q ``[G Q D, ...]``, k and v ``[G D, ...]`` against rows that run per group: its Q queries, its key, its value.

    Layout: megatron/core/transformer/attention.py:SelfAttention.get_query_key_value_tensors.
    """
    groups, queries, head, *rest = dims
    shape = (groups * (queries + 2) * head, *rest)
    grid = (groups, queries + 2, head, *rest)
    for name, first, count in ((hf[0], 0, queries), (hf[1], queries, 1), (hf[2], queries + 1, 1)):
        part = (groups, count, head, *rest)
        source = Block(name, (groups * count * head, *rest), part, _full(part))
        box = ((0, groups), (first, first + count), (0, head), *_full(tuple(rest)))
        yield Tile(source, Block(mcore[0], shape, grid, box))


def fused_qkv_interleave(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """``qkv_interleave`` with q, k and v in one tensor ``[(G Q + 2 G) D, ...]``: all of q, all of k, all of v."""
    groups, queries, head, *rest = dims
    heads = groups * (queries + 2)
    tail = _full((head, *rest))

    def tile(at: int, size: int, first: int, boxed: tuple[int, int], parts: int) -> Tile:
        source = Block(hf[0], (heads * head, *rest), (heads, head, *rest), ((at, at + size), *tail))
        box = (boxed, (first, first + parts), *tail)
        return Tile(source, Block(mcore[0], (heads * head, *rest), (groups, queries + 2, head, *rest), box))

    for group in range(groups):  # the axis of all heads cannot be cut into groups: k and v have other ones
        yield tile(group * queries, queries, 0, (group, group + 1), queries)
    for part in (0, 1):
        yield tile(groups * (queries + part), groups, queries + part, (0, groups), 1)


def gated_qkv_interleave(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """``qkv_interleave`` with an output gate: q ``[G Q 2 D, ...]`` has each head's query, then its gate; rows run per
    group: its Q queries, its Q gates, its key, its value.

    Layout: transformers modeling_qwen3_next.py:Qwen3NextAttention.forward (chunk);
    megatron/core/transformer/attention.py:SelfAttention.get_query_key_value_tensors (output_gate).
    """
    groups, queries, head, *rest = dims
    tail = _full((head, *rest))
    shape, grid = (groups * (2 * queries + 2) * head, *rest), (groups, 2 * queries + 2, head, *rest)
    for half in (0, 1):
        box = ((0, groups), (0, queries), (half, half + 1), *tail)
        yield Tile(
            Block(hf[0], (groups * queries * 2 * head, *rest), (groups, queries, 2, head, *rest), box),
            Block(mcore[0], shape, grid, ((0, groups), (half * queries, (half + 1) * queries), *tail)),
        )
    for part in (0, 1):
        at = 2 * queries + part
        source = Block(hf[1 + part], (groups * head, *rest), (groups, 1, head, *rest), ((0, groups), (0, 1), *tail))
        yield Tile(source, Block(mcore[0], shape, grid, ((0, groups), (at, at + 1), *tail)))


def qkv_interleave_uneven(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """``qkv_interleave`` where a value head has another size: q ``[G Q D, ...]``, k ``[G D, ...]``, v ``[G DV, ...]``
    against rows that run per group: its Q queries, its key, its value.

    ``dims``: G, Q, D, DV, the rest. Layout: Megatron-Bridge models/mimo_v2_flash/modeling_mimo_v2_flash.py:
    MiMoV2FlashSelfAttention.get_query_key_value_tensors.
    """
    groups, queries, head, value, *rest = dims
    parts = (queries * head, head, value)
    total, tail = sum(parts), _full(tuple(rest))
    at = 0
    for name, rows in zip(hf, parts, strict=True):
        part = (groups, rows, *rest)
        box = ((0, groups), (at, at + rows), *tail)
        yield Tile(
            Block(name, (groups * rows, *rest), part, _full(part)),
            Block(mcore[0], (groups * total, *rest), (groups, total, *rest), box),
        )
        at += rows


def rows_split(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """Rows that run per group, a stretch for each of the Megatron tensors: ``[G (P1 + P2 + ...), ...]`` against
    ``[G P1, ...]``, ``[G P2, ...]``...

    ``dims``: G, a stretch's rows for each name, the rest. Layout: transformers modeling_qwen3_next.py:
    Qwen3NextGatedDeltaNet.fix_query_key_value_ordering; megatron/core/ssm/gated_delta_net.py:_split_tensor_factory.
    """
    groups, parts, rest = dims[0], dims[1 : 1 + len(mcore)], dims[1 + len(mcore) :]
    total = sum(parts)
    at = 0
    for name, rows in zip(mcore, parts, strict=True):
        source = Block(
            hf[0], (groups * total, *rest), (groups, total, *rest), ((0, groups), (at, at + rows), *_full(rest))
        )
        target = ((0, groups), (0, rows), *_full(rest))
        yield Tile(source, Block(name, (groups * rows, *rest), (groups, rows, *rest), target))
        at += rows


def gate_up_alternate(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """``[E, ..., 2 F]`` whose last axis takes gate and up in turns, against ``[E, 2 F, ...]`` with all of gate first.

    ``dims``: E, F, then what stands between. transformers modeling_gpt_oss.py:GptOssExperts multiplies from the left,
    so its weights are ``[E, in, out]``; megatron/core/transformer/mlp.py as for ``gate_up_concat``.
    """
    experts, units, *rest = dims
    for half in (0, 1):
        source = ((0, experts), *_full(tuple(rest)), (0, units), (half, half + 1))
        target = ((0, experts), (half, half + 1), (0, units), *_full(tuple(rest)))
        yield _turned(
            Block(hf[0], (experts, *rest, 2 * units), (experts, *rest, units, 2), source),
            Block(mcore[0], (experts, 2 * units, *rest), (experts, 2, units, *rest), target),
            (0, 1 + len(rest), *range(1, 1 + len(rest)), 2 + len(rest)),
        )


def transposed(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """``[..., C, R]`` against ``dims`` = ``[..., R, C]``: weights that are multiplied from the left."""
    *lead, rows, columns = dims
    order = (*range(len(lead)), len(lead) + 1, len(lead))
    yield _turned(whole(hf[0], (*lead, columns, rows)), whole(mcore[0], dims), order)


def _turned(hf: Block, mcore: Block, order: Sequence[int]) -> Tile:
    """The tile that takes the axes of ``hf``'s grid in this order; a perm counts only those that are longer than 1."""
    kept = [axis for axis, (start, stop) in enumerate(hf.box) if stop - start != 1]
    perm = tuple(kept.index(axis) for axis in order if axis in kept)
    return Tile(hf, mcore, None if perm == tuple(range(len(perm))) else perm)


def halves_swap(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """``[R, C]`` whose two halves of columns stand in the other order on the other side."""
    rows, columns = dims
    grid = (rows, 2, columns // 2)
    for half in (0, 1):
        box = ((0, rows), (half, half + 1), (0, columns // 2))
        other = ((0, rows), (1 - half, 2 - half), (0, columns // 2))
        yield Tile(Block(hf[0], dims, grid, box), Block(mcore[0], dims, grid, other))


def pad_vocab(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
    """``[V, ...]`` against ``[Vp, ...]`` whose last rows stand for no token.

    Layout: megatron/training/tokenizer: vocabulary padded to make_vocab_size_divisible_by x TP rows.
    """
    vocab, rest = dims[0], dims[1:]
    shape = (padded_vocab, *rest)
    yield Tile(whole(hf[0], dims), Block(mcore[0], shape, shape, ((0, vocab), *_full(rest))))
    if padded_vocab > vocab:
        yield Fill(Block(mcore[0], shape, shape, ((vocab, padded_vocab), *_full(rest))))


def expert_stack(of: Op, experts: int) -> Op:
    """One ``of`` for each expert, whose Megatron tensor is slice e of a tensor with a leading axis of all experts.

    ``{e}`` in the HF names is the expert. Layout: megatron/core/transformer/moe/experts.py:sharded_state_dict.
    """

    def stacked(hf: Sequence[str], mcore: Sequence[str], dims: Shape, padded_vocab: int) -> Iterator[Piece]:
        for expert in range(experts):
            number = str(expert)
            for piece in of([name.replace("{e}", number) for name in hf], mcore, dims, padded_vocab):
                assert isinstance(piece, Tile)  # OPS_OF_EXPERTS has only ops that yield nothing else
                inner = piece.mcore
                block = Block(
                    inner.tensor,
                    (experts, *inner.shape),
                    (experts, *inner.grid),
                    ((expert, expert + 1), *inner.box),
                )
                yield Tile(piece.hf, block, piece.perm)

    return stacked


OPS: dict[str, Op] = {
    "rename": rename,
    "gate_up_concat": gate_up_concat,
    "qkv_interleave": qkv_interleave,
    "fused_qkv_interleave": fused_qkv_interleave,
    "gated_qkv_interleave": gated_qkv_interleave,
    "qkv_interleave_uneven": qkv_interleave_uneven,
    "rows_split": rows_split,
    "gate_up_alternate": gate_up_alternate,
    "transposed": transposed,
    "halves_swap": halves_swap,
    "pad_vocab": pad_vocab,
}
OPS_OF_EXPERTS = ("rename", "gate_up_concat")
ALIASES = ("tie", "copy_of")  # rows with a ``source`` instead of a Megatron tensor

# How many HF names and how many Megatron names a row of each op has; None: two or more.
ARITY: dict[str, tuple[int, int | None]] = {
    "rename": (1, 1),
    "gate_up_concat": (2, 1),
    "qkv_interleave": (3, 1),
    "fused_qkv_interleave": (1, 1),
    "gated_qkv_interleave": (3, 1),
    "qkv_interleave_uneven": (3, 1),
    "rows_split": (1, None),
    "gate_up_alternate": (1, 1),
    "transposed": (1, 1),
    "halves_swap": (1, 1),
    "pad_vocab": (1, 1),
    "tie": (1, 0),
    "copy_of": (1, 0),
    "aside": (1, 0),
}
# At least and at most so many dims; ops that are not here take any.
DIMS: dict[str, tuple[int, int | None]] = {
    "gate_up_concat": (1, None),
    "qkv_interleave": (3, None),
    "fused_qkv_interleave": (3, None),
    "gated_qkv_interleave": (3, None),
    "qkv_interleave_uneven": (4, None),
    "rows_split": (3, None),
    "gate_up_alternate": (2, None),
    "transposed": (2, None),
    "halves_swap": (2, 2),
    "pad_vocab": (1, None),
}
