# ruff: noqa: E501 (the table)
"""Faults in the code of the ops: generators that relate the wrong blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mtpconvert.mapping import ops
from mtpconvert.tensors import Block, Fill, Tile, whole
from tests.support.fault_model import ALL, GQA, MLA, NO_EXPERTS, NO_GROUPS, NO_MTP, Fault, patched, patched_op

Op = Callable[..., Iterator[Any]]
Match = Callable[[str], bool]
D0, D1 = "decoder.layers.0.", "decoder.layers.1."
M0, M1 = "mtp.layers.0.", "mtp.layers.1."
T0 = M0 + "transformer_layer."
QKV = D0 + "self_attention.linear_qkv.weight"
FC1, EMBEDDING = D0 + "mlp.linear_fc1.weight", "embedding.word_embeddings.weight"


def only(broken: Op, match: Match, real: Op) -> Op:
    """``broken`` for Megatron tensors that match, the real op for all others."""

    def op(hf: Sequence[str], mcore: Sequence[str], dims: Any, padded: int) -> Iterator[Any]:
        return (broken if match(mcore[0]) else real)(hf, mcore, dims, padded)

    return op


def full(shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((0, extent) for extent in shape)


def is_in(*parts: str) -> Match:
    return lambda name: all(part in name for part in parts)


def in_mtp(part: str) -> Match:
    return lambda name: name.startswith("mtp.") and part in name


# gate and up


def up_first(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    return ops.gate_up_concat(list(reversed(hf)), mcore, dims, padded)


def row_by_row(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    units, rest = dims[0], dims[1:]
    for half in (0, 1):
        box = ((0, units), (half, half + 1), *full(rest))
        yield Tile(whole(hf[half], dims), Block(mcore[0], (2 * units, *rest), (units, 2, *rest), box))


def gate_twice(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    return ops.gate_up_concat([hf[0], hf[0]], mcore, dims, padded)


def no_up(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    yield next(iter(ops.gate_up_concat(hf, mcore, dims, padded)))


def one_row_short(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    first, second = ops.gate_up_concat(hf, mcore, dims, padded)
    yield first
    yield Tile(
        Block(hf[1], dims, dims, ((0, dims[0] - 1), *full(dims[1:]))),
        Block(second.mcore.tensor, second.mcore.shape, second.mcore.grid, ((1, 2), (0, dims[0] - 1), *full(dims[1:]))),
    )


# q, k, v


def qkv(order: str) -> Op:
    def op(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
        groups, queries, head, *rest = dims
        shape = (groups * (queries + 2) * head, *rest)
        if order == "k and v":
            yield from ops.qkv_interleave([hf[0], hf[2], hf[1]], mcore, dims, padded)
            return
        at = 0
        for name, count in ((hf[0], queries), (hf[1], 1), (hf[2], 1)):
            part = (groups, count, head, *rest)
            source = (groups * count * head, *rest)
            if order == "concatenated":
                rows = groups * count * head
                yield Tile(whole(name, source), Block(mcore[0], shape, shape, ((at, at + rows), *full(rest))))
                at += rows
                continue
            if order == "reversed":
                for group in range(groups):
                    here = Block(name, source, part, ((group, group + 1), *full(part[1:])))
                    box = ((groups - 1 - group, groups - group), (at, at + count), *full((head, *rest)))
                    yield Tile(here, Block(mcore[0], shape, (groups, queries + 2, head, *rest), box))
            elif order == "value first":
                first = (at + 1) % (queries + 2)
                box = ((0, groups), (first, first + count), *full((head, *rest)))
                yield Tile(
                    Block(name, source, part, full(part)),
                    Block(mcore[0], shape, (groups, queries + 2, head, *rest), box),
                )
            elif order == "heads in halves":
                grid = (groups, count, 2, head // 2, *rest)
                for half in (0, 1):
                    turned = half if name == hf[2] else 1 - half
                    here = Block(
                        name, source, grid, ((0, groups), (0, count), (half, half + 1), *full((head // 2, *rest)))
                    )
                    box = ((0, groups), (at, at + count), (turned, turned + 1), *full((head // 2, *rest)))
                    yield Tile(here, Block(mcore[0], shape, (groups, queries + 2, 2, head // 2, *rest), box))
            at += count

    return op


def shared_key(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    return ops.qkv_interleave([hf[0], hf[1], hf[1]], mcore, dims, padded)


# vocabulary


def padding_first(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    vocab, rest = dims[0], dims[1:]
    shape = (padded, *rest)
    yield Fill(Block(mcore[0], shape, shape, ((0, padded - vocab), *full(rest))))
    yield Tile(whole(hf[0], dims), Block(mcore[0], shape, shape, ((padded - vocab, padded), *full(rest))))


def no_fill(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    yield next(iter(ops.pad_vocab(hf, mcore, dims, padded)))


def rows_rotated(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    """Row r of HF at row r - 1, row 0 behind the others; padding after it."""
    vocab, rest = dims[0], dims[1:]
    rows = max(padded, vocab) if mcore[0].startswith(("embedding", "output")) else vocab
    shape = (rows, *rest)
    for first, last, to in ((1, vocab, 0), (0, 1, vocab - 1)):
        here = Block(hf[0], dims, dims, ((first, last), *full(rest)))
        yield Tile(here, Block(mcore[0], shape, shape, ((to, to + last - first), *full(rest))))
    if rows > vocab:
        yield Fill(Block(mcore[0], shape, shape, ((vocab, rows), *full(rest))))


# renames


def transposed(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    yield Tile(whole(hf[0], dims), whole(mcore[0], dims), (1, 0))


def halves_of_rows(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    grid = (2, dims[0] // 2, *dims[1:])
    for half in (0, 1):
        box = ((half, half + 1), *full(grid[1:]))
        other = ((1 - half, 2 - half), *full(grid[1:]))
        yield Tile(Block(hf[0], dims, grid, box), Block(mcore[0], dims, grid, other))


def columns_interleaved(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    """The two halves of columns one by one: e0 h0 e1 h1."""
    rows, columns = dims
    one, other = (rows, 2, columns // 2), (rows, columns // 2, 2)
    yield Tile(Block(hf[0], dims, one, full(one)), Block(mcore[0], dims, other, full(other)), (0, 2, 1))


def last_row_lost(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    box = ((0, dims[0] - 1), *full(dims[1:]))
    yield Tile(Block(hf[0], dims, dims, box), Block(mcore[0], dims, dims, box))


def other_mtp_layer(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    name = mcore[0].replace(M0, "X.").replace(M1, M0).replace("X.", M1)
    yield Tile(whole(hf[0], dims), whole(name, dims))


def one_mtp_layer(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
    """The layer's number never advances: every MTP layer writes layer 0."""
    yield Tile(whole(hf[0], dims), whole(mcore[0].replace(M1, M0), dims))


