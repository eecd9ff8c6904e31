"""Attention modules that exist in the Transformer Engine spec only, built of megatron-core's local linear layers.

The modules are the real ones and run on a CPU: what Transformer Engine would bring is ``y = W x`` and the norm before
it. Input is [s, b, h], normed already.
"""

from typing import Any

import torch

from tests.support.mcore import content_metadata, transformer_config
from tests.support.mcore_cpu import cpu_patches, model_parallel, quietly
from tests.support.mcore_kinds import torch_delta_rule


class Duplicated(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank has whole; gives back its output and no bias, as Megatron's do."""

    def __init__(self, columns: int, rows: int, **_settings: Any) -> None:
        super().__init__(columns, rows, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def _parts(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The config of these arguments, and the process groups."""
    cpu_patches()
    model_parallel()
    from megatron.core.process_groups_config import ProcessGroupCollection

    return transformer_config(
        arguments, spec="local", dtype=torch.float32
    ), ProcessGroupCollection.use_mpu_process_groups()


@quietly
def delta_net(arguments: dict[str, Any]) -> Any:
    """``GatedDeltaNet`` alone, on megatron-core's own torch."""
    config, groups = _parts(arguments)
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    torch_delta_rule()
    config.deterministic_mode = True
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    return GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups).eval()


@quietly
def sparse_attention(arguments: dict[str, Any], number: int = 1) -> Any:
    """``AbsorbedMLASelfAttention`` over ``DSAttention`` of 0.19.2 alone; ``number`` counts layers from 1."""
    config, groups = _parts(arguments)
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=Duplicated, linear_wk=Duplicated, k_norm=WrappedTorchNorm, linear_weights_proj=Duplicated
    )
    core = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
    parts = absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
        linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=ModuleSpec(module=dsa.DSAttention, submodules=core),
        linear_proj=RowParallelLinear,
        q_layernorm=WrappedTorchNorm,
        kv_layernorm=WrappedTorchNorm,
    )
    return absorbed_mla.AbsorbedMLASelfAttention(
        config, parts, layer_number=number, attn_mask_type=AttnMaskType.causal, pg_collection=groups
    ).eval()


class Alone:
    """One attention module as a model: what ``mcore_roles.saved_tensors`` asks of it, under layer 0's keys."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def sharded_state_dict(self, metadata: dict[str, Any]) -> Any:
        return self.module.sharded_state_dict("decoder.layers.0.self_attention.", (), content_metadata(metadata))
