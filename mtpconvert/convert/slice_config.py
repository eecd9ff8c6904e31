"""The config.json of a slice: fewer layers, fewer experts, per-layer lists cut, MTP's entries kept at their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtpconvert.errors import ConfigError, UsageError

LAYERS_KEY = "num_hidden_layers"
_ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_k")
# Lists of layer numbers, not of one entry a layer.
_NUMBERS = ("mlp_only_layers", "moe_layers", "global_attn_layers", "full_attention_layers")


def sliced_config(
    config: Mapping[str, Any], *, layers: int, experts: int | None, expert_key: str | None, mtp_layers: int
) -> dict[str, Any]:
    """The changes: key -> new value. ``expert_key``: the config key that counts routed experts, None without any.

    Raises UsageError for more layers or experts than there are, ConfigError for a config without the numbers.
    """
    had = _count(config, LAYERS_KEY)
    if not 1 <= layers <= had:
        raise UsageError(f"--layers {layers}: the model has {had} layers", next_step=f"give a number from 1 to {had}")
    changes: dict[str, Any] = {}
    if layers != had:
        changes[LAYERS_KEY] = layers
        for key, value in config.items():
            cut = _per_layer(key, value, had, layers, mtp_layers)
            if cut is not None:
                changes[key] = cut
    if experts is not None:
        if expert_key is None:
            raise UsageError("--experts: this model has no routed experts", next_step="leave the option out")
        changes |= _experts(config, expert_key, experts)
    return changes


def _experts(config: Mapping[str, Any], expert_key: str, experts: int) -> dict[str, Any]:
    """Fewer experts, no more of them active than there are, and router groups that still divide them."""
    had = _count(config, expert_key)
    if not 1 <= experts <= had:
        raise UsageError(
            f"--experts {experts}: each layer has {had} routed experts", next_step=f"give a number from 1 to {had}"
        )
    if experts == had:
        return {}
    changes: dict[str, Any] = {expert_key: experts}
    active = experts
    for key in _ACTIVE:
        if isinstance(config.get(key), int):
            active = min(config[key], experts)
            if active != config[key]:
                changes[key] = active
    groups, chosen = config.get("n_group"), config.get("topk_group")
    if isinstance(groups, int) and groups > 1:
        # modeling_deepseek_v3.py:DeepseekV3TopkRouter ranks groups by the sum of their two best experts
        each = experts // groups
        if experts % groups or each < 2 or (chosen or groups) * each < active:
            changes |= {"n_group": 1, "topk_group": 1}
    return changes


def _per_layer(key: str, value: Any, had: int, layers: int, mtp_layers: int) -> list[Any] | None:
    """``value`` cut to ``layers``, where it is a list with an entry for each layer or a list of layer numbers."""
    if not isinstance(value, list) or key.endswith(("token_id", "token_ids")) or key == "architectures":
        return None
    if key in _NUMBERS:
        return [number for number in value if number < layers]
    if len(value) == had:
        return value[:layers]
    if mtp_layers and len(value) == had + mtp_layers:  # Step-3.5 pads its lists with the MTP layers' entries
        return value[:layers] + value[had:]
    return None


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(
            f"'{key}' is {value!r}; a slice needs the number at the top level of config.json",
            where=f"config.json: {key}",
            next_step="models that keep it in a nested config cannot be sliced",
        )
    return value
