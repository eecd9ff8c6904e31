"""config.json edits change the field and no other byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconvert.convert.configs import change_config, read_config, with_values
from mtpconvert.errors import ConfigError

keys = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=6)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 99), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)
documents = st.dictionaries(keys, values, max_size=5)


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> str:
    """``value`` as JSON with white space drawn at every place where JSON allows it."""

    def space() -> str:
        return draw(st.sampled_from(["", " ", "\n", "\t", "\r\n  "]))

    def spell(item: Any) -> str:
        if isinstance(item, dict):
            parts = [f"{space()}{json.dumps(k)}{space()}:{space()}{spell(v)}{space()}" for k, v in item.items()]
            return "{" + (",".join(parts) or space()) + "}"
        if isinstance(item, list):
            return "[" + (",".join(f"{space()}{spell(one)}{space()}" for one in item) or space()) + "]"
        return json.dumps(item, ensure_ascii=draw(st.booleans()))

    return space() + spell(value) + space()


def paths(document: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of everything inside objects."""
    found = []
    for key, value in document.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += paths(value, f"{prefix}{key}.")
    return found


def set_in(document: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for part in parents:
        document = document[part]
    document[last] = value


@given(st.data(), documents.filter(bool), st.one_of(st.integers(0, 9), st.text(max_size=4)))
def test_a_value_is_replaced_in_its_place(data: st.DataObject, document: dict[str, Any], value: Any) -> None:
    """What stands before and after the old value's own characters is untouched, and json agrees on the meaning."""
    text = data.draw(spelled(document))
    dotted = data.draw(st.sampled_from(paths(document)))
    changed = with_values(text, {dotted: value})
    set_in(document, dotted, value)
    assert json.loads(changed) == document
    spelling = json.dumps(value)
    cuts = [m.start() for m in re.finditer(re.escape(spelling), changed)]
    assert any(text.startswith(changed[:at]) and text.endswith(changed[at + len(spelling) :]) for at in cuts), (
        "bytes outside the value changed"
    )


@given(st.data(), documents.filter(bool))
def test_a_key_is_removed_however_it_is_spelled(data: st.DataObject, document: dict[str, Any]) -> None:
    text = data.draw(spelled(document))
    dotted = data.draw(st.sampled_from(paths(document)))
    *parents, last = dotted.split(".")
    inner = document
    for part in parents:
        inner = inner[part]
    del inner[last]
    assert json.loads(with_values(text, {dotted: None})) == document


@given(st.data(), documents, keys, st.integers(0, 9))
def test_a_missing_key_is_added_in_front_of_the_others(
    data: st.DataObject, document: dict[str, Any], key: str, value: int
) -> None:
    document.pop(key, None)
    text = data.draw(spelled(document))
    changed = with_values(text, {key: value})
    assert json.loads(changed) == document | {key: value}
    begin = text.index("{") + 1
    assert changed.startswith(text[:begin])
    assert changed.endswith(text[begin:])


def test_a_usual_file() -> None:
    text = '{\n  "num_nextn_predict_layers": 1,\n  "vocab_size": 98\n}\n'
    assert with_values(text, {"num_nextn_predict_layers": 0}) == text.replace(": 1", ": 0")
    assert with_values(text, {"vocab_size": 128, "num_nextn_predict_layers": 0}) == (
        '{\n  "num_nextn_predict_layers": 0,\n  "vocab_size": 128\n}\n'
    )
    assert with_values(text, {"new": 0}) == (
        '{\n  "new": 0,\n  "num_nextn_predict_layers": 1,\n  "vocab_size": 98\n}\n'
    )
    assert with_values("{}", {"new": 0}) == '{"new": 0}'


def test_a_key_of_another_level_or_in_a_text_is_left_alone() -> None:
    text = '{"a": {"k": 1}, "b": "\\"k\\": 2", "c": ["k", {"k": 3}], "k": 4}'
    assert with_values(text, {"k": 0}) == text.replace('"k": 4', '"k": 0')
    assert with_values(text, {"a.k": 0}) == text.replace('"k": 1', '"k": 0')


def test_a_key_that_stands_twice_is_changed_where_json_reads_it() -> None:
    assert json.loads(with_values('{"k": 1, "x": 2, "k": 3}', {"k": 0})) == {"k": 0, "x": 2}


@pytest.mark.parametrize("text", ['{"k": 1}', '{"x": [{"k": 1}], "k": 1}', '{"x": 7, "y": {"k": 1}}', '{"x": null}'])
def test_a_parent_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no object 'x'"):
        with_values(text, {"x.k": 0})


def test_line_ends_and_missing_last_newline_stay(tmp_path: Path) -> None:
    raw = b'{\r\n\t"k":1 ,\r\n\t"name":"\xc3\xa9"\r\n}'
    (tmp_path / "config.json").write_bytes(raw)
    change_config(tmp_path, {"k": 0})
    assert (tmp_path / "config.json").read_bytes() == raw.replace(b":1", b":0")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "there is no config.json"),
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"[1]", "holds no JSON object"),
        (b'{"a": "\xff"}', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_unreadable_configs(tmp_path: Path, raw: bytes | None, message: str) -> None:
    if raw is not None:
        (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_config(tmp_path)
    assert str(tmp_path) in str(refusal.value.where) and refusal.value.next_step


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ('{"a": 1, "q": {"x": [1, "}"]}, "b": 2}', "q", '{"a": 1, "b": 2}'),
        ('{\n  "q": 1,\n  "b": 2\n}\n', "q", '{\n  "b": 2\n}\n'),
        ('{\r\n  "a": 1,\r\n  "q": {"x": 1}\r\n}', "q", '{\r\n  "a": 1\r\n}'),
        ('{"q": 1}', "q", "{}"),
        ('{"t": {"q": 1, "z": 2}, "q": 3}', "t.q", '{"t": {"z": 2}, "q": 3}'),
        ('{"q": 1, "a": "q", "q": 2}', "q", '{"a": "q"}'),
        ('{"a": 1}', "q", '{"a": 1}'),
    ],
)
def test_a_key_is_removed_with_its_comma_and_nothing_else(text: str, key: str, expected: str) -> None:
    assert with_values(text, {key: None}) == expected
