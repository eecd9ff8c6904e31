"""An expansion is bounded whatever a config counts."""

from __future__ import annotations

from typing import Any

import pytest

from mtpconvert.errors import ConfigError
from mtpconvert.mapping import expand as expand_module
from mtpconvert.mapping.catalogue import file_of, load, sample_configs
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.expand import expand


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_hidden_layers": 10**9}, "a model of 1,000,000,000 layers"),
        ({"n_routed_experts": 10**12}, "more than 20,000 tensors"),
        ({"num_nextn_predict_layers": 5000}, "more than 20,000 tensors"),
    ],
)
def test_a_slip_in_a_count_is_refused_before_it_fills_the_memory(
    counts: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expand_module.MOST_TILES > 10 * 46_181  # DeepSeek-V3's tiles; the limit is lowered for a quick test
    monkeypatch.setattr(expand_module, "MOST_TILES", 20_000)
    mapping = load(file_of("DeepseekV3ForCausalLM"))
    config = sample_configs("DeepseekV3ForCausalLM")["full"] | counts
    with pytest.raises(ConfigError, match=message) as refusal:
        expand(
            mapping, Scope(config, mapping.defaults, {"mtp_layers": config["num_nextn_predict_layers"]}), 129280, None
        )
    assert refusal.value.next_step