# experts


def stack(number: Callable[[int, int], int], match: Match = lambda name: True, count: int = 0) -> Any:
    """``expert_stack`` with expert e of HF in slot ``number(e, experts)``, where the Megatron name matches."""

    def expert_stack(of: Op, experts: int) -> Op:
        real = ops.expert_stack(of, experts)

        def stacked(hf: Any, mcore: Any, dims: Any, padded: int) -> Iterator[Any]:
            for tile in real(hf, mcore, dims, padded):
                slot = tile.mcore.box[0][0]
                if not match(mcore[0]):
                    yield tile
                elif (slot := number(slot, experts)) < experts + count:
                    box = ((slot, slot + 1), *tile.mcore.box[1:])
                    yield Tile(tile.hf, Block(tile.mcore.tensor, tile.mcore.shape, tile.mcore.grid, box), tile.perm)

        return stacked

    return expert_stack


EXPAND = "mtpconvert.mapping.expand.expert_stack"
reverse: Callable[[int, int], int] = lambda e, n: n - 1 - e  # noqa: E731
rotate: Callable[[int, int], int] = lambda e, n: (e + 1) % n  # noqa: E731
pair: Callable[[int, int], int] = lambda e, n: {1: 2, 2: 1}.get(e, e)  # noqa: E731
EX1, EX2 = D1 + "mlp.experts.experts.linear_fc1.weight", D1 + "mlp.experts.experts.linear_fc2.weight"
T1, T2 = T0 + "mlp.experts.experts.linear_fc1.weight", T0 + "mlp.experts.experts.linear_fc2.weight"


def op(
    name: str,
    of: str,
    families: tuple[str, ...],
    broken: Op,
    tensor: str | None = None,
    match: Match | None = None,
    **more: Any,
) -> Fault:
    real = ops.OPS[of]
    return Fault(
        name,
        "op",
        families,
        tensor,
        plant=patched_op(of, only(broken, match, real) if match else broken),
        mtp="MTP" in name,
        **more,
    )


def experts(name: str, broken: Any, tensor: str | None = None, **more: Any) -> Fault:
    return Fault(
        name,
        "op",
        MLA,
        tensor,
        plant=patched(EXPAND, broken),
        mtp="MTP" in name,
        why_not=NO_MTP if "MTP" in name else NO_EXPERTS,
        **more,
    )


