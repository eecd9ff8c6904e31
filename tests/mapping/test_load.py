"""Mapping files: includes, variants, faults that show when a file is expanded, junk, and the shipped ones."""

from __future__ import annotations

import copy
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconvert.errors import ConfigError, MappingError, MtpConvertError, NotABijectionError
from mtpconvert.mapping.catalogue import architectures, file_of, load, sample_configs
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.expand import Expansion, expand
from mtpconvert.mapping.load import load_mapping
from mtpconvert.mapping.model import Row
from mtpconvert.mapping.prove import prove
from tests.support.mapping_files import BASE, CONFIG, written


def expanded(file: Path, **config: Any) -> Expansion:
    scope = Scope(CONFIG | config, load_mapping(file).defaults, {"mtp_layers": 1})
    expansion = expand(load_mapping(file), scope, 12, None)
    prove(expansion.tiles, expansion.fills)
    return expansion


def test_the_base_file_means_what_it_says(tmp_path: Path) -> None:
    expansion = expanded(written(tmp_path, BASE))
    per_layer = ("norm", "gate", "up", "x.0.down", "x.1.down", "x.2.down")
    expected = {"embed": (10, 4), "model.layers.2.eh": (4, 8)}
    for layer in (0, 1):
        for name in per_layer:
            shape = {"norm": (4,), "gate": (8, 4), "up": (8, 4)}.get(name, (4, 4))
            expected[f"model.layers.{layer}.{name}"] = shape
    assert {name: entry.shape for name, entry in expansion.hf.items()} == expected
    assert {name: entry.shape for name, entry in expansion.mcore.items()} == {
        "embedding": (12, 4),
        "mtp.layers.0.eh": (4, 8),
        **{f"decoder.layers.{layer}.norm": (4,) for layer in (0, 1)},
        **{f"decoder.layers.{layer}.fc1": (16, 4) for layer in (0, 1)},
        **{f"decoder.layers.{layer}.x.fc2": (3, 4, 4) for layer in (0, 1)},
    }
    assert {name: copy.source for name, (_, copy) in expansion.aliases.items()} == {"model.layers.2.embed": "embed"}
    assert {name: entry.shape for name, (entry, _) in expansion.asides.items()} == {"model.layers.2.freq": (1,)}
    assert [entry.name for entry in expansion.hf.values() if entry.mtp == 0] == ["model.layers.2.eh"]


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MappingError, match="cannot be read"):
        load_mapping(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_bytes(b"schema = 1 # \xff")
    with pytest.raises(MappingError, match="cannot be read"):
        load_mapping(tmp_path / "odd.toml")


# ---- included row groups

SHARED = '[rows]\nlayer2 = [\n  { op = "rename", hf = "post", mcore = "post", dims = ["H"] },\n]\n'


def including(name: str) -> str:
    return BASE.replace("[dims]", f'include = ["{name}"]\n[dims]', 1).replace('["layer"]', '["layer", "layer2"]')


def test_an_included_group_stands_beside_the_file_or_is_the_shipped_one(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "extra.toml").write_text(SHARED)
    file = written(tmp_path, including("extra"))
    mapping = load_mapping(file, shipped)
    assert mapping.rows["layer2"][0].place == "extra.toml: group layer2, row 1"
    (tmp_path / "_shared").mkdir()
    (tmp_path / "_shared" / "extra.toml").write_text(SHARED.replace("post", "own"))
    assert load_mapping(file, shipped).rows["layer2"][0].hf == ("own",)


def test_an_include_that_is_nowhere_is_refused_with_both_places(tmp_path: Path) -> None:
    with pytest.raises(MappingError, match="there is no shared file 'extra'") as refusal:
        load_mapping(written(tmp_path, including("extra")), tmp_path / "shipped")
    assert str(tmp_path / "_shared" / "extra.toml") in refusal.value.what
    assert str(tmp_path / "shipped" / "extra.toml") in refusal.value.what


@pytest.mark.parametrize(
    ("shared", "what", "where"),
    [
        (SHARED.replace("layer2", "layer"), "stands already in an included file", "group layer"),
        ("schema = 1\n" + SHARED, "unknown keys schema; known: rows", "top level"),
        (SHARED.replace("rename", "renam"), "unknown op 'renam'", "group layer2, row 1"),
    ],
)
def test_a_bad_include_is_refused_naming_its_file(tmp_path: Path, shared: str, what: str, where: str) -> None:
    (tmp_path / "_shared").mkdir()
    (tmp_path / "_shared" / "extra.toml").write_text(shared)
    with pytest.raises(MappingError) as refusal:
        load_mapping(written(tmp_path, including("extra")))
    assert what in refusal.value.what
    assert where in str(refusal.value.where)
    assert ".toml" in str(refusal.value.where)


def test_two_includes_with_the_same_group_clash(tmp_path: Path) -> None:
    (tmp_path / "_shared").mkdir()
    for name in ("one", "two"):
        (tmp_path / "_shared" / f"{name}.toml").write_text(SHARED)
    text = including("one").replace('["one"]', '["one", "two"]')
    with pytest.raises(MappingError, match="stands already") as refusal:
        load_mapping(written(tmp_path, text))
    assert "two.toml: group layer2" in str(refusal.value.where)


# ---- faults that need a config, and that the expansion names

HARMED: dict[str, tuple[str, str, type[MtpConvertError], str]] = {
    "a source that no row has": (
        'source = "embed"',
        'source = "emb"',
        MappingError,
        "repeats emb, which no row relates",
    ),
    "a copy of another shape": (
        'source = "embed", dims = ["V", "H"]',
        'source = "embed", dims = ["H", "V"]',
        MappingError,
        "which is [10, 4]",
    ),
    "a copy that has a row": (
        'hf = "eh", mcore = "eh"',
        'hf = "embed", mcore = "eh"',
        MappingError,
        "has a second row",
    ),
    "a copy of itself": (
        'hf = "embed", source = "embed"',
        'hf = "own", source = "model.layers.2.own"',
        MappingError,
        "no row relates",
    ),
    "an aside that is a copy too": ('hf = "freq"', 'hf = "embed"', MappingError, "has a second row"),
    "the same name in two rows": ('hf = "norm", mcore = "norm"', 'hf = "gate", mcore = "norm"', NotABijectionError, ""),
    "the same target in two rows": ('mcore = "fc1"', 'mcore = "norm"', NotABijectionError, ""),
    "a group placed twice": ('rows = ["layer"]', 'rows = ["layer", "layer"]', NotABijectionError, "related twice"),
    "an inexact division": ('dims = ["Q"]', 'dims = ["heads/vocab_size"]', ConfigError, "divides 6 by 10"),
    "an inexact division in [dims]": ('"heads/groups"', '"heads/hidden_size"', ConfigError, "divides 6 by 4"),
    "an unknown symbol": ('dims = ["Q"]', 'dims = ["Z"]', ConfigError, "'Z' is neither a symbol"),
    "a size of nothing": ('dims = ["Q"]', 'dims = ["Q-1"]', ConfigError, "a tensor has no such shape"),
}


@pytest.mark.parametrize("name", HARMED)
def test_fault_is_found_when_the_mapping_is_expanded(tmp_path: Path, name: str) -> None:
    old, new, error, what = HARMED[name]
    assert BASE.count(old) == 1
    with pytest.raises(error) as refusal:
        expanded(written(tmp_path, BASE.replace(old, new)))
    assert what in refusal.value.what
    assert refusal.value.where


def test_a_chain_of_copies_ends_at_the_tensor_that_megatron_has(tmp_path: Path) -> None:
    """Head copy -> tied head -> embedding, whichever of the two comes first in the file."""
    tied = '  { op = "tie", hf = "lm_head", source = "embed", dims = ["V", "H"] },\n'
    text = BASE.replace('source = "embed"', 'source = "lm_head"').replace("root = [\n", "root = [\n" + tied)
    expansion = expanded(written(tmp_path, text))
    assert {name: (copy.source, copy.tie) for name, (_, copy) in expansion.aliases.items()} == {
        "lm_head": ("embed", True),
        "model.layers.2.embed": ("embed", False),
    }


def test_variants_are_chosen_by_the_names_that_are_there(tmp_path: Path) -> None:
    text = BASE.replace('rows = ["layer"]', 'rows = ["layer", "mlp"]').replace(
        "[rows]",
        "[variants]\nmlp = ['fused', 'split']\n[rows]\n"
        'fused = [ { op = "rename", hf = "both", mcore = "both", dims = ["2*H"] } ]\n'
        'split = [ { op = "gate_up_concat", hf = ["one", "two"], mcore = "both", dims = ["H"] } ]\n',
    )
    file = written(tmp_path, text)
    assert expanded(file).variants == {"mlp @ model.layers.0.": "fused", "mlp @ model.layers.1.": "fused"}
    names = {"model.layers.0.both", "model.layers.1.one", "model.layers.1.two"}
    expansion = expand(load_mapping(file), Scope(CONFIG, {"groups": 1}, {"mtp_layers": 0}), 10, names)
    assert expansion.variants == {"mlp @ model.layers.0.": "fused", "mlp @ model.layers.1.": "split"}
    assert "model.layers.0.both" in expansion.hf
    assert "model.layers.1.two" in expansion.hf


@pytest.mark.parametrize(
    ("variants", "what"),
    [
        ('mlp = ["fused", "ghost"]', "names unknown row groups ghost"),
        ('mlp = ["fused"]', "two row groups or more"),
        ('layer = ["fused", "root"]', "has the name of a row group"),
        ('mlp = "fused"', "array of texts"),
    ],
)
def test_bad_variants(tmp_path: Path, variants: str, what: str) -> None:
    name = variants.split()[0]
    text = BASE.replace('rows = ["layer"]', f'rows = ["layer", "{name}"]').replace(
        "[rows]", f'[variants]\n{variants}\n[rows]\nfused = [ {{ op = "rename", hf = "b", mcore = "b", dims = [] }} ]\n'
    )
    with pytest.raises(MappingError, match=what) as refusal:
        load_mapping(written(tmp_path, text))
    assert "variants" in str(refusal.value.where)


# ---- anything may stand anywhere

JUNK = [None, 7, -1, 2.5, True, "", "x", "{i}", "a*", "=x", [], ["x"], [1], {}, {"x": 1}, [{"op": "rename"}], [["x"]]]


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {as_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def spots(value: object) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [spot for key, item in items for spot in [(value, key), *spots(item)]]


@settings(max_examples=250)
@given(st.data())
def test_junk_anywhere_is_refused_as_a_mapping_or_config_error_or_is_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    table = copy.deepcopy(tomllib.loads(BASE))
    container, key = data.draw(st.sampled_from(spots(table)))
    junk = data.draw(st.sampled_from(JUNK))
    if junk is None:
        del container[key]
    else:
        container[key] = junk
    file = tmp_path_factory.getbasetemp() / "junk.toml"
    file.write_text("\n".join(f"{json.dumps(name)} = {as_toml(value)}" for name, value in table.items()))
    try:
        expanded(file)
    except MtpConvertError as error:
        assert error.exit_code in (3, 4, 5)


# ---- the shipped files


@pytest.mark.parametrize("architecture", architectures())
def test_shipped_file_is_a_bijection_on_its_sample_configs(architecture: str) -> None:
    mapping = load(file_of(architecture))
    assert mapping.architecture == architecture == file_of(architecture).stem
    assert mapping.evidence
    for config in sample_configs(architecture).values():
        assert config["architectures"] == [architecture]
    scope = mapping.scope(sample_configs(architecture)["tiny"], {"mtp_layers": 1 if mapping.mtp else 0})
    expansion = expand(mapping, scope, scope.integer("vocab_size") + 30, None)
    prove(expansion.tiles, expansion.fills)


class NamesOf:
    """The HF names of some row groups, under any prefix and of any expert: what chooses them among variants."""

    def __init__(self, rows: list[Row]) -> None:
        self.ends = tuple(name.replace("{e}", "0") for row in rows for name in row.hf)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.endswith(self.ends)


@pytest.mark.parametrize("architecture", architectures())
def test_every_row_of_a_shipped_file_is_used_by_some_config(architecture: str) -> None:
    """A row that no config reaches would never have been proven; both settings of every switch are tried, every group
    of every variant, and the first layer without experts."""
    mapping = load(file_of(architecture))
    tiny = sample_configs(architecture)["tiny"]
    rows = {row.place for group in mapping.rows.values() for row in group}
    switches = {key for group in mapping.rows.values() for row in group for key in (row.when, row.unless) if key}
    dense = [{}, {"mlp_only_layers": [0]}] if "mlp_only_layers" in mapping.defaults else [{}]
    choices = max(map(len, mapping.variants.values()), default=1)
    used: set[str] = set()
    for value, without, choice in itertools.product((1, 0, None), dense, range(choices)):
        scope = mapping.scope(tiny, {"mtp_layers": 1})
        scope.config = {**scope.config, **dict.fromkeys(switches, value), **without}
        chosen = [row for groups in mapping.variants.values() for row in mapping.rows[groups[choice % len(groups)]]]
        expansion = expand(mapping, scope, scope.integer("vocab_size") + 30, NamesOf(chosen))
        prove(expansion.tiles, expansion.fills)
        for table in (expansion.hf, expansion.mcore):
            used |= {entry.row for entry in table.values()}
        used |= {entry.row for entry, _ in [*expansion.aliases.values(), *expansion.asides.values()]}
    assert used == rows
