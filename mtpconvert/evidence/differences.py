"""How far two frameworks are apart at one point, and whether that is more than the arithmetic explains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.evidence.trace import Trace, depth_of


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``measure``: the attribute of ``Difference`` that ``limit`` bounds."""

    dtype: str
    measure: str
    limit: float
    words: str


# float32: rounding in another order of summation. bfloat16: 8 bits of mantissa, and a token whose router scores tie
# within them goes to another expert, so single elements say nothing; docs/evidence.md has the measurements.
TOLERANCES = {
    "float32": Tolerance("float32", "relative", 1e-5, "largest difference <= 1e-05 of the largest reference value"),
    "bfloat16": Tolerance("bfloat16", "mean_relative", 0.05, "mean difference <= 0.05 of the mean reference value"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Megatron against transformers at one point, transformers being the reference.

    ``scale``: the largest |reference|; ``relative``: ``max_abs`` of it; ``mean_relative``: ``mean_abs`` of the mean
    |reference|. ``cosine``, ``cosine_min``: over positions, mean and least. For logits: ``greedy``, the share of
    positions with one argmax, and KL(reference || Megatron) in nats, mean and largest. Infinite where a side is not
    finite.
    """

    point: str
    depth: int  # 0 for the trunk
    positions: int
    scale: float
    max_abs: float
    mean_abs: float
    relative: float
    mean_relative: float
    cosine: float
    cosine_min: float
    greedy: float | None = None
    kl: float | None = None
    kl_max: float | None = None

    def within(self, tolerance: Tolerance) -> bool:
        return bool(getattr(self, tolerance.measure) <= tolerance.limit)


def differences(reference: Trace, other: Trace) -> tuple[list[Difference], list[str]]:
    """One Difference for each point that both have, in order; and the points that only one has, or of other sizes.

    Logits of ``other`` are cut to the reference's vocabulary: the rows after it are padding.
    """
    found, apart = [], []
    for point in [*reference, *(name for name in other if name not in reference)]:
        if point not in other or point not in reference:
            apart.append(f"{point}: {'transformers' if point in reference else 'Megatron'} alone has it")
            continue
        left, right = reference[point], other[point]
        if point.endswith("logits"):
            right = right[..., : left.shape[-1]]
        if left.shape != right.shape:
            apart.append(f"{point}: {list(left.shape)} in transformers, {list(right.shape)} in Megatron")
            continue
        found.append(difference(point, left, right))
    return found, apart


def difference(point: str, left: Any, right: Any) -> Difference:
    """``left`` (the reference) and ``right``: float32 tensors [b, s, n]."""
    import torch

    left, right = left.double().flatten(0, 1), right.double().flatten(0, 1)
    finite = bool(left.isfinite().all() and right.isfinite().all())
    if not finite:
        far = dict.fromkeys(("scale", "max_abs", "mean_abs", "relative", "mean_relative"), math.inf)
        nothing = {"greedy": 0.0, "kl": math.inf, "kl_max": math.inf} if point.endswith("logits") else {}
        return Difference(point, depth_of(point), len(left), **far, cosine=-1.0, cosine_min=-1.0, **nothing)
    apart, size = (left - right).abs(), left.abs()
    cosine = torch.nn.functional.cosine_similarity(left, right, dim=-1)
    return Difference(
        point,
        depth_of(point),
        len(left),
        scale=float(size.max()),
        max_abs=float(apart.max()),
        mean_abs=float(apart.mean()),
        relative=_ratio(float(apart.max()), float(size.max())),
        mean_relative=_ratio(float(apart.mean()), float(size.mean())),
        cosine=float(cosine.mean()),
        cosine_min=float(cosine.min()),
        **_logits_of(point, left, right),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def _logits_of(point: str, left: Any, right: Any) -> Mapping[str, float]:
    """Greedy agreement and KL of [positions, vocabulary] logits; nothing for a hidden state."""
    if not point.endswith("logits"):
        return {}
    reference, other = left.log_softmax(-1), right.log_softmax(-1)
    kl = (reference.exp() * (reference - other)).sum(-1).clamp(min=0)
    same = (left.argmax(-1) == right.argmax(-1)).double().mean()
    return {"greedy": float(same), "kl": float(kl.mean()), "kl_max": float(kl.max())}
