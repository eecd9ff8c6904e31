"""The grammar of dims, by hand: left to right, exact division, dotted keys, defaults, and every refusal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconvert.errors import ConfigError, MappingError
from mtpconvert.mapping.dims import Scope, check_expression, evaluate

CONFIG = {"hidden_size": 36, "heads": 4, "kv": None, "text_config": {"mtp": {"layers": 3}}, "tied": True, "rope": "x"}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("hidden_size", 36),
        ("2+3*4", 20),  # left to right: (2+3)*4
        ("2*3+4", 10),
        ("20-2-3", 15),
        ("24/4*2", 12),
        ("24/4/2", 3),
        ("hidden_size/heads", 9),
        ("2*hidden_size-1", 71),
        (" hidden_size /  heads ", 9),
        ("text_config.mtp.layers+1", 4),
        ("SIZE*2", 10),
        ("i+hidden_size", 41),
    ],
)
def test_value(expression: str, value: int) -> None:
    assert evaluate(expression, Scope(CONFIG, symbols={"SIZE": 5}), i=5) == value


@given(
    st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 50)), min_size=1, max_size=6),
    st.integers(0, 50),
)
def test_terms_are_taken_from_left_to_right(steps: list[tuple[str, int]], first: int) -> None:
    expected, expression = first, str(first)
    for operator, term in steps:
        expected = {"+": expected + term, "-": expected - term, "*": expected * term}[operator]
        expression += operator + str(term)
    assert evaluate(expression, Scope({})) == expected


@given(st.integers(0, 1000), st.integers(1, 40))
def test_division_is_exact_or_refused(dividend: int, divisor: int) -> None:
    if dividend % divisor == 0:
        assert evaluate(f"a/{divisor}", Scope({"a": dividend})) == dividend // divisor
    else:
        with pytest.raises(ConfigError, match=f"divides {dividend} by {divisor}, which is not exact"):
            evaluate(f"a/{divisor}", Scope({"a": dividend}))


def test_division_by_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="divides 4 by 0"):
        evaluate("4/a", Scope({"a": 0}))


@pytest.mark.parametrize(
    "expression", ["", " ", "+", "2+", "*2", "2 3", "a b", "2**3", "a//b", "(a)", "-1", "a,b", "2.5", "a%b", "a!", "é"]
)
def test_what_is_no_expression(expression: str) -> None:
    with pytest.raises(MappingError, match=re.escape(f"'{expression}' is no expression")) as refusal:
        check_expression(expression)
    assert refusal.value.exit_code == 3


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("absent", "'absent' is neither a symbol of the mapping nor a key of config.json"),
        ("kv", "'kv' is neither a symbol"),  # null is as good as absent
        ("text_config.mtp.depth", "'text_config.mtp.depth' is neither"),
        ("hidden_size.part", "'hidden_size.part' is neither"),  # a number has no parts
        ("tied", "'tied' is True where an integer is needed"),
        ("rope", "'rope' is 'x' where an integer is needed"),
        ("text_config", "where an integer is needed"),
    ],
)
def test_what_is_no_integer(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        evaluate(f"2*{key}", Scope(CONFIG))
    assert refusal.value.exit_code == 5


def test_a_default_stands_in_for_a_missing_or_null_key_only_and_is_recorded() -> None:
    scope = Scope(CONFIG, {"kv": "=heads", "head_dim": "=hidden_size/heads", "hidden_size": 1, "depth.d": 8})
    assert evaluate("kv", scope) == 4
    assert evaluate("head_dim", scope) == 9
    assert evaluate("hidden_size", scope) == 36
    assert evaluate("depth.d", scope) == 8
    assert scope.used_defaults == {"kv": 4, "head_dim": 9, "depth.d": 8}


def test_a_default_may_need_another_default() -> None:
    assert evaluate("a", Scope({"c": 6}, {"a": "=b*2", "b": "=c/3"})) == 4


def test_defaults_that_run_in_a_circle_are_refused() -> None:
    with pytest.raises(MappingError, match="'a' is computed from itself: a -> b -> a"):
        evaluate("a", Scope({}, {"a": "=b", "b": "=a"}))


def test_symbols_come_before_the_config() -> None:
    assert evaluate("heads", Scope(CONFIG, symbols={"heads": 7})) == 7
    assert evaluate("heads", Scope(CONFIG, symbols={"heads": 7}), heads=9) == 9


@pytest.mark.parametrize(
    ("config", "truth"),
    [
        ({}, False),
        ({"x": None}, False),
        ({"x": False}, False),
        ({"x": 0}, False),
        ({"x": []}, False),
        ({"x": ""}, False),
        ({"x": True}, True),
        ({"x": 1536}, True),
        ({"x": [0]}, True),
    ],
)
def test_truth_of_when_and_unless(config: dict[str, object], truth: bool) -> None:
    assert Scope(config).truth("x") is truth


def test_truth_of_a_default_and_of_a_symbol() -> None:
    assert Scope({}, {"x": True}).truth("x") is True
    assert Scope({"x": True}, symbols={"x": 0}).truth("x") is False
    assert Scope({"y": 3}, {"x": "=y"}).truth("x") is True
    assert Scope({}, {"x": "=y"}).truth("x") is False
