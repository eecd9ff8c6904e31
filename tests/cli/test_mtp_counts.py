"""MTP that no config key counts (MiMo-V2-Flash), and MTP that is declared and was never published (MiniMax-M2).

What can be seen of a lost depth: a layer between, tensors in part, a layer that the reference has. What cannot: that
the last one was lost before the checkpoint came here. A count without tensors is a loss to every family but one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.bridge_tables import BRIDGE_CASES, write_bridge_case
from tests.support.command_line import Run
from tests.support.mcore_edit import resaved, without
from tests.support.sabotage import edit_json
from tests.support.sparse import write_headers
from tests.support.tiny import write_tiny

BRIDGE = ("--dialect", "bridge")
MIMO, MINIMAX = BRIDGE_CASES["MiMo-V2-Flash"], BRIDGE_CASES["MiniMax-M2"]


def headers(case: Any, folder: Path, shapes: dict[str, tuple[int, ...]], **changes: Any) -> Path:
    dtypes = {name: "F32" for name in shapes if name.endswith("e_score_correction_bias")}
    return write_headers(folder, case.config() | changes, shapes, dtypes)


@pytest.fixture(scope="module")
def mimo() -> dict[str, tuple[int, ...]]:
    return MIMO.shapes()


@pytest.fixture(scope="module")
def minimax() -> dict[str, tuple[int, ...]]:
    return MINIMAX.shapes()


# ---- no count key


def test_names_decide_where_no_key_counts(mimo: dict[str, tuple[int, ...]], run: Run, tmp_path: Path) -> None:
    source = headers(MIMO, tmp_path / "hf", mimo)
    plan = run("plan", source, *BRIDGE)
    assert plan.code == 0, plan.err
    assert plan.last_line.startswith("MTP layers: declared nothing, present 3, written 3; 33 tensors, ")
    assert "no config key counts the MTP layers" in plan.err
    assert "the tensors decide: 3 MTP layers" in plan.err
    assert run("inspect", source).last_line.startswith("MTP layers: declared nothing, present 3; 42 tensors, ")
    args = run("args", source, *BRIDGE)
    assert "tensors may say otherwise" in args.err


LOST = {
    "a layer between": ("model.mtp.layers.1.", "MTP layers [0, 2] are present, which do not count from 0"),
    "one tensor of the last layer": ("model.mtp.layers.2.eh_proj", "MTP layer 2 is incomplete"),
    "the sinks of one layer": ("model.mtp.layers.0.self_attn.attention_sink_bias", "MTP layer 0 is incomplete"),
}


@pytest.mark.parametrize("loss", LOST)
def test_a_loss_that_the_names_show(loss: str, mimo: dict[str, tuple[int, ...]], run: Run, tmp_path: Path) -> None:
    lost, message = LOST[loss]
    source = headers(MIMO, tmp_path / "hf", {n: s for n, s in mimo.items() if not n.startswith(lost)})
    result = run("plan", source, *BRIDGE)
    assert (result.code, result.out) == (9, "")
    assert message in result.err


def test_a_count_that_somebody_wrote_is_held_to(mimo: dict[str, tuple[int, ...]], run: Run, tmp_path: Path) -> None:
    """The way to make a lost last layer fail: any count key in config.json."""
    two = {name: shape for name, shape in mimo.items() if not name.startswith("model.mtp.layers.2.")}
    counted = headers(MIMO, tmp_path / "counted", two, num_nextn_predict_layers=3)
    result = run("plan", counted, *BRIDGE)
    assert (result.code, result.out) == (9, "")
    assert "config declares 3 MTP layers (num_nextn_predict_layers), tensors of 2 are present" in result.err
    assert "model.mtp.layers.2.self_attn.attention_sink_bias" in result.err
    uncounted = run("plan", headers(MIMO, tmp_path / "uncounted", two), *BRIDGE)
    assert uncounted.code == 0
    assert "declared nothing, present 2, written 2" in uncounted.last_line


@pytest.mark.parametrize("args", [True, False])
def test_the_way_back_misses_a_depth_that_the_reference_has(args: bool, run: Run, tmp_path: Path) -> None:
    source = write_bridge_case("MiMo-V2-Flash", tmp_path / "hf")
    assert run("hf2mcore", source, tmp_path / "mc", *BRIDGE).code == 0
    gone = without(lambda name: name.startswith("mtp.layers.2."))
    trained = resaved(tmp_path / "mc" / "release", tmp_path / "trained", gone, args=args)
    for reference in (source, tmp_path / "mc"):
        result = run("mcore2hf", trained, tmp_path / "back", "--reference", reference)
        assert (result.code, result.out) == (9, ""), result.err
        assert "the reference lists 14 tensors that nothing in the Megatron checkpoint provides" in result.err
        assert "model.mtp.layers.2." in result.err
    assert not (tmp_path / "back").exists()
    audit = run("audit", source, trained)
    assert audit.code == 1
    assert "mtp-layer-missing" in audit.out


# ---- declared, and never published


def test_the_one_family_that_publishes_none(run: Run, tmp_path: Path) -> None:
    source, said = write_bridge_case("MiniMax-M2", tmp_path / "hf"), "MTP layers: declared 3, published none"
    assert run("inspect", source).last_line.startswith(said)
    for command in (["plan", source, *BRIDGE], ["hf2mcore", source, tmp_path / "mc", *BRIDGE]):
        result = run(*command)
        assert result.code == 0, result.err
        assert result.last_line == f"{said} (num_mtp_modules), written 0; 0 tensors, 0 bytes"
        assert "config declares 3 MTP layers, none is published: " in result.err
    back = run("mcore2hf", tmp_path / "mc", tmp_path / "back")
    assert back.code == 0, back.err
    assert back.last_line.startswith(said)
    assert f"# {said}, to be launched with: 0" in run("args", source, *BRIDGE).out
    for one, two in ((source, tmp_path / "mc"), (tmp_path / "mc", tmp_path / "back"), (source, source)):
        audit = run("audit", one, two)
        assert audit.code == 0, audit.out
        assert "declared 3, published none" in audit.out
    kept = json.loads((tmp_path / "back" / "config.json").read_text())
    assert kept["num_mtp_modules"] == 3


# names of MTP as MiniMax-M3, Qwen and DeepSeek publish it; MiniMax-M2's own were never seen
THERE = {
    "one tensor": ["model.mtp.layers.0.eh_proj.weight"],
    "two layers": [f"model.mtp.layers.{k}.{n}.weight" for k in (0, 1) for n in ("enorm", "hnorm", "final_layernorm")],
    "all three": [f"model.mtp.layers.{k}.enorm.weight" for k in range(3)],
    "under mtp": ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"],
    "as layers past the trunk": ["model.layers.3.enorm.weight", "model.layers.5.input_layernorm.weight"],
}


@pytest.mark.parametrize("there", THERE)
def test_mtp_tensors_of_that_family_are_not_passed_over(
    there: str, minimax: dict[str, tuple[int, ...]], run: Run, tmp_path: Path
) -> None:
    source = headers(MINIMAX, tmp_path / "hf", minimax | dict.fromkeys(THERE[there], (36,)))
    for command in (["plan", source, *BRIDGE], ["hf2mcore", source, tmp_path / "mc", *BRIDGE]):
        result = run(*command)
        assert (result.code, result.out) == (9, ""), result.err
        assert "config declares 3 MTP layers (key num_mtp_modules)" in result.err
        assert f"{len(THERE[there])} MTP tensors are present: {THERE[there][0]}" in result.err
    assert "published none" not in run("inspect", source).last_line
    assert run("plan", source, *BRIDGE, "--mtp", "drop").code == 0
    assert not (tmp_path / "mc").exists()


def test_mtp_in_megatron_that_the_mapping_has_no_place_for(run: Run, tmp_path: Path) -> None:
    """Someone trained MTP onto a MiniMax-M2."""
    source = write_bridge_case("MiniMax-M2", tmp_path / "hf")
    assert run("hf2mcore", source, tmp_path / "mc", *BRIDGE).code == 0
    norm, name = "decoder.final_layernorm.weight", "mtp.layers.0.enorm.weight"
    grown = resaved(
        tmp_path / "mc" / "release", tmp_path / "grown", lambda tensors: tensors.update({name: tensors[norm].clone()})
    )
    result = run("mcore2hf", grown, tmp_path / "back", "--reference", source)
    assert (result.code, result.out) == (9, "")
    assert f"1 MTP tensors are present: {name}" in result.err


@pytest.mark.parametrize(
    ("family", "key"),
    [("deepseek_v3", "num_nextn_predict_layers"), ("qwen3", "num_mtp_modules"), ("llama", "num_mtp_modules")],
)
def test_it_is_no_rule_for_any_other_family(family: str, key: str, run: Run, tmp_path: Path) -> None:
    """The same state, three declared and none there: refused, and an error of the audit."""
    source = write_tiny(family, tmp_path / "hf", **({"mtp_layers": 0} if family == "deepseek_v3" else {}))
    edit_json(source / "config.json", lambda table: table.update({key: 3, "use_mtp": True}))
    for command in (["plan", source], ["hf2mcore", source, tmp_path / "mc"]):
        result = run(*command)
        assert (result.code, result.out) == (9, "")
        assert "declares 3 MTP layers" in result.err
    assert "published none" not in run("inspect", source).last_line
    audit = run("audit", source, source)
    assert audit.code == 1
    assert "mtp-none-found" in audit.out
