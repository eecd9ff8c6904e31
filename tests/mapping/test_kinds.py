"""``[kinds]``: per-layer lists of a config, cut to the trunk and held to what may stand in them."""

from __future__ import annotations

from typing import Any

import pytest

from mtpconvert.errors import ConfigError
from mtpconvert.mapping import catalogue
from mtpconvert.mapping.kinds import of_trunk
from mtpconvert.mapping.layers import select_layers

KINDS: dict[str, tuple[str | int, ...]] = {"types": ("full", "linear"), "letters": ("F", "S"), "numbers": (0, 1)}
FITS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "types": ["full", "linear", "full"],
    "letters": "FSS",
    "numbers": [0, 1, 1],
}


def cut(**changes: Any) -> dict[str, Any]:
    return dict(of_trunk(FITS | changes, KINDS, lambda key: f"text_config.{key}"))


def test_entries_behind_the_trunk_are_left_out() -> None:
    """Whatever they are: they are of MTP layers, which have kinds of their own."""
    assert cut() == FITS
    assert cut(types=["full", "linear", "full", "mtp"], letters="FSSX", numbers=[0, 1, 1, 7]) == FITS
    assert cut(types=None) == FITS | {"types": None}
    assert cut(num_hidden_layers=None)["num_hidden_layers"] is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"types": ["full", "odd", "full"]}, "text_config.types[1] is 'odd', no kind of layer"),
        ({"types": ["full", "linear", None]}, "text_config.types[2] is None, no kind of layer"),
        (
            {"types": ["full", "linear"]},
            "text_config.types[2] is missing: text_config.types has 2 entries for 3 layers",
        ),
        ({"types": []}, "text_config.types[0] is missing"),
        ({"letters": "FX"}, "text_config.letters[1] is 'X'"),
        ({"letters": "FS"}, "text_config.letters[2] is missing"),
        ({"numbers": [0, 2, 1]}, "text_config.numbers[1] is 2"),
        ({"numbers": [0, ["full"], 1]}, "text_config.numbers[1] is ['full']"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_by_key_index_and_value(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cut(**changes)
    assert what in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith("config.json: text_config.")


def test_numbers_of_layers_behind_the_trunk_are_left_out() -> None:
    mapping = catalogue.load(catalogue.file_of("Qwen3MoeForCausalLM"))
    config = catalogue.sample_configs("Qwen3MoeForCausalLM")["tiny"]
    scope = mapping.scope(config | {"mlp_only_layers": [1, 7]}, {"mtp_layers": 0})
    assert list(select_layers({"x": "in(mlp_only_layers)"}, scope)["x"]) == [1]
    scope = mapping.scope(config | {"mlp_only_layers": [1, "2"]}, {"mtp_layers": 0})
    with pytest.raises(ConfigError, match=r"mlp_only_layers\[1\] is '2', no number of a layer"):
        select_layers(mapping.layers, scope)
