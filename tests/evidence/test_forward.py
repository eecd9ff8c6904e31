"""The converted model in the real megatron-core computes what transformers computes from the source, in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import mcore, mcore_forward
from tests.support.frameworks_convert import FAMILIES, Converted, Tiny
from tests.support.frameworks_hf import hf_mtp_logits, hf_trunk_logits

TOLERANCE = 1e-5  # of the logits' scale
VOCABULARY = 98


def tokens(length: int = 24) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(7))


def loaded(directory: Path) -> Any:
    model = mcore.model_from_args(mcore.common_state(directory)["args"], spec="local")
    assert mcore.load_into(model, directory) == []
    return model


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """max |difference| over the vocabulary proper, relative to the largest logit."""
    assert wanted.shape[-1] == VOCABULARY and got.shape[-1] >= VOCABULARY
    return float((got[..., :VOCABULARY] - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_trunk(family: str, tiny: Tiny, converted: Converted) -> None:
    source = tiny(family, dtype="F32")
    model = loaded(converted(source, spec="local"))
    assert distance(mcore_forward.trunk_logits(model, tokens()), hf_trunk_logits(source, tokens())) < TOLERANCE


@pytest.mark.parametrize("depth", [1, 2])
def test_mtp(depth: int, tiny: Tiny, converted: Converted) -> None:
    source = tiny("deepseek_v3", dtype="F32", mtp_layers=2)
    model = loaded(converted(source, spec="local"))
    wanted = hf_mtp_logits(source, tokens(), depth)
    assert distance(mcore_forward.mtp_logits(model, tokens(), depth), wanted) < TOLERANCE


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MLA_YARN = YARN | {"factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # 64 rotated dims: some wavelengths are kept, some interpolated, some divided
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 64}),
    "llama3 factor": ("llama", {"rope_parameters": LLAMA3 | {"factor": 32.0}, "head_dim": 64}),
    "old spelling": ("llama", {"rope_parameters": ..., "rope_theta": 777.0, "rope_scaling": None}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 32}),
    "yarn without truncation": ("qwen3", {"rope_parameters": YARN | {"truncate": False}, "head_dim": 32}),
    "MLA yarn": ("deepseek_v3", {"rope_parameters": MLA_YARN, "qk_rope_head_dim": 32, "head_dim": 32}),
    "MLA yarn, no mscale": ("deepseek_v3", {"rope_parameters": YARN, "qk_rope_head_dim": 32, "head_dim": 32}),
    "sliding window": ("mistral", {"sliding_window": 5}),
    "sliding window by layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "one router group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}),
    "epsilon": ("qwen2", {"rms_norm_eps": 0.01}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_carry_the_config(variant: str, tiny: Tiny, converted: Converted) -> None:
    """What ``args`` says about rotary embedding, windows, routing and epsilon is what the config says."""
    family, changes = VARIANTS[variant]
    source = tiny(family, dtype="F32", config_overrides=changes)
    model = loaded(converted(source, spec="local"))
    assert distance(mcore_forward.trunk_logits(model, tokens(64)), hf_trunk_logits(source, tokens(64))) < TOLERANCE


def halves(model: Any, name: str, axis: int) -> None:
    """Exchange the two halves of a parameter along ``axis``."""
    weight = dict(model.named_parameters())[name]
    first, second = weight.data.clone().chunk(2, dim=axis)
    weight.data.copy_(torch.cat([second, first], dim=axis))


def exchange_k_and_v(model: Any) -> None:
    """Of each of Qwen3's 2 query groups (3 query heads, key, value of 10 rows each), in the first layer."""
    weight = dict(model.named_parameters())["decoder.layers.0.self_attention.linear_qkv.weight"]
    grouped = weight.data.clone().view(2, 5, 10, -1)
    weight.data.copy_(grouped[:, [0, 1, 2, 4, 3]].reshape(weight.shape))


BREAKS: dict[str, tuple[str, int, Callable[[Any], None]]] = {
    "halves of eh_proj": ("deepseek_v3", 1, lambda model: halves(model, "mtp.layers.0.eh_proj.weight", 1)),
    "gate and up": ("qwen3", 0, lambda model: halves(model, "decoder.layers.0.mlp.linear_fc1.weight", 0)),
    "gate and up of an expert": (
        "deepseek_v3",
        0,
        lambda model: halves(model, "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", 0),
    ),
    "k and v": ("qwen3", 0, exchange_k_and_v),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_an_exchange_is_seen(broken: str, tiny: Tiny, converted: Converted) -> None:
    """The comparison can fail: each of these exchanges moves the logits by a thousand times the tolerance."""
    family, depth, exchange = BREAKS[broken]
    source = tiny(family, dtype="F32")
    model = loaded(converted(source, spec="local"))
    exchange(model)
    if depth:
        got, wanted = mcore_forward.mtp_logits(model, tokens(), depth), hf_mtp_logits(source, tokens(), depth)
    else:
        got, wanted = mcore_forward.trunk_logits(model, tokens()), hf_trunk_logits(source, tokens())
    assert distance(got, wanted) > 1000 * TOLERANCE
