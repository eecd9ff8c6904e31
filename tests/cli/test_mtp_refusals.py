"""MTP as users meet it: counts that disagree, layers in part, tensors without a place, copies that differ, --mtp drop.

Exit code 9 and every name that is needed to find what was lost; nothing is ever written after a refusal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Result, Run
from tests.support.mcore_edit import resaved, without
from tests.support.sabotage import edit_json, edit_shard, home_of, reindex
from tests.support.tiny import read_safetensors, sha256_tree, write_tiny

LAYER_3 = "model.layers.3."


def refused(result: Result, code: int, *texts: str) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    for text in texts:
        assert text in result.err


def set_count(source: Path, value: Any) -> None:
    edit_json(source / "config.json", lambda table: table.update(num_nextn_predict_layers=value))


def remove(source: Path, match: Any) -> list[str]:
    """Remove tensors from their shards and from the index; their names."""
    gone = [name for name in read_safetensors(source) if match(name)]
    for name in gone:
        edit_shard(home_of(source, name), lambda tensors, name=name: tensors.pop(name))
    reindex(source)
    return gone


def add(source: Path, like: str, *names: str) -> None:
    tensor = read_safetensors(source)[like]
    home = home_of(source, "model.norm.weight")
    edit_shard(home, lambda tensors: tensors.update(dict.fromkeys(names, tensor)))
    reindex(source)


# ---- counts that disagree, from Hugging Face


@pytest.mark.parametrize("command", ["hf2mcore", "plan", "roundtrip"])
def test_config_declares_more_than_there_are(command: str, run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=1)
    set_count(source, 2)
    target = [memory / "out"] if command == "hf2mcore" else []
    refused(
        run(command, source, *target),
        9,
        "config declares 2 MTP layers (num_nextn_predict_layers), tensors of 1 are present",
        "every tensor of MTP layer 1 is missing",
        "model.layers.4.input_layernorm.weight, model.layers.4.self_attn.q_a_proj.weight",
        str(source),
        "set the count to 0 in config.json",
    )
    assert not (memory / "out").exists()


def test_config_declares_some_and_all_are_gone(run: Run, memory: Path) -> None:
    """What save_pretrained makes of a DeepSeek-V3: field reports 4, 5, 11."""
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=0)
    set_count(source, 3)
    refused(
        run("hf2mcore", source, memory / "out"),
        9,
        "config declares 3 MTP layers (num_nextn_predict_layers), tensors of 0 are present",
        "every tensor of MTP layers 0 to 2 is missing, those of layer 0 being model.layers.3.",
    )


@pytest.mark.parametrize("declared", [0, 1])
def test_config_declares_fewer_than_there_are(declared: int, run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=2)
    set_count(source, declared)
    refused(
        run("hf2mcore", source, memory / "out"),
        9,
        f"config declares {declared} MTP layers (num_nextn_predict_layers), tensors of 2 are present; surplus: ",
        f"model.layers.{3 + declared}.input_layernorm.weight",
        "correct the count in config.json, or leave the tensors out on purpose with --mtp drop",
    )


@pytest.mark.parametrize("count", ["1", 1.0, True, -1, [1]])
def test_a_count_that_is_no_number_is_a_config_error(count: Any, run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    set_count(source, count)
    refused(run("hf2mcore", source, memory / "out"), 5, f"'num_nextn_predict_layers' is {count!r}", "config.json")


@pytest.mark.parametrize("layers", [0, 2])
def test_a_null_count_is_decided_by_the_tensors_and_said(layers: int, run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=layers)
    set_count(source, None)
    result = run("hf2mcore", source, memory / "out")
    assert result.code == 0
    assert f"num_nextn_predict_layers is missing or null); the tensors decide: {layers} MTP layers" in result.err
    assert result.last_line.startswith(
        f"MTP layers: declared nothing (num_nextn_predict_layers), present {layers}, written {layers};"
    )


def test_a_gap_between_mtp_layers_is_refused(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=3)
    set_count(source, 2)
    remove(source, lambda name: name.startswith("model.layers.4."))
    refused(run("hf2mcore", source, memory / "out"), 9, "MTP layers [0, 2] are present, which do not count from 0")


# ---- MTP layers in part, unknown MTP tensors, from Hugging Face


def test_every_missing_tensor_of_an_mtp_layer_is_named(run: Run, memory: Path) -> None:
    """All experts and the joining projection of one layer: more than any abbreviation would show."""
    source = write_tiny("deepseek_v3", memory / "hf", config_overrides={"n_routed_experts": 24})
    gone = remove(source, lambda n: n.startswith(LAYER_3) and (".experts." in n or "eh_proj" in n))
    assert len(gone) == 24 * 3 + 1
    result = run("hf2mcore", source, memory / "out")
    refused(result, 9, "MTP layer 0 is incomplete: 73 tensors are missing", *gone)


@pytest.mark.parametrize("name", ["enorm.weight", "hnorm.weight", "shared_head.norm.weight", "mlp.gate.weight"])
def test_one_missing_tensor_of_an_mtp_layer(name: str, run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=2)
    remove(source, lambda found: found == f"model.layers.4.{name}")
    result = run("hf2mcore", source, memory / "out")
    refused(result, 9, f"MTP layer 1 is incomplete: 1 tensors are missing: model.layers.4.{name}\n")


def test_an_unknown_tensor_of_an_mtp_layer(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    names = [f"{LAYER_3}main_norm.weight", "model.mtp.extra.weight"]
    add(source, "model.norm.weight", *names)
    refused(run("hf2mcore", source, memory / "out"), 9, "2 MTP tensors have no place in the mapping: ", *names)


def test_a_renamed_tensor_shows_both_its_names(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    add(source, f"{LAYER_3}enorm.weight", f"{LAYER_3}embedding_norm.weight")
    remove(source, lambda name: name == f"{LAYER_3}enorm.weight")
    result = run("hf2mcore", source, memory / "out")
    refused(
        result, 9, "are missing: model.layers.3.enorm.weight;", "have no place in the mapping: model.layers.3.embed"
    )


# ---- MTP in a family that has no place for it


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize(
    "name",
    ["model.layers.3.eh_proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.mtp_layers.0.x"],
)
def test_mtp_tensors_of_a_family_without_mtp(family: str, name: str, run: Run, memory: Path) -> None:
    source = write_tiny(family, memory / "hf")
    add(source, "model.norm.weight", name)
    refused(
        run("hf2mcore", source, memory / "out"),
        9,
        "this mapping has no place for MTP",
        "1 MTP tensors are present",
        name,
    )


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"])
def test_a_declaration_in_a_family_without_mtp(key: str, run: Run, memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    edit_json(source / "config.json", lambda table: table.update({key: 1}))
    refused(run("hf2mcore", source, memory / "out"), 9, "no place for MTP", f"config declares 1 MTP layers (key {key})")
    edit_json(source / "config.json", lambda table: table.update({key: 0}))
    assert run("hf2mcore", source, memory / "out").last_line == (
        f"MTP layers: declared 0 ({key}), present 0, written 0; 0 tensors, 0 bytes"
    )


def test_mtp_tensors_of_a_family_without_mtp_can_be_dropped_by_request(run: Run, memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    before = read_safetensors(source)
    add(source, "model.norm.weight", "mtp.fc.weight", "model.layers.3.enorm.weight")
    result = run("hf2mcore", source, memory / "out", "--mtp", "drop")
    assert result.code == 0
    assert "MTP DROPPED BY REQUEST: 2 tensors, 144 bytes\n" in result.err  # 2 x 36 BF16; no key to set
    assert run("mcore2hf", memory / "out", memory / "back").code == 0
    assert read_safetensors(memory / "back") == before


@pytest.mark.parametrize("args", [True, False])
def test_mtp_in_a_megatron_checkpoint_of_a_family_without_mtp(args: bool, run: Run, memory: Path) -> None:
    """A Qwen3 that was trained with an MTP layer: field report 13."""
    run("hf2mcore", write_tiny("qwen3", memory / "hf"), memory / "mcore")

    def change(tensors: dict[str, Any]) -> None:
        norm = tensors["decoder.final_layernorm.weight"]
        tensors["mtp.layers.0.enorm.weight"] = norm.clone()
        tensors["mtp.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_weight"] = norm.clone()

    trained = resaved(memory / "mcore" / "release", memory / "trained", change, args=args)
    refused(
        run("mcore2hf", trained, memory / "out", "--reference", memory / "hf"),
        9,
        "this mapping has no place for MTP",
        "2 MTP tensors are present",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_weight",
    )
    result = run("mcore2hf", trained, memory / "out", "--reference", memory / "hf", "--mtp", "drop")
    if args:  # the checkpoint's own arguments say that there is no MTP layer: it contradicts itself
        refused(result, 5, "mtp_num_layers is None; the reference stands for 1")
    else:
        assert result.code == 0
        assert "MTP DROPPED BY REQUEST: 2 tensors, 144 bytes" in result.err
        assert sha256_tree(memory / "out") == sha256_tree(memory / "hf")


# ---- the other direction


@pytest.fixture
def deepseek(run: Run, memory: Path) -> Path:
    """A Megatron checkpoint of two MTP layers in ``mcore``, made from ``hf``."""
    assert run("hf2mcore", write_tiny("deepseek_v3", memory / "hf", mtp_layers=2), memory / "mcore").code == 0
    return memory / "mcore"


@pytest.mark.parametrize("declared", [3, 9])
def test_the_reference_declares_more_than_megatron_has(declared: int, deepseek: Path, run: Run, memory: Path) -> None:
    set_count(deepseek / "hf_assets", declared)
    refused(
        run("mcore2hf", deepseek, memory / "out"),
        9,
        f"config declares {declared} MTP layers (num_nextn_predict_layers), tensors of 2 are present",
        "those of layer 2 being mtp.layers.2.transformer_layer.input_layernorm.weight, ",
    )


@pytest.mark.parametrize("args", [True, False])
def test_training_lost_all_mtp_layers(args: bool, deepseek: Path, run: Run, memory: Path) -> None:
    lost = without(lambda key: key.startswith("mtp."))
    trained = resaved(deepseek / "release", memory / "trained", lost, args=args)
    refused(
        run("mcore2hf", trained, memory / "out", "--reference", deepseek),
        9,
        "config declares 2 MTP layers (num_nextn_predict_layers), tensors of 0 are present",
        "every tensor of MTP layers 0 to 1 is missing",
        "mtp.layers.0.transformer_layer.",
    )


def test_the_reference_declares_fewer_than_megatron_has(deepseek: Path, run: Run, memory: Path) -> None:
    set_count(deepseek / "hf_assets", 1)
    result = run("mcore2hf", deepseek, memory / "out")
    refused(result, 9, "tensors of 2 are present; surplus: mtp.layers.1.", "mtp.layers.1.enorm.weight")


def test_an_mtp_layer_in_part_in_megatron(deepseek: Path, run: Run, memory: Path) -> None:
    gone = ["mtp.layers.1.eh_proj.weight", "mtp.layers.1.transformer_layer.mlp.router.expert_bias"]
    trained = resaved(deepseek / "release", memory / "trained", without(lambda key: key in gone))
    result = run("mcore2hf", trained, memory / "out", "--reference", deepseek)
    refused(result, 9, "MTP layer 1 is incomplete: 2 tensors are missing", *gone)


@pytest.mark.parametrize("name", ["mtp.layers.1.new_norm.weight", "mtp.something.weight"])
def test_an_unknown_mtp_tensor_in_megatron(name: str, deepseek: Path, run: Run, memory: Path) -> None:
    trained = resaved(
        deepseek / "release",
        memory / "trained",
        lambda tensors: tensors.update({name: tensors["decoder.final_layernorm.weight"].clone()}),
    )
    result = run("mcore2hf", trained, memory / "out", "--reference", deepseek)
    refused(result, 9, f"1 MTP tensors have no place in the mapping: {name}")


def test_a_reference_that_lists_mtp_which_nothing_provides(deepseek: Path, run: Run, memory: Path) -> None:
    """No count to disagree with, but the reference's index says what would be lost."""
    trained = resaved(deepseek / "release", memory / "trained", without(lambda key: key.startswith("mtp.")), args=False)
    set_count(memory / "hf", None)
    refused(
        run("mcore2hf", trained, memory / "out", "--reference", memory / "hf"),
        9,
        "the reference lists",
        "that nothing in the Megatron checkpoint provides",
        "model.layers.3.",
    )


