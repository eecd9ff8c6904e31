"""Kernels in plain PyTorch for the modules of ``te_standin``, so that megatron-core's TE layer spec runs on a CPU.

They do what Transformer Engine documents for its modules, in the precision of the tensors, one rank, no FP8. With them
run the parts of megatron-core that exist in its TE spec only: gated delta nets and sparse attention.

``install()`` must run before the first import of ``megatron.core``, ``torch_paths()`` after it.
"""

import os
from typing import Any

import torch
from torch.nn import functional

from tests.support import te_standin


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight + 1 if zero_centered else weight, eps)


class Linear(te_standin.Linear):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        assert not self.te_return_bias
        return functional.linear(x, self.weight, self.bias if self.use_bias else None)


class LayerNormLinear(te_standin.LayerNormLinear):
    def __init__(self, *args: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        assert not self.te_return_bias and not hasattr(self, "layer_norm_bias")
        x = rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        return functional.linear(x, self.weight, self.bias if self.use_bias else None)


class GroupedLinear(te_standin.GroupedLinear):
    def forward(self, x: torch.Tensor, m_splits: Any, **_: Any) -> torch.Tensor:
        assert not self.use_bias
        parts = x.split([int(size) for size in m_splits])
        return torch.cat([functional.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


class RMSNorm(te_standin.RMSNorm):
    def __init__(self, *args: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNorm(te_standin.LayerNorm):
    def __init__(self, *args: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return functional.layer_norm(x, (x.shape[-1],), weight, self.bias, self.eps)


class DotProductAttention(te_standin.DotProductAttention):
    """Causal attention; ``window_size`` (left, 0): keys up to ``left`` before the query. Heads of v may be narrower."""

    def __init__(self, *args: Any, softmax_scale: float | None = None, window_size: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.softmax_scale, self.left = softmax_scale, -1 if window_size is None else window_size[0]

    def forward(self, query: Any, key: Any, value: Any, _mask: Any = None, *, attn_mask_type: str) -> torch.Tensor:
        assert attn_mask_type == "causal"
        groups = query.shape[2] // key.shape[2]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, *(t.repeat_interleave(groups, 2) for t in (key, value))))
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = q @ k.transpose(2, 3) * scale
        back = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        unseen = (back < 0) | (back > self.left) if self.left >= 0 else back < 0
        scores = scores.masked_fill(unseen, float("-inf"))
        sinks = getattr(self, "softmax_offset", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        seen = scores.softmax(-1)[..., : k.shape[2]]
        return (seen @ v).permute(2, 0, 1, 3).flatten(2)


class _SplitAlongDim:
    @staticmethod
    def apply(x: torch.Tensor, dim: int, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        return x.split(sizes, dim)


KERNELS = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention, _SplitAlongDim)


def install() -> None:
    """``te_standin.install`` with these kernels. RuntimeError when megatron-core is already imported."""
    te_standin.KNOWN.update({kernel.__name__: kernel for kernel in KERNELS})
    te_standin.install()
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # TEDotProductAttention wants it with deterministic_mode


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x @ H * scale along the last axis, H the Hadamard matrix in Sylvester's order; the size is a power of two."""
    size = x.shape[-1]
    assert size & (size - 1) == 0
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix * scale


def rotate_activation(x: torch.Tensor) -> torch.Tensor:
    """dsa.py:rotate_activation, which takes bfloat16 only since fast_hadamard_transform's kernel is used for that."""
    return hadamard_transform(x, scale=x.shape[-1] ** -0.5)


def torch_paths() -> None:
    """megatron-core's own torch in place of what it takes from Transformer Engine as functions, and no compiler."""
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.moe import moe_utils

    dsa.rotate_activation = rotate_activation
    moe_utils.te_general_gemm = None
    torch.compiler.set_stance("force_eager")
