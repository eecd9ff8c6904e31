"""Real megatron-core models with modules such as Megatron-Bridge's, which stock megatron-core does not have; they run.

Of the local spec: the parameters have the names of Bridge's (src/megatron/bridge/models), and a local model runs on a
CPU. ``fixtures/inventories/bridge-*.txt`` are of Bridge's own classes.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from mtpconvert.evidence import megatron_model
from tests.support.mcore import model_from_args
from tests.support.mcore_cpu import cpu_patches, quietly
from tests.support.mcore_roles import _COMMON, _GQA, _MLA, _MOE, _SIGMOID

cpu_patches()

from megatron.core.tensor_parallel.layers import RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttention  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.mlp import MLP  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

# (key/value heads, whether there are sinks) of each trunk layer of "hybrid", and of its MTP layers
TRUNK_KINDS, MTP_KIND = ((2, False), (3, True), (2, False)), (3, True)
VALUE_DIM = 5
_DENSE = _COMMON | _GQA

MODELS: dict[str, dict[str, Any]] = {
    "sandwiched": _DENSE,
    "sandwiched, latent attention and experts": _COMMON | _MLA | _MOE | _SIGMOID | {
        "moe_layer_freq": [0, 1, 1], "mtp_num_layers": 2,
    },
    "norms of outputs alone, joint norms of q and k": _DENSE | {"mtp_num_layers": None},
    # the two arguments in which layers differ are those of a full one; the MTP layer is dense, the last layer is not
    "hybrid": _DENSE | _MOE | _SIGMOID | {
        "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": None, "qk_layernorm": False,
        "v_head_dim": VALUE_DIM, "softmax_type": "vanilla",
    },
}  # fmt: skip


def _norm(config: Any, width: int) -> Any:
    return WrappedTorchNorm(config=config, hidden_size=width, eps=config.layernorm_epsilon)


class NormedRows(RowParallelLinear):
    """A row-parallel linear layer whose output is normed."""

    def __init__(self, columns: int, rows: int, *, config: Any, **settings: Any) -> None:
        super().__init__(columns, rows, config=config, **settings)
        self.post_layernorm = _norm(config, rows)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        y, bias = super().forward(x)
        assert bias is None
        return self.post_layernorm(y), None


class NormedLayer(TransformerLayer):
    """A layer that norms what its feed-forward part gives."""

    def __init__(self, config: Any, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        self.post_mlp_layernorm = _norm(config, config.hidden_size)

    def _forward_post_mlp(self, mlp_output_with_bias: Any, residual: torch.Tensor) -> Any:
        y, bias = mlp_output_with_bias
        return super()._forward_post_mlp((self.post_mlp_layernorm(y), bias), residual)


class JointNorm(torch.nn.Module):
    """Norm of [s, b, heads, dim] over heads and dims together."""

    def __init__(self, heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(heads * dim)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2)
        return torch.nn.functional.rms_norm(flat, flat.shape[-1:], self.weight, self.eps).view_as(x)


class JointQueries(JointNorm):
    """As a layer spec takes it: built with the width of one head."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__(config.num_attention_heads, hidden_size, eps)


class JointKeys(JointNorm):
    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__(config.num_query_groups, hidden_size, eps)


class Core(torch.nn.Module):
    """Causal attention whose values may be of another size, with a learnt sink per head or none."""

    def __init__(self, heads: int, sinks: bool) -> None:
        super().__init__()
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads)) if sinks else None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: Any, **_more: Any) -> torch.Tensor:
        each = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        if self.softmax_offset is not None:
            sink = self.softmax_offset[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)


class HybridAttention(SelfAttention):
    """Attention with the key/value heads and sinks of its layer, and values of ``VALUE_DIM`` dims."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, **settings: Any) -> None:
        config = copy(config)
        config.num_query_groups, sinks = self.kind(layer_number)
        super().__init__(config, submodules, layer_number, *args, **settings)
        heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
        common = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
        rows = heads * dim + groups * (dim + VALUE_DIM)
        self.linear_qkv = submodules.linear_qkv(config.hidden_size, rows, gather_output=False, **common)
        self.linear_proj = RowParallelLinear(heads * VALUE_DIM, config.hidden_size, input_is_parallel=True, **common)
        self.core_attention = Core(heads, sinks)

    def kind(self, layer_number: int) -> tuple[int, bool]:
        return TRUNK_KINDS[layer_number - 1]

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *_args: Any, **_settings: Any) -> Any:
        heads, groups, dim = self.config.num_attention_heads, self.config.num_query_groups, self.config.kv_channels
        mixed, _ = self.linear_qkv(hidden_states)
        q, k, v = mixed.unflatten(-1, (groups, -1)).split((heads // groups * dim, dim, VALUE_DIM), -1)
        return q.reshape(*q.shape[:2], heads, dim), k, v


class MtpAttention(HybridAttention):
    def kind(self, layer_number: int) -> tuple[int, bool]:
        return MTP_KIND


def _layers(spec: Any) -> Iterator[Any]:
    """Specs of TransformerLayer at or below ``spec``, each once."""
    if isinstance(spec, ModuleSpec) and isinstance(spec.module, type) and issubclass(spec.module, TransformerLayer):
        yield spec
        return
    children = spec if isinstance(spec, list) else vars(spec).values() if hasattr(spec, "__dict__") else ()
    for child in children:
        yield from _layers(child)


def _sandwich(layer: Any) -> None:
    layer.submodules.self_attention.submodules.linear_proj = NormedRows
    mlp = layer.submodules.mlp  # a spec; in 0.19 a partial of MLP.as_mlp_submodule, or of MoELayer
    if getattr(mlp, "module", None) is MLP:
        mlp.submodules.linear_fc2 = NormedRows
    elif isinstance(mlp, partial) and getattr(mlp.func, "__self__", None) is MLP:
        mlp.keywords["submodules"].linear_fc2 = NormedRows
    else:
        layer.module = NormedLayer


def _norm_outputs_alone(layer: Any) -> None:
    _sandwich(layer)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm, attention.k_layernorm = JointQueries, JointKeys


def _hybrid(attention: type) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.submodules.self_attention.module = attention

    return change


# what is done to the specs of the trunk's layers, and to those of MTP layers
CHANGES: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "sandwiched": (_sandwich, _sandwich),
    "sandwiched, latent attention and experts": (_sandwich, _sandwich),
    "norms of outputs alone, joint norms of q and k": (_norm_outputs_alone, _norm_outputs_alone),
    "hybrid": (_hybrid(HybridAttention), _hybrid(MtpAttention)),
}


@quietly
def build(name: str) -> Any:
    """The model of ``MODELS``, with random weights as megatron-core initialises them."""
    real = megatron_model._layer_specs

    def changed(config: Any, te: bool, mtp_like: int) -> tuple[Any, Any]:
        specs = real(config, te, mtp_like)
        for spec, change in zip(specs, CHANGES[name], strict=True):
            for layer in {id(layer): layer for layer in _layers(spec)}.values():
                change(layer)
        return specs

    with patch.object(megatron_model, "_layer_specs", changed):
        return model_from_args(MODELS[name], mtp_like=0 if name == "hybrid" else -1)
