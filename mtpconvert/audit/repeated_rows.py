"""Rows at the end of the vocabulary that repeat the row before them: tokens added by copying the last one.

Megatron forks pad the embedding so (swiss-ai/Megatron-LM#115): harmless for padding, a silent fault for real tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.windows import WINDOW, Buffer, Operand, Reader
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import DTYPE_BITS, Block

# The end of a table's name -> which of the two tables it is.
_TABLES = {
    "embed_tokens.weight": "embedding", "word_embeddings.weight": "embedding",
    "lm_head.weight": "head", "output_layer.weight": "head",
}  # fmt: skip


def check_repeated_rows(left: Side, right: Side, equal: set[str]) -> list[Finding]:
    """Runs of equal rows at the end of the right's vocabulary that the left does not have as real rows.

    ``equal``: tensors of the right that hold what the left holds. Reads two rows of each other table, more if equal.
    """
    before = _vocabulary(left, right)
    vocabulary = _vocabulary(right, left)
    found: list[Finding] = []
    for name, kind in _tables(right):
        rows = min(right.inventory[name].shape[0], vocabulary or right.inventory[name].shape[0])
        if name in equal and (before or rows) >= rows:
            continue
        first = _first_of_run(right, name, rows)
        if first is None or any(_same_run(left, other, first, rows, before) for other, k in _tables(left) if k == kind):
            continue
        which = f"row {rows - 1} repeats" if rows - first == 2 else f"rows {first + 1} to {rows - 1} repeat"
        text = f"{name}: {which} row {first} bit for bit; tokens were added by copying the last one, not trained"
        found.append(finding("rows-repeated", text, side=right.label, tensor=name, count=rows - 1 - first))
    return found


def _tables(side: Side) -> Iterator[tuple[str, str]]:
    for name, spec in side.inventory.items():
        kind = next((kind for end, kind in _TABLES.items() if name.endswith(end)), None)
        if kind and len(spec.shape) == 2 and name not in side.broken and DTYPE_BITS[spec.dtype] >= 8:
            yield name, kind


def _vocabulary(side: Side, other: Side) -> int | None:
    """Rows that stand for tokens, where a config or arguments say so."""
    for source in (side.config if side.is_huggingface else side.arguments, other.config):
        levels = [source or {}, *(value for value in (source or {}).values() if isinstance(value, dict))]
        sizes: list[int] = [level["vocab_size"] for level in levels if isinstance(level.get("vocab_size"), int)]
        if sizes:
            return max(sizes)
    return None


def _same_run(side: Side, name: str, first: int, rows: int, vocabulary: int | None) -> bool:
    count = min(side.inventory[name].shape[0], vocabulary or rows)
    start = _first_of_run(side, name, rows) if count >= rows else None
    return start is not None and start <= first


def _first_of_run(side: Side, name: str, rows: int) -> int | None:
    """The first row of the longest run of equal rows that ends with row ``rows`` - 1; None if that is one row alone."""
    spec = side.inventory[name]
    if rows < 2 or spec.nbytes > spec.shape[0] * WINDOW:
        return None
    reader, buffer = Reader(side), Buffer()
    try:
        last = _read(side, name, rows - 1, rows, reader, buffer)
        first, step = rows - 1, 1
        while first > 0:
            start = max(0, first - step)
            block = _read(side, name, start, first, reader, buffer)
            parts = [block[at : at + len(last)] for at in range(0, len(block), len(last))]
            others = [number for number, part in enumerate(parts) if part != last]
            if others:
                first = start + others[-1] + 1
                break
            first, step = start, max(1, WINDOW // len(last))
        return first if first < rows - 1 else None
    except CheckpointError:
        return None  # bytes that cannot be read are a finding of their own
    finally:
        reader.close()


def _read(side: Side, name: str, start: int, stop: int, reader: Reader, buffer: Buffer) -> bytes:
    shape = side.inventory[name].shape
    operand = Operand(side, Block(name, shape, shape, ((start, stop), (0, shape[1]))))
    length = reader.fill(operand, tuple((0, extent) for extent in operand.extents), buffer)
    assert length == prod(operand.extents) * operand.size
    return bytes(buffer.view[:length])
