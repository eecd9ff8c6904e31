"""What the real megatron-core (0.16.1, 0.19.2) needs to be imported, built and run on a CPU. See ``cpu_patches``.

Nothing here changes what a parameter means, how it is named or how it is saved.
"""

import contextlib
import functools
import os
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

_patched = False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron-core and torch.distributed warn about everything that a CPU lacks; tests turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with quiet():
            return function(*args, **kwargs)

    return call


class _NoStream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def patch_cuda() -> None:
    """``torch.cuda`` calls that megatron-core makes unconditionally become no-ops; the device is ``"cpu"``."""
    nothing: Callable[..., Any] = lambda *_args, **_kwargs: None  # noqa: E731
    torch.cuda.synchronize = nothing
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_args: _NoStream()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda *_args: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign,assignment]
    torch.cuda.Stream = torch.cuda.Event = _NoStream  # type: ignore[assignment,misc]


class CausalAttention(torch.nn.Module):
    """Core attention for MLA, whose key and value widths the local ``DotProductAttention`` does not take.

    query [s, b, heads, qk], key [s, b, heads, qk], value [s, b, heads, v] -> [s, b, heads * v].
    """

    def __init__(self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__()
        self.config, self.softmax_scale = config, softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_a: Any, **_k: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class LocalCoreAttention:
    """What the local spec's core attention becomes: the real ``DotProductAttention``, for MLA ``CausalAttention``."""

    real: type

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        return (CausalAttention if config.multi_latent_attention else cls.real)(config, *args, **kwargs)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the device of its own ``torch.ones(..., device="cuda")`` ignored."""
    ones = torch.ones

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.ones = lambda *a, device=None, **k: ones(*a, **k)  # type: ignore[assignment,misc]
        try:
            return function(*args, **kwargs)
        finally:
            torch.ones = ones  # type: ignore[assignment,misc]

    return call


def cpu_patches() -> None:
    """Make ``megatron.core`` importable and runnable on a CPU. Idempotent; called by every function of the rig."""
    global _patched
    if _patched:
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not hasattr(typing, "override"):  # megatron.training of 0.19.2 imports Python 3.12's
        typing.override = lambda function: function  # type: ignore[attr-defined]
    patch_cuda()
    with quiet():
        from megatron.core.fusions import fused_softmax
        from megatron.core.models import backends
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils
    for name in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TENorm"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):  # isinstance() needs types without TE
            setattr(multi_latent_attention, name, type(name, (), {}))
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    fused_softmax.get_sliding_window_causal_mask = _on_cpu(fused_softmax.get_sliding_window_causal_mask)
    LocalCoreAttention.real = backends.DotProductAttention
    backends.LocalSpecProvider.core_attention = lambda _self: LocalCoreAttention
    random.CudaRNGStatesTracker.fork = lambda _self, *_args: contextlib.nullcontext()
    _patched = True


def version() -> str:
    """The installed megatron-core's version, e.g. ``"0.16.1"``."""
    from importlib.metadata import version as installed

    return installed("megatron-core")


def process_group(rank: int = 0, world: int = 1, store: str | None = None) -> None:
    """The default gloo process group; ``store`` is the file that several ranks meet at. Idempotent."""
    if torch.distributed.is_initialized():
        return
    path = store or tempfile.mktemp(prefix="mtpconvert-gloo-")
    with quiet():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(path, world), rank=rank, world_size=world
        )


def model_parallel(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Megatron-core's parallel state for these sizes, replacing an earlier one."""
    from megatron.core import parallel_state

    process_group()
    sizes = SimpleNamespace(tp=tp, pp=pp, ep=ep)
    if getattr(model_parallel, "sizes", None) != sizes:
        with quiet():
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
            )
        model_parallel.sizes = sizes  # type: ignore[attr-defined]
