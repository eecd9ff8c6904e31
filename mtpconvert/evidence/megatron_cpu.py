"""What the real megatron-core (0.16.1, 0.19.2) needs to run without Transformer Engine, and on a CPU.

``patches`` is what a machine without Transformer Engine lacks, ``cpu_patches`` that and what one without CUDA lacks.
Nothing here changes what a parameter means, how it is named or how it is saved.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import typing
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

_done: set[str] = set()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron-core and torch.distributed warn about everything that a CPU lacks, and about their own old age."""
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with quiet():
            return function(*args, **kwargs)

    return call


class _NoStream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        import torch

        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def patch_cuda() -> None:
    """``torch.cuda`` calls that megatron-core makes unconditionally become no-ops; the device is ``"cpu"``."""
    import torch

    nothing: Callable[..., Any] = lambda *_args, **_kwargs: None  # noqa: E731
    cuda: Any = torch.cuda
    cuda.synchronize = nothing
    cuda.current_device = lambda: "cpu"
    cuda.current_stream = lambda *_args: _NoStream()
    cuda.stream = lambda *_args: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _NoStream
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_args, **_kwargs: self


@functools.cache
def causal_attention() -> type:
    """Core attention for MLA, whose key and value widths the local ``DotProductAttention`` does not take.

    query [s, b, heads, qk], key [s, b, heads, qk], value [s, b, heads, v] -> [s, b, heads * v].
    """
    import torch

    class CausalAttention(torch.nn.Module):
        def __init__(self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
            super().__init__()
            self.config, self.softmax_scale = config, softmax_scale

        def forward(self, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> Any:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            return out.permute(2, 0, 1, 3).flatten(2)

    return CausalAttention


class LocalCoreAttention:
    """What the local spec's core attention becomes: the real ``DotProductAttention``, for MLA ``causal_attention``."""

    real: type

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        return (causal_attention() if config.multi_latent_attention else cls.real)(config, *args, **kwargs)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the device of its own ``torch.ones(..., device="cuda")`` ignored."""
    import torch

    module: Any = torch
    ones = torch.ones

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        module.ones = lambda *a, device=None, **k: ones(*a, **k)
        try:
            return function(*args, **kwargs)
        finally:
            module.ones = ones

    return call


def cpu_patches() -> None:
    """Make ``megatron.core`` importable and runnable on a CPU. Idempotent; called by every function of the rig."""
    if "cpu" in _done:
        return
    patch_cuda()
    patches()
    with quiet():
        from megatron.core.fusions import fused_softmax
    fused: Any = fused_softmax
    fused.get_sliding_window_causal_mask = _on_cpu(fused.get_sliding_window_causal_mask)
    _done.add("cpu")


def patches() -> None:
    """Make the local spec of ``megatron.core`` run without Transformer Engine, MLA included. Idempotent."""
    if "all" in _done:
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    typed: Any = typing
    if not hasattr(typing, "override"):  # megatron.training of 0.19.2 imports Python 3.12's
        typed.override = lambda function: function
    with quiet():
        from megatron.core.models import backends
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils
    for name in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TENorm"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):  # isinstance() needs types without TE
            setattr(multi_latent_attention, name, type(name, (), {}))
    utils: Any = moe_utils
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
    provider: Any = backends.LocalSpecProvider
    LocalCoreAttention.real = backends.DotProductAttention
    provider.core_attention = lambda _self: LocalCoreAttention
    tracker: Any = random.CudaRNGStatesTracker
    tracker.fork = lambda _self, *_args: contextlib.nullcontext()
    _done.add("all")


def version() -> str:
    """The installed megatron-core's version, e.g. ``"0.16.1"``."""
    from importlib.metadata import version as installed

    return installed("megatron-core")


def process_group(rank: int = 0, world: int = 1, store: str | None = None) -> None:
    """The default gloo process group; ``store`` is the file that several ranks meet at. Idempotent."""
    import torch

    distributed: Any = torch.distributed
    if distributed.is_initialized():
        return
    # one process meets only itself and needs no file
    meeting = distributed.HashStore() if store is None else distributed.FileStore(store, world)
    with quiet():
        distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=world)


_parallel: list[SimpleNamespace] = []  # the sizes of this process's parallel state, where there is one


def model_parallel(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Megatron-core's parallel state for these sizes, replacing an earlier one."""
    from megatron.core import parallel_state

    process_group()
    sizes = SimpleNamespace(tp=tp, pp=pp, ep=ep)
    if [sizes] != _parallel:
        with quiet():
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
            )
        _parallel[:] = [sizes]
