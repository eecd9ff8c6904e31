"""A stand-in for the package ``transformer_engine`` 2.10, so that megatron-core builds its TE layer spec on a CPU.

It has what a checkpoint can see of Transformer Engine and nothing else: the modules that megatron-core subclasses
(``megatron/core/extensions/transformer_engine.py``), with Transformer Engine's parameter names and shapes per
tensor-parallel rank and its ``get_extra_state`` / ``set_extra_state``. There are no kernels: calling a module raises.
Every other name of the package resolves to an inert class, so that megatron-core's own imports succeed.

``install()`` must run before the first import of ``megatron.core``, which decides at import whether it has TE.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch

VERSION = "2.10.0"
ROOTS = ("transformer_engine", "transformer_engine_torch")


class _Module(torch.nn.Module):
    """Shared part of all modules: extra state as TE 2.x saves it without FP8 (an empty byte tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """TE 2.x accepts None, an empty tensor, or pickled FP8 state, of which there is none here."""
        if state is not None and (not isinstance(state, torch.Tensor) or state.numel() != 0):
            raise TypeError(f"extra state must be None or an empty tensor, not {state!r}")

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """TE allocates FP8 scales here; without FP8 there is nothing to allocate."""

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__}: the transformer_engine stand-in has no kernels")

    def _parameter(self, name: str, *shape: int | None, dtype: torch.dtype | None) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))


class Linear(_Module):
    """``weight`` [out, in] and ``bias`` [out], the split axis divided by ``tp_size`` ("column": out, "row": in)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        **_ignored: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self._weights(params_dtype)

    def _weights(self, dtype: torch.dtype | None) -> None:
        self._parameter("weight", self.out_features, self.in_features, dtype=dtype)
        if self.use_bias:
            self._parameter("bias", self.out_features, dtype=dtype)


class LayerNormLinear(Linear):
    """``Linear`` with the norm before it: ``layer_norm_weight`` [in] (and ``layer_norm_bias`` for LayerNorm)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self.zero_centered_gamma = zero_centered_gamma
        self._parameter("layer_norm_weight", in_features, dtype=kwargs.get("params_dtype"))
        if normalization == "LayerNorm":
            self._parameter("layer_norm_bias", in_features, dtype=kwargs.get("params_dtype"))


class GroupedLinear(Linear):
    """``num_gemms`` linears side by side: ``weight{i}`` [out, in] and ``bias{i}`` [out]."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **kwargs: Any) -> None:
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **kwargs)

    def _weights(self, dtype: torch.dtype | None) -> None:
        for i in range(self.num_gemms):
            self._parameter(f"weight{i}", self.out_features, self.in_features, dtype=dtype)
            if self.use_bias:
                self._parameter(f"bias{i}", self.out_features, dtype=dtype)


class RMSNorm(_Module):
    """``weight`` [hidden]; TE 2.x takes the size as ``normalized_shape`` or, as before, ``hidden_size``."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        *,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        **_ignored: Any,
    ) -> None:
        super().__init__()
        self.zero_centered_gamma = zero_centered_gamma
        self.size = normalized_shape if hidden_size is None else hidden_size
        self._parameter("weight", self.size, dtype=params_dtype)


class LayerNorm(RMSNorm):
    """``weight`` and ``bias`` [hidden]."""

    def __init__(self, *args: Any, params_dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(*args, params_dtype=params_dtype, **kwargs)
        self._parameter("bias", self.size, dtype=params_dtype)


class DotProductAttention(_Module):
    """``softmax_offset`` [heads] if it is learnt. TE registers a hook that forgives its extra state to be missing."""

    def __init__(
        self,
        num_attention_heads: int,
        *_args: Any,
        tp_size: int = 1,
        softmax_type: str = "vanilla",
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self._parameter("softmax_offset", num_attention_heads // tp_size, dtype=None)
        self.register_load_state_dict_post_hook(self._forgive_missing_extra_state)

    @staticmethod
    def _forgive_missing_extra_state(_module: torch.nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if "core_attention._extra_state" not in key]


def get_cpu_offload_context(*_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
    """TE's answer with offloading off: a context that does nothing and an identity to commit groups with."""
    return contextlib.nullcontext(), lambda tensor: tensor


KNOWN: dict[str, Any] = {
    known.__name__: known
    for known in (
        Linear,
        LayerNormLinear,
        GroupedLinear,
        RMSNorm,
        LayerNorm,
        DotProductAttention,
        get_cpu_offload_context,
    )
}


class _InertType(type):
    """A class whose every unknown attribute is another inert class (``te.common.recipe.Format.HYBRID``)."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _InertType(name, (_Inert,), {})


class _Inert(metaclass=_InertType):
    """What stands for every class, function and constant of the package that a checkpoint cannot see."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Accepts anything; holds nothing."""


class _StandinModule(types.ModuleType):
    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = KNOWN.get(name) or _InertType(name, (_Inert,), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below ``transformer_engine`` and makes it a ``_StandinModule``."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in ROOTS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandinModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: attributes appear when they are asked for."""


def installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Put the stand-in in place of ``transformer_engine``. RuntimeError when megatron-core is already imported."""
    if installed():
        return
    if any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules):
        raise RuntimeError("the transformer_engine stand-in must be installed before megatron.core is imported")
    if importlib.util.find_spec("transformer_engine") is not None:
        raise RuntimeError("a real transformer_engine is installed here")
    sys.meta_path.insert(0, _Finder())
    import transformer_engine.common.recipe
    import transformer_engine.pytorch.fp8  # noqa: F401  (attributes of the package are then modules, as in the real one)
