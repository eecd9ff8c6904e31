"""Other spellings of prefixes: which one names show, what a mapping says in it, what a mapping file may not ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconvert.errors import CheckpointError, MappingError
from mtpconvert.mapping.catalogue import file_of, load
from mtpconvert.mapping.expand import expand
from mtpconvert.mapping.load import load_mapping
from mtpconvert.mapping.mtp import present_in_hf
from mtpconvert.mapping.spelling import spelled
from tests.support.mapping_files import BASE, CONFIG, written

ADDED = """
[[place]]
rows = ["extra"]
hf = "extra."
mcore = "extra."

[rows]
extra = [{ op = "rename", hf = "model.x", mcore = "x", dims = ["H"] }]
"""
NAMED = (
    BASE.replace('hf = "embed", mcore', 'hf = "model.embed", mcore')
    .replace('source = "embed"', 'source = "model.embed"')
    .replace("\n[rows]\n", ADDED)
)
SPELLED = """
[[spelling]]
source = "a paper"
prefixes = { "model." = "a.model.", "vision." = "a.vision.", "extra." = "a.extra." }

[[spelling]]
source = "another"
prefixes = { "model." = "model.text.", "model.layers." = "model.text.blocks." }
"""
OWN = ["model.embed", "model.layers.0.norm", "vision.x"]
FIRST = ["a.model.embed", "a.model.layers.0.norm", "a.vision.x"]
SECOND = ["model.text.embed", "model.text.blocks.0.norm"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path, NAMED.replace("[dims]", 'passthrough = ["vision."]\n[dims]', 1) + SPELLED)


@pytest.mark.parametrize(
    ("names", "embed", "layer", "vision"),
    [
        (OWN, "model.embed", "model.layers.", "vision."),
        ([], "model.embed", "model.layers.", "vision."),
        (["lm_head.weight"], "model.embed", "model.layers.", "vision."),
        (FIRST, "a.model.embed", "a.model.layers.", "a.vision."),
        (FIRST[2:], "a.model.embed", "a.model.layers.", "a.vision."),
        (SECOND, "model.text.embed", "model.text.blocks.", "vision."),
    ],
)
def test_every_text_of_the_hf_side_is_in_the_spelling_that_the_names_show(
    file: Path, names: list[str], embed: str, layer: str, vision: str
) -> None:
    mapping = spelled(load_mapping(file), names)
    scope = mapping.scope(CONFIG, {"mtp_layers": 1})
    expansion = expand(mapping, scope, 12, None)
    parts = ("norm", "gate", "up", "x.0.down", "x.1.down", "x.2.down")
    extra = "a.extra.model.x" if vision == "a.vision." else "extra.model.x"  # a part of a name, whatever it begins with
    layers = {f"{layer}{n}.{part}" for n in (0, 1) for part in parts}
    assert set(expansion.hf) == {embed, extra, layer + "2.eh", *layers}
    assert [(name, copy.source) for name, (_, copy) in expansion.aliases.items()] == [(layer + "2.embed", embed)]
    assert list(expansion.asides) == [layer + "2.freq"]
    assert set(expansion.mcore) == set(expand(load_mapping(file), scope, 12, None).mcore)
    assert present_in_hf([layer + "1.norm", layer + "2.eh"], mapping.mtp, scope) == {0: [layer + "2.eh"]}
    assert mapping.passes_through(vision + "y")


@pytest.mark.parametrize(
    ("names", "first", "other"),
    [
        ([*OWN, FIRST[1]], "model.embed", "a.model.layers.0.norm"),
        ([*FIRST, OWN[0]], "a.model.embed", "model.embed"),
        (["lm_head.weight", SECOND[1], FIRST[2]], "model.text.blocks.0.norm", "a.vision.x"),
    ],
)
def test_two_spellings_in_one_checkpoint_are_refused(file: Path, names: list[str], first: str, other: str) -> None:
    with pytest.raises(CheckpointError) as error:
        spelled(load_mapping(file), names)
    assert error.value.what.endswith(f"two ways: {first} and {other}")


def test_a_mapping_without_spellings_is_itself(tmp_path: Path) -> None:
    mapping = load_mapping(written(tmp_path, BASE))
    assert spelled(mapping, ["any.name"]) is mapping


def test_gemma_3_says_itself_what_transformers_renames() -> None:
    """conversion_mapping.py, \"llava\" and \"LlavaModel\", the other way round."""
    mapping = spelled(load(file_of("Gemma3ForConditionalGeneration")), ["vision_tower.x"])
    assert {place.hf for place in mapping.places} == {"", "language_model.model.layers.{i}."}
    assert mapping.passthrough == ("vision_tower.", "multi_modal_projector.")
    assert [row.hf[0] for row in mapping.rows["root_beside_vision"]] == [
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
        "language_model.lm_head.weight",
    ]


REFUSED = {
    "no dot": (('"a.model."', '"a.model"'), "'a.model' is no prefix"),
    "a dot first": (('"a.vision."', '".vision."'), "'.vision.' is no prefix"),
    "nothing renamed": (
        ('{ "model." = "model.text.", "model.layers." = "model.text.blocks." }', "{}"),
        "renames nothing",
    ),
    "no source": (('source = "another"', ""), "'source' is missing"),
    "no text": (('"a.model."', "7"), "'model.' is 7, no text"),
    "an unknown key": (('source = "another"', 'source = "another"\nwhy = 1'), "unknown keys why"),
    "behind a place": (
        ('"vision." = "a.vision."', '"model.layers.{i}.x." = "a."'),
        "'model.layers.{i}.x.' goes on behind the place 'model.layers.{i}.'",
    ),
    "with and without a prefix": (
        ('rows = ["layer"]', 'rows = ["layer", "root"]'),
        "row group root is placed with and without a prefix",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mapping_file_may_not_ask_for(case: str, tmp_path: Path) -> None:
    (old, new), message = REFUSED[case]
    text = NAMED + SPELLED
    assert old in text
    with pytest.raises(MappingError) as error:
        load_mapping(written(tmp_path, text.replace(old, new)))
    assert message in error.value.what
    assert "[[spelling]]" in (error.value.where or "")
