"""What the loader refuses without a config: every message says what, in which file, group and row."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconvert.errors import MappingError
from mtpconvert.mapping.load import load_mapping
from tests.support.mapping_files import BASE, written

# what is replaced in BASE, by what; what the message says; where it says it is
REFUSED: dict[str, tuple[str, str, str, str]] = {
    "no TOML": ("schema = 1", "schema = = 1", "cannot be read", ""),
    "another schema": ("schema = 1", "schema = 2", "schema is 2, this version reads 1", "top level"),
    "no schema": ("schema = 1", "", "schema is None", "top level"),
    "another model class": ('"GPTModel"', '"MambaModel"', "only GPTModel is known", "top level"),
    "no architecture": ('architecture = "TinyForCausalLM"', "", "'architecture' is missing", "top level"),
    "architecture no text": ('"TinyForCausalLM"', "7", "'architecture' is 7, no text", "top level"),
    "unknown top key": ("[mtp]", "[mpt]\nx = 1\n[mtp]", "unknown keys mpt", "top level"),
    "evidence no array": ('["a paper"]', '"a paper"', "array of texts", "evidence"),
    "dims no expression": ('"heads/groups"', '"heads//groups"', "is no expression", "[dims] Q"),
    "dims a number": ('"heads/groups"', "3", "expression in quotes", "[dims] Q"),
    "default without source": (', source = "TinyConfig"', "", "needs exactly value and source", "[defaults] groups"),
    "default with a bad expression": ('"=heads"', '"=heads*"', "is no expression", "[defaults] groups"),
    "default source no text": ('source = "TinyConfig"', "source = 1", "'source' is 1, no text", "[defaults] groups"),
    "layers of three": ('["0", "mtp_layers"]', '["0", "1", "2"]', "neither [first, last]", "[layers] mtp"),
    "layers of numbers": ('["0", "mtp_layers"]', "[0, 1]", "expression in quotes", "[layers] mtp"),
    "layers in unknown words": ('["0", "mtp_layers"]', '"most"', "'most' selects no layers", "[layers] mtp"),
    "mtp unknown key": ("[mtp]", "[mtp]\nfoo = 1", "unknown keys foo", "[mtp]"),
    "mtp without count": ('count = ["num_nextn_predict_layers"]', "", "'count' names no config key", "[mtp]"),
    "mtp count and no count": (
        "[mtp]",
        '[mtp]\nno_count = "x"',
        "names config keys, and 'no_count' says that",
        "[mtp]",
    ),
    "mtp known absent": ("[mtp]", '[mtp]\nknown_absent = "x"', "'present' has nothing to name", "[mtp]"),
    "mtp default without source": ("[mtp]", "[mtp]\ndefault = { value = 1 }", "exactly value", "[mtp] default"),
    "mtp default of none": (
        "[mtp]",
        '[mtp]\ndefault = { value = 0, source = "x" }',
        "a number from 1 on",
        "[mtp] default",
    ),
    "kinds no array": (
        "[mtp]",
        '[kinds]\nlayer_types = "a"\n[mtp]',
        "array of texts or numbers",
        "[kinds] layer_types",
    ),
    "kinds of nothing": ("[mtp]", "[kinds]\nlayer_types = []\n[mtp]", "array of texts or numbers", "[kinds]"),
    "a list without kinds": (
        '["0", "mtp_layers"]',
        "'where(layer_types == \"a\")'",
        "asks layer_types for 'a', which [kinds] does not list",
        "[layers] mtp",
    ),
    "a list without this kind": (
        '["0", "mtp_layers"]',
        "'where(pattern == 1)'\n[kinds]\npattern = [0, 2]",
        "asks pattern for 1, which [kinds] does not list",
        "[layers] mtp",
    ),
    "mtp count a text": ('["num_nextn_predict_layers"]', '"num_nextn"', "array of texts", "[mtp] count"),
    "mtp without present": ('present = "model.layers.{num_hidden_layers+i}."', "", "'present' is missing", "[mtp]"),
    "mtp present without i": (
        'present = "model.layers.{num_hidden_layers+i}."',
        'present = "mtp."',
        "needs the layer's number",
        "[mtp]",
    ),
    "mtp present of another form": (
        'present = "model.layers.{num_hidden_layers+i}."',
        'present = "mtp.{2*i}."',
        "needs the layer's number",
        "[mtp]",
    ),
    "unsupported version": (
        "[mtp]",
        '[[unsupported]]\nmcore = "0.17"\nwhy = "x"\n[mtp]',
        "mcore is '0.17'; known: 0.16, 0.19",
        "[[unsupported]], entry 1",
    ),
    "unsupported without why": (
        "[mtp]",
        '[[unsupported]]\nmcore = "0.19"\n[mtp]',
        "'why' is missing",
        "[[unsupported]], entry 1",
    ),
    "place unknown key": ('each = "all"', 'each = "all"\nfor = 1', "unknown keys for", "place 2"),
    "place of nothing": ('rows = ["root"]', "rows = []", "places no row group", "place 1"),
    "place rows a text": ('rows = ["root"]', 'rows = "root"', "array of texts", "place 1, rows"),
    "place of an unknown group": ('rows = ["root"]', 'rows = ["root", "ghost"]', "places 'ghost'", "[[place]]"),
    "place over unknown layers": ('each = "all"', 'each = "some"', "each = 'some' is no name of [layers]", "[[place]]"),
    "place with a bad prefix": ('"decoder.layers.{i}."', '"decoder.layers.{i+}."', "is no expression", "place 2"),
    "place without its layer's number": (
        '"decoder.layers.{i}."',
        '"decoder."',
        "needs {i}, the layer's number",
        "place 2",
    ),
    "number without each": ('each = "all"\n', "", "no 'each' gives it a number", "place 2"),
    "each no text": ('each = "all"', "each = 3", "'each' is 3, no text", "place 2"),
    "unplaced group": ('rows = ["head"]', 'rows = ["layer"]', "the row group is placed nowhere", "group head"),
    "variants of unknown groups": (
        "[mtp]",
        '[variants]\nv = ["layer", "ghost"]\n[mtp]',
        "placed nowhere",
        "[variants] v",
    ),
    "unknown row key": ('mcore = "fc1"', 'mcore = "fc1", axis = 0', "unknown keys axis", "layer, row 2"),
    "unknown op": (
        'op = "rename", hf = "norm"',
        'op = "transpose", hf = "norm"',
        "unknown op 'transpose'",
        "layer, row 1",
    ),
    "no op": ('op = "rename", hf = "norm"', 'hf = "norm"', "'op' is missing", "layer, row 1"),
    "too few sources": ('["gate", "up"]', '["gate"]', "relates 2 HF to 1 Megatron names, not 1 to 1", "layer, row 2"),
    "too many sources": ('hf = "norm"', 'hf = ["norm", "norm2"]', "not 2 to 1", "layer, row 1"),
    "no target": (', mcore = "fc1"', "", "not 2 to 0", "layer, row 2"),
    "names no text": ('["gate", "up"]', "[1, 2]", "array of texts", "layer, row 2, hf"),
    "alias without source": ('source = "embed", ', "", "'source' belongs to tie and copy_of rows", "head, row 2"),
    "source without alias": ('hf = "eh"', 'hf = "eh", source = "x"', "'source' belongs to", "head, row 1"),
    "alias with a target": ('source = "embed"', 'source = "embed", mcore = "y"', "not 1 to 1", "head, row 2"),
    "aside without reason": (', reason = "recomputed"', "", "'reason' belongs to aside rows", "head, row 3"),
    "aside with an empty reason": ('"recomputed"', '""', "needs a reason", "head, row 3"),
    "reason without aside": ('hf = "eh"', 'hf = "eh", reason = "x"', "'reason' belongs to aside", "head, row 1"),
    "of without experts": (
        'hf = "norm"',
        'of = "gate_up_concat", hf = "norm"',
        "'of' belongs to expert_stack",
        "layer, row 1",
    ),
    "experts without expert_stack": (
        'hf = "norm"',
        'experts = "3", hf = "norm"',
        "'experts' belongs to",
        "layer, row 1",
    ),
    "expert_stack without of": (
        'of = "rename", ',
        "",
        "'of' belongs to expert_stack rows, and they need it",
        "layer, row 3",
    ),
    "expert_stack of pad_vocab": ('of = "rename"', 'of = "pad_vocab"', "needs of = one of", "layer, row 3"),
    "expert_stack without experts": ('experts = "3", ', "", "'experts' belongs to", "layer, row 3"),
    "expert_stack with a bad count": ('experts = "3"', 'experts = "3*"', "is no expression", "layer, row 3"),
    "expert_stack without {e}": ('"x.{e}.down"', '"x.down"', "needs {e}, once", "layer, row 3"),
    "braces elsewhere": ('hf = "norm"', 'hf = "norm.{e}"', "may not have braces", "layer, row 1"),
    "braces in the target": ('mcore = "x.fc2"', 'mcore = "x.{e}.fc2"', "may not have braces", "layer, row 3"),
    "dims no array": (
        'dims = ["V", "H"] },\n]\nlayer',
        'dims = "VH" },\n]\nlayer',
        "array of texts",
        "root, row 1, dims",
    ),
    "dims of numbers": ('dims = ["H"] },\n', "dims = [4] },\n", "array of texts", "layer, row 1, dims"),
    "dims with a bad expression": ('["2*H", "H"]', '["2**H", "H"]', "is no expression", "layer, row 2"),
    "too few dims": ('dims = ["2*H", "H"]', "dims = []", "needs at least 1 dims, not 0", "layer, row 2"),
    "halves_swap of three dims": (
        'op = "rename", hf = "eh", mcore = "eh", dims = ["H", "2*H"]',
        'op = "halves_swap", hf = "eh", mcore = "eh", dims = ["H", "2", "H"]',
        "needs 2 dims, not 3",
        "head, row 1",
    ),
    "unknown dtype": ('hf = "eh"', 'hf = "eh", dtype = "F32"', "unknown dtype 'F32'; known: float32", "head, row 1"),
    "when no text": ('hf = "eh"', 'hf = "eh", when = true', "'when' is True, no text", "head, row 1"),
    "group no array": ("[rows]", '[rows]\nodd = "x"', "array of tables", "group odd"),
    "group of texts": ("[rows]", '[rows]\nodd = ["x"]', "a table is needed", "group odd, entry 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_file_and_place(tmp_path: Path, name: str) -> None:
    old, new, what, where = REFUSED[name]
    assert BASE.count(old) >= 1
    file = written(tmp_path, BASE.replace(old, new, 1))
    with pytest.raises(MappingError) as refusal:
        load_mapping(file)
    assert what in refusal.value.what
    assert refusal.value.where is not None
    assert str(file) in refusal.value.where
    assert where in refusal.value.where
    assert refusal.value.exit_code == 3