# ---- copies


def differ(source: Path, name: str, elements: int) -> None:
    """Change one bit in each of the first ``elements`` BF16 elements."""

    def change(tensors: Any) -> None:
        dtype, shape, data = tensors[name]
        flipped = bytes(byte ^ (index % 2 == 0) for index, byte in enumerate(data[: 2 * elements]))
        tensors[name] = (dtype, shape, flipped + data[2 * elements :])

    edit_shard(home_of(source, name), change)


@pytest.mark.parametrize("elements", [1, 98 * 36])
@pytest.mark.parametrize(
    ("copy", "trunk"),
    [("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight")],
)
def test_a_copy_that_differs(copy: str, trunk: str, elements: int, run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    name = LAYER_3 + copy
    differ(source, name, elements)
    counted = f"{elements:,} of 3,528 elements"
    refused(
        run("hf2mcore", source, memory / "out"),
        10,
        f"{name} should be a copy of {trunk} and differs: {counted}",
        "Megatron has nowhere to keep a second one",
        "--mtp-copies use-trunk",
    )
    assert run("roundtrip", source).code == 10
    result = run("hf2mcore", source, memory / "out", "--mtp-copies", "use-trunk")
    assert result.code == 0
    assert f"{name} differs from {trunk} ({counted}): the trunk's is used" in result.err
    assert run("mcore2hf", memory / "out", memory / "back").code == 0
    wanted = read_safetensors(source)
    assert read_safetensors(memory / "back") == wanted | {name: wanted[trunk]}


def test_a_copy_of_another_dtype_or_shape(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    name = f"{LAYER_3}embed_tokens.weight"
    home = home_of(source, name)
    original = read_safetensors(home)[name]
    edit_shard(home, lambda tensors: tensors.update({name: ("F32", original[1], original[2] * 2)}))
    reindex(source)
    result = run("hf2mcore", source, memory / "out")
    refused(result, 10, f"{name} should be a copy", "it is F32, its source BF16")
    edit_shard(home, lambda tensors: tensors.update({name: ("BF16", (36, 98), original[2])}))
    reindex(source)
    refused(run("hf2mcore", source, memory / "out"), 6, f"{name} is [36, 98]", "[98, 36]")


def test_a_tied_head_that_differs_is_refused_whatever_the_options(run: Run, memory: Path) -> None:
    source = write_tiny("qwen2", memory / "hf")
    add(source, "model.embed_tokens.weight", "lm_head.weight")
    differ(source, "lm_head.weight", 7)
    for options in ([], ["--mtp-copies", "use-trunk"]):
        refused(
            run("hf2mcore", source, memory / "out", *options),
            10,
            "lm_head.weight should be a copy of model.embed_tokens.weight and differs: 7 of 3,528 elements",
            "set tie_word_embeddings to false",
        )


# ---- --mtp drop


def test_drop_to_megatron(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=2)
    lost = {
        name: tensor
        for name, tensor in read_safetensors(source).items()
        if name.startswith(("model.layers.3", "model.layers.4"))
    }
    size = sum(len(data) for _, _, data in lost.values())
    result = run("hf2mcore", source, memory / "mcore", "--mtp", "drop")
    assert result.code == 0
    assert f"MTP DROPPED BY REQUEST: {len(lost)} tensors, {size:,} bytes; " in result.err
    assert "; config.json now says num_nextn_predict_layers = 0\n" in result.err
    assert "config.json changed: num_nextn_predict_layers = 0" in result.out
    assert result.last_line == (
        "MTP layers: declared 2 (num_nextn_predict_layers), present 2, written 0; 0 tensors, 0 bytes"
    )
    assert run("mcore2hf", memory / "mcore", memory / "back").code == 0
    kept = {name: tensor for name, tensor in read_safetensors(source).items() if name not in lost}
    assert read_safetensors(memory / "back") == kept
    assert json.loads((memory / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    index = json.loads((memory / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(kept)


def test_drop_from_megatron(deepseek: Path, run: Run, memory: Path) -> None:
    result = run("mcore2hf", deepseek, memory / "back", "--mtp", "drop")
    assert result.code == 0
    assert "MTP DROPPED BY REQUEST: 38 tensors, " in result.err
    assert "bytes; config.json now says num_nextn_predict_layers = 0" in result.err
    assert "config.json changed: num_nextn_predict_layers = 0" in result.out
    assert "declared 2 (num_nextn_predict_layers), present 2, written 0; 0 tensors, 0 bytes" in result.last_line
    source = memory / "hf"
    kept = {n: t for n, t in read_safetensors(source).items() if not n.startswith(("model.layers.3", "model.layers.4"))}
    assert read_safetensors(memory / "back") == kept
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, memory / "back"))
    assert after == before | {"num_nextn_predict_layers": 0}


@pytest.mark.parametrize("value", [None, ...])
def test_drop_writes_an_explicit_zero_where_the_count_was_null_or_missing(value: Any, run: Run, memory: Path) -> None:
    """Readers of several families take a missing count for 1."""
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=1)
    edit_json(source / "config.json", lambda table: table.pop("num_nextn_predict_layers"))
    if value is None:
        set_count(source, None)
    assert run("hf2mcore", source, memory / "mcore", "--mtp", "drop").code == 0
    config = json.loads((memory / "mcore" / "hf_assets" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0


def test_drop_gets_a_checkpoint_through_whose_mtp_is_broken(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    add(source, "model.norm.weight", "model.mtp.odd.weight")
    remove(source, lambda name: name == f"{LAYER_3}enorm.weight")
    assert run("hf2mcore", source, memory / "out").code == 9
    result = run("hf2mcore", source, memory / "out", "--mtp", "drop")
    assert (result.code, "model.mtp" in result.out) == (0, False)
