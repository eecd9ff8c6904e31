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
    "halves_swap": halves_swap,
    "pad_vocab": pad_vocab,
}
OPS_OF_EXPERTS = ("rename", "gate_up_concat")
ALIASES = ("tie", "copy_of")  # rows with a ``source`` instead of a Megatron tensor

# How many HF names and how many Megatron names a row of each op has.
ARITY: dict[str, tuple[int, int]] = {
    "rename": (1, 1),
    "gate_up_concat": (2, 1),
    "qkv_interleave": (3, 1),
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
    "halves_swap": (2, 2),
    "pad_vocab": (1, None),
}
