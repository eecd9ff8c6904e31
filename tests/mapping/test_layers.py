"""``[layers]``: each form against a list written by hand."""

from __future__ import annotations

import re

import pytest

from mtpconvert.errors import ConfigError, MappingError
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.layers import check_selector, select_layers

CONFIG = {
    "num_hidden_layers": 8,
    "first_k_dense_replace": 3,
    "layer_types": ["linear", "linear", "full", "linear", "linear", "full", "linear", "full"],
    "mlp_only_layers": [1, 5],
    "freq": 3,
    "letters": "FSSFSSSS",
    "nested": {"only": [7, 0]},
}


def chosen(selectors: dict[str, str | tuple[str, str]], **config: object) -> list[int]:
    """Layers of the last name."""
    return list(list(select_layers(selectors, Scope(CONFIG | config)).values())[-1])


@pytest.mark.parametrize(
    ("selector", "layers"),
    [
        (("0", "num_hidden_layers"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (("first_k_dense_replace", "num_hidden_layers"), [3, 4, 5, 6, 7]),
        (("0", "first_k_dense_replace-3"), []),
        (("5", "3"), []),
        ('where(layer_types == "full")', [2, 5, 7]),
        ('where( layer_types=="absent" )', []),
        ("every(2, 0)", [0, 2, 4, 6]),
        ("every(freq, 1)", [1, 4, 7]),
        ("every(1, 0)", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("every(3,7)", [1, 4, 7]),  # offset modulo step
        ("every_from(3, 2)", [0, 1, 4, 7]),  # the first two, then every third after the second
        ("every_from(4, 1)", [0, 4]),
        ("every_from(1, 5)", [0, 1, 2, 3, 4, 5, 6, 7]),
        ('where(layer_types == "full") else every(2, 0)', [2, 5, 7]),
        ('where(missing == "full") else every(2, 0)', [0, 2, 4, 6]),
        ('where(missing == "F") else where(letters == "F") else every(2, 0)', [0, 3]),
        ("in(mlp_only_layers)", [1, 5]),
        ("in(nested.only)", [0, 7]),
        ('where(layer_types == "linear") minus in(mlp_only_layers)', [0, 3, 4, 6]),
        ('where(layer_types == "linear") and every(2, 0)', [0, 4, 6]),
    ],
)
def test_form(selector: str | tuple[str, str], layers: list[int]) -> None:
    assert chosen({"x": selector}) == layers


def test_earlier_names_and_operations_from_left_to_right() -> None:
    selectors: dict[str, str | tuple[str, str]] = {
        "all": ("0", "num_hidden_layers"),
        "sparse": ("first_k_dense_replace", "num_hidden_layers"),
        "moe": "sparse and every(2, 0)",
        "dense": "all minus moe",
    }
    found = select_layers(selectors, Scope(CONFIG))
    assert list(found["moe"]) == [4, 6]
    assert list(found["dense"]) == [0, 1, 2, 3, 5, 7]
    assert chosen(selectors | {"x": "all minus sparse minus in(mlp_only_layers)"}) == [0, 2]  # (a - b) - c


@pytest.mark.parametrize(
    ("selector", "config", "error", "message"),
    [
        ('where(kinds == "full")', {}, ConfigError, "'kinds' is None where a list is needed"),
        ("in(freq)", {}, ConfigError, "'freq' is 3 where a list is needed"),
        ("every(freq, 0)", {"freq": 0}, ConfigError, "steps by 0"),
        ("every(2, offset)", {}, ConfigError, "'offset' is neither a symbol"),
        ("most layers", {}, MappingError, "'most layers' selects no layers"),
        ("x minus every(2, 0)", {}, MappingError, "'x' selects no layers"),  # a name is no name of itself
        ("every(2)", {}, MappingError, "'every(2)' selects no layers"),
        ("where(kinds == full)", {}, MappingError, "selects no layers"),
        ("where(layer_types)", {}, MappingError, "selects no layers"),
        ("", {}, MappingError, "'' selects no layers"),
    ],
)
def test_refusal(selector: str, config: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        chosen({"x": selector}, **config)


def test_a_list_of_numbers() -> None:
    """vLLM's mimo_v2_flash.py: 1 for a layer that slides, 1 for a layer with experts."""
    assert chosen({"x": "where(pattern == 1)"}, pattern=[0, 1, 1, 0, 1]) == [1, 2, 4]
    assert chosen({"x": 'where(kinds == "a") else where(pattern == 0)'}, pattern=[0, 1, 1, 0]) == [0, 3]
    assert chosen({"x": 'where(pattern == "1")'}, pattern=[0, 1]) == []  # a text is no number


@pytest.mark.parametrize("selector", ["most layers", "x minus", "every(2, )", "a minus in(b", "every(2+,1)"])
def test_a_malformed_selection_is_refused_without_a_config(selector: str) -> None:
    with pytest.raises(MappingError):
        check_selector(selector, {"a"})


@pytest.mark.parametrize("selector", ["a", "a minus in(b)", 'where(t == "full") and a', "every(n+1, 2)"])
def test_a_good_selection_passes_without_a_config(selector: str) -> None:
    check_selector(selector, {"a"})
