"""Megatron arguments of the tiny configs, for the tests of both directions."""

from typing import Any

from mtpconvert.convert.arguments import Facts, megatron_arguments
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.mapping.dims import Scope
from tests.support.tiny_families import CONFIGS

V3_ROPE = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip


def arguments(family: str, facts: Facts | None = None, mtp_layers: int = 0, **changes: Any) -> dict[str, Any]:
    """The arguments of a tiny config with ``changes``; the value ``...`` removes a key."""
    config = {key: value for key, value in (CONFIGS[family] | changes).items() if value is not ...}
    mapping = mapping_for(config)
    scope = Scope(config, mapping.defaults, symbols={"mtp_layers": mtp_layers})
    return megatron_arguments(mapping.arguments, scope, facts)
