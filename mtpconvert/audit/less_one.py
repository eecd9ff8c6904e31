"""Norms of which one side keeps the scale w and the other m, the scale less one: what is right, and what went wrong.

transformers' gated norm of a delta net multiplies by w (qwen3_next/modeling_qwen3_next.py: ``Qwen3NextRMSNormGated``);
Megatron with ``apply_layernorm_1p`` keeps m of every norm and multiplies by 1 + m (Transformer Engine's
``zero_centered_gamma``). From w: m is float32(w) - 1 in the dtype of w, to nearest even. From m: w is 1 + m so rounded,
or any number of which m is one less: 1 + m does not always give back the w that m was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mtpconvert.audit.compare import Bench
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.outcomes import Outcome
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.vocabulary import is_minus_one, is_norm
from mtpconvert.audit.values import to_bfloat16, widen
from mtpconvert.audit.windows import Operand
from mtpconvert.errors import CheckpointError, some
from mtpconvert.tensors import Box

_WORDS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}
ARGUMENT = "apply_layernorm_1p"


def plus(words: Any, dtype: str, step: float) -> Any:
    """Bit patterns of each number plus ``step``, in float32 and rounded to nearest even to ``dtype`` again."""
    import numpy as np

    with np.errstate(all="ignore"):
        values = widen(words, dtype).astype(np.float32) + np.float32(step)
        if dtype == "BF16":
            return to_bfloat16(values.view(np.uint32))
        return values.astype(np.float16 if dtype == "F16" else np.float32).view(_WORDS[dtype])


def subtract_one(array: Any, dtype: str) -> None:
    """In place, on bytes. Dtypes that no norm has stay as they are, and so differ."""
    if dtype in _WORDS:
        words = array.view(_WORDS[dtype])
        words[...] = plus(words, dtype, -1.0)


def is_one_more(bench: Bench, one: Operand, two: Operand, window: Box) -> Any:
    """For each element of the window whether the right's w is 1 + m, with the left's m in the first buffer."""
    from mtpconvert.audit.compare import elements

    length = bench.read(Operand(two.side, two.block, two.order), window, bench.two)
    count = length // two.size
    scales = elements(bench.two, count, two.size)
    if two.dtype not in _WORDS:
        return scales != scales
    return scales == plus(elements(bench.one, count, one.size), one.dtype, 1.0)


def less_one_cause(bench: Bench, outcome: Outcome, left: Side, right: Side) -> str | None:
    """The cause, where one of the usual mistakes gives the whole of the right."""
    step, wanted, undone = -1.0, "subtracted", "added"
    if outcome.pair.less_one == "left":
        step, wanted, undone = 1.0, "added", "subtracted"
    usual: dict[str, Callable[[Any, str], Any]] = {
        f"kept as it is where one should be {wanted}": lambda words, dtype: words,
        f"one {wanted} twice": lambda words, dtype: plus(plus(words, dtype, step), dtype, step),
        f"one {undone} where one should be {wanted}": lambda words, dtype: plus(words, dtype, -step),
    }
    seen = False
    for before, after, dtype in _raw(bench, outcome, left, right):
        seen = True
        usual = {cause: give for cause, give in usual.items() if (give(before, dtype) == after).all()}
    return next(iter(usual), None) if seen else None


def _raw(bench: Bench, outcome: Outcome, left: Side, right: Side) -> Iterator[tuple[Any, Any, str]]:
    """Both sides as they are stored, window by window, and the dtype; nothing where it is none of a norm."""
    one, two = (Operand(o.side, o.block, o.order) for o in bench.operands(outcome.pair, left, right))
    if one.dtype == two.dtype and one.dtype in _WORDS:
        for _, before, after in bench.arrays(one, two):
            yield before, after, one.dtype


def about_less_one(bench: Bench, outcomes: Iterable[Outcome], left: Side, right: Side) -> list[Finding]:
    """What is said of all such norms together: numbers that adding one does not give back, and a lost argument."""
    outcomes = [outcome for outcome in outcomes if not outcome.pair.copy and outcome.error is None]
    found: list[Finding] = []
    for kept in ("left", "right"):
        mine = [outcome for outcome in outcomes if outcome.pair.less_one == kept]
        try:
            found += _rounded(bench, [outcome for outcome in mine if outcome.equal], left, right)
            found += _argument(bench, kept, mine, outcomes, left, right)
        except CheckpointError:
            continue  # bytes that cannot be read are a finding of their own
    return found


def _rounded(bench: Bench, equal: list[Outcome], left: Side, right: Side) -> list[Finding]:
    """A note on norms that are right: how many of their numbers rounding changed."""
    lost = total = 0
    names: list[str] = []
    for outcome in equal:
        rounded = 0
        for before, after, dtype in _raw(bench, outcome, left, right):
            scales, less = (after, before) if outcome.pair.less_one == "left" else (before, after)
            rounded += int((plus(less, dtype, 1.0) != scales).sum())
        lost, total = lost + rounded, total + outcome.total
        names += [outcome.pair.right.tensor] * bool(rounded)
    if not equal:
        return []
    name = (names or [outcome.pair.right.tensor for outcome in equal])[0]
    kept, other = ("left", "right") if equal[0].pair.less_one == "left" else ("right", "left")
    text = (
        f"{len(equal)} norms are kept less one on the {kept} and as they are on the {other}, rightly; "
        f"{lost} of {total} numbers would not come back by adding one"
    )
    said = f"{text} ({some(list(dict.fromkeys(names)))})" if names else text
    return [finding("norm-less-one", said, side="both", tensor=name, count=lost)]


def _argument(
    bench: Bench, kept: str, mine: list[Outcome], outcomes: list[Outcome], left: Side, right: Side
) -> list[Finding]:
    """Norms with equal bytes on both sides, more than there are that the argument as it stands makes right."""
    if left.is_huggingface == right.is_huggingface:
        return []
    side = right if left.is_huggingface else left
    set_there = kept == side.label
    alike = [o for o in mine if not o.equal and o.values is None and _is_kept(bench, o, left, right)]
    others = [o for o in outcomes if o.equal and not o.pair.less_one and _said(o, set_there)]
    if len(alike) <= len(others):
        return []
    text = (
        f"{ARGUMENT} (layernorm_zero_centered_gamma) is {'set' if set_there else 'not set'}, so scales are "
        f"{'1 + w' if set_there else 'w'}; {len(alike)} norms hold the bytes of the other side, where they are "
        f"{'w' if set_there else '1 + w'}"
    )
    return [finding("argument-mismatch", text, side=side.label, key=ARGUMENT, count=len(alike))]


def _is_kept(bench: Bench, outcome: Outcome, left: Side, right: Side) -> bool:
    return (less_one_cause(bench, outcome, left, right) or "").startswith("kept as it is")


def _said(outcome: Outcome, minus: bool) -> bool:
    """Whether the pair is of a norm, kept less one on both sides or on neither."""
    role = outcome.pair.role
    return role is not None and is_norm(role.name) and is_minus_one(role.name) == minus