OP_FAULTS = [
    op("up before gate", "gate_up_concat", ALL, up_first, FC1, words="gate and up exchanged"),
    op("gate and up row by row", "gate_up_concat", ALL, row_by_row, FC1),
    op("gate twice", "gate_up_concat", ALL, gate_twice, refused="NotABijectionError"),
    op("no up", "gate_up_concat", ALL, no_up, refused="NotABijectionError"),
    op("a row of up lost", "gate_up_concat", ALL, one_row_short, refused="NotABijectionError"),
    op("k and v exchanged", "qkv_interleave", GQA, qkv("k and v"), QKV, words="k and v exchanged", why_not=NO_GROUPS),
    op("groups concatenated", "qkv_interleave", GQA, qkv("concatenated"), QKV, words="query groups concatenated", why_not=NO_GROUPS),
    op("groups reversed", "qkv_interleave", GQA, qkv("reversed"), QKV, why_not=NO_GROUPS),
    op("value first", "qkv_interleave", GQA, qkv("value first"), QKV, why_not=NO_GROUPS),
    op("halves of each head exchanged", "qkv_interleave", GQA, qkv("heads in halves"), QKV, why_not=NO_GROUPS),
    op("key for value", "qkv_interleave", GQA, shared_key, refused="NotABijectionError", why_not=NO_GROUPS),
    op("biases concatenated", "qkv_interleave", ("qwen2",), qkv("concatenated"), QKV[:-6] + "bias", is_in("bias"), words="query groups concatenated", why_not="no biases in these tiny models"),
    op("padding before the tokens", "pad_vocab", ALL, padding_first, EMBEDDING),
    op("tokens one row early", "pad_vocab", ALL, rows_rotated, EMBEDDING, words="rotated by 1"),
    op("padding not written", "pad_vocab", ALL, no_fill, refused="NotABijectionError"),
    op("square o_proj transposed", "rename", ("qwen2", "llama"), transposed, D0 + "self_attention.linear_proj.weight", is_in("linear_proj.weight"), words="transposed", why_not="o_proj is not square here: its shape gives it away"),
    op("halves of down's rows exchanged", "rename", ALL, halves_of_rows, D0 + "mlp.linear_fc2.weight", is_in("mlp.linear_fc2.weight")),
    op("the last row of down lost", "rename", ALL, last_row_lost, refused="NotABijectionError", match=is_in("mlp.linear_fc2.weight")),
    op("rows of the router rotated", "rename", MLA, rows_rotated, D1 + "mlp.router.weight", is_in("router.weight"), why_not=NO_EXPERTS),
    op("router bias rotated", "rename", MLA, rows_rotated, D1 + "mlp.router.expert_bias", is_in("router.expert_bias"), why_not=NO_EXPERTS),
    op("key and value halves of kv_b exchanged", "rename", MLA, halves_of_rows, D0 + "self_attention.linear_kv_up_proj.weight", is_in("linear_kv_up_proj.weight"), why_not="no latent attention"),
    experts("experts reversed", stack(reverse), EX1, words="experts 0/3 and 1/2 exchanged"),
    experts("experts off by one", stack(rotate), EX1, words="experts rotated"),
    experts("two experts exchanged", stack(pair), EX2, words="experts 1 and 2 exchanged"),
    experts("every expert in slot 0", stack(lambda e, n: 0), refused="NotABijectionError"),
    experts("the last expert lost", stack(lambda e, n: e, count=-1), refused="NotABijectionError"),
    # MTP alone
    op("MTP: halves of eh_proj exchanged", "rename", MLA, ops.halves_swap, M0 + "eh_proj.weight", in_mtp("eh_proj"), words="halves exchanged", why_not=NO_MTP),
    op("MTP: halves of eh_proj column by column", "rename", MLA, columns_interleaved, M0 + "eh_proj.weight", in_mtp("eh_proj"), why_not=NO_MTP),
    op("MTP: rows of eh_proj rotated", "rename", MLA, rows_rotated, M0 + "eh_proj.weight", in_mtp("eh_proj"), words="rotated", why_not=NO_MTP),
    op("MTP: halves of eh_proj's rows exchanged", "rename", MLA, halves_of_rows, M0 + "eh_proj.weight", in_mtp("eh_proj"), why_not=NO_MTP),
    op("MTP: enorm's halves exchanged", "rename", MLA, halves_of_rows, M0 + "enorm.weight", in_mtp("enorm"), why_not=NO_MTP),
    op("MTP: final norm rotated", "rename", MLA, rows_rotated, M0 + "final_layernorm.weight", in_mtp("final_layernorm"), why_not=NO_MTP),
    op("MTP: router rows rotated", "rename", MLA, rows_rotated, T0 + "mlp.router.weight", in_mtp("router.weight"), why_not=NO_MTP),
    op("MTP: up before gate", "gate_up_concat", MLA, up_first, T1, in_mtp("experts.experts"), words="gate and up exchanged", why_not=NO_MTP),
    op("MTP: two layers exchanged", "rename", MLA, other_mtp_layer, M0 + "eh_proj.weight", in_mtp("eh_proj"), words="MTP layer 1", why_not=NO_MTP),
    op("MTP: every layer written as layer 0", "rename", MLA, one_mtp_layer, refused="NotABijectionError", match=in_mtp("eh_proj"), why_not=NO_MTP),
    op("MTP: the last row of eh_proj lost", "rename", MLA, last_row_lost, refused="NotABijectionError", match=in_mtp("eh_proj"), why_not=NO_MTP),
    experts("MTP: experts reversed", stack(reverse, in_mtp("")), T1, words="experts 0/3 and 1/2 exchanged"),
    experts("MTP: experts off by one", stack(rotate, in_mtp("linear_fc2")), T2, words="experts rotated"),
]  # fmt: skip
