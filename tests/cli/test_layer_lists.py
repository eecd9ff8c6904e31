"""Per-layer lists of config.json by every family that has one: entries for MTP layers, too few entries, unknown kinds.

Some publishers write the MTP layers' entries behind the trunk's (transformers configuration_step3p7.py:__post_init__).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.bridge_tables import BRIDGE_CASES
from tests.support.command_line import Run
from tests.support.family_tables import CASES, Case, Shapes, write_case
from tests.support.sabotage import edit_json
from tests.support.sparse import write_headers
from tests.support.tiny import read_safetensors

LISTS = {
    ("GLM-4.7-Flash, layers by type", "mlp_layer_types"): "moe",
    ("HY-V3", "mlp_layer_types"): "moe",
    ("DeepSeek-V3.2", "mlp_layer_types"): "moe",
    ("GLM-5.2", "mlp_layer_types"): "moe",
    ("GLM-5.2", "indexer_types"): "attention",
    ("K-EXAONE", "layer_types"): "attention",
    ("K-EXAONE", "mlp_layer_types"): "moe",
    ("Qwen3-Next", "layer_types"): "attention",
    ("Qwen3.5", "layer_types"): "attention",
    ("Qwen3.5 with vision", "layer_types"): "attention",
    ("gpt-oss", "layer_types"): "attention",
    ("Mellum 2", "layer_types"): "attention",
    ("MiMo-V2-Flash", "layer_types"): "attention",
}


def case_of(name: str) -> Case:
    return CASES[name] if name in CASES else BRIDGE_CASES[name]


@cache
def shapes_of(name: str) -> Shapes:
    return case_of(name).shapes()


def changed(config: dict[str, Any], key: str, change: Any) -> dict[str, Any]:
    """``config`` with the list ``key``, of the language model, as ``change`` makes it."""
    if key in config:
        return config | {key: change(config[key])}
    return config | {"text_config": config["text_config"] | {key: change(config["text_config"][key])}}


def commands(name: str, hf: Path, out: Path) -> list[tuple[object, ...]]:
    case = case_of(name)
    dialect = ("--dialect", case.dialect) if case.dialect != "stock" else ()
    version = "0.19" if "0.16" in case.unsupported else "0.16"
    version_of_plan: list[tuple[object, ...]] = [] if version == "0.19" else [("plan", hf, *dialect)]
    newest = ("--mcore-version", version, *dialect)
    return [("args", hf, *newest), ("hf2mcore", hf, out, *newest), *version_of_plan]


@pytest.mark.parametrize(("name", "key"), LISTS)
def test_too_short_or_of_an_unknown_kind(name: str, key: str, run: Run, tmp_path: Path) -> None:
    config = case_of(name).config()
    dtypes = {tensor: "F32" for tensor in shapes_of(name) if "bias" in tensor or "A_log" in tensor or "dt_" in tensor}
    layers = (config if "num_hidden_layers" in config else config["text_config"])["num_hidden_layers"]
    harms = {
        f"{key}[{layers - 1}] is missing": lambda values: values[: layers - 1],
        f"{key}[{layers - 1}] is 'odd'": lambda values: [*values[: layers - 1], "odd"],
    }
    for at, (what, harm) in enumerate(harms.items()):
        hf = write_headers(tmp_path / str(at), changed(config, key, harm), shapes_of(name), dtypes)
        for command in commands(name, hf, tmp_path / "out"):
            result = run(*command)
            assert (result.code, result.out) == (5, ""), (command, result.err)
            assert what in result.err
            assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "key"), LISTS)
def test_entries_of_mtp_layers_change_no_argument(name: str, key: str, run: Run, tmp_path: Path) -> None:
    config = case_of(name).config()
    outputs = []
    for at, change in enumerate((lambda values: values, lambda values: [*values, values[0]])):
        (tmp_path / str(at)).mkdir()
        (tmp_path / str(at) / "config.json").write_text(json.dumps(changed(config, key, change)))
        result = run(*commands(name, tmp_path / str(at), tmp_path)[0])
        assert result.code == 0, result.err
        outputs.append(result.out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["HY-V3", "K-EXAONE"])
def test_entries_of_mtp_layers_there_and_back(name: str, run: Run, tmp_path: Path) -> None:
    """With the audit of every byte: neither side takes the entry for a layer of the trunk."""
    hf = write_case(name, tmp_path / "hf")
    for key in ("mlp_layer_types", "layer_types"):
        edit_json(hf / "config.json", lambda c, key=key: c.update({key: [*c[key], c[key][0]]} if key in c else {}))
    there = run("hf2mcore", hf, tmp_path / "mc", "--audit", "bits")
    assert there.code == 0, there.err
    back = run("mcore2hf", tmp_path / "mc", tmp_path / "back", "--audit", "bits")
    assert back.code == 0, back.err
    assert read_safetensors(tmp_path / "back") == read_safetensors(hf)


@pytest.mark.parametrize("name", ["K-EXAONE", "Qwen3.5 with vision"])
def test_entries_of_mtp_layers_go_with_them(name: str, run: Run, tmp_path: Path) -> None:
    """transformers configuration_utils.py:validate_layer_type wants as many entries as layers; on either way."""
    hf = write_case(name, tmp_path / "hf")
    before = json.loads((hf / "config.json").read_text())
    longer = changed(before, "layer_types", lambda values: [*values, values[-1]])
    (hf / "config.json").write_text(json.dumps(longer))
    drop = ("--mtp", "drop", "--audit", "headers")
    there = run("hf2mcore", hf, tmp_path / "dropped", *drop)
    assert there.code == 0, there.err
    assert "layer_types = [" in there.out
    assert run("hf2mcore", hf, tmp_path / "kept").code == 0
    back = run("mcore2hf", tmp_path / "kept", tmp_path / "back", *drop)
    assert back.code == 0, back.err
    for folder in (tmp_path / "dropped" / "hf_assets", tmp_path / "back"):
        after = json.loads((folder / "config.json").read_text())
        assert (after.get("text_config") or after)["layer_types"] == (before.get("text_config") or before)[
            "layer_types"
        ]
