"""Every other refusal as users meet it: exit code, the name at fault, what to do; and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Result, Run
from tests.support.mcore_edit import resaved, without
from tests.support.sabotage import edit_json, edit_shard, home_of, reindex
from tests.support.tiny import INDEX, read_safetensors, write_tiny

Harm = Callable[[Path], object]


def tensor(name: str, change: Callable[[Any], Any]) -> Harm:
    """Change one tensor's (dtype, shape, bytes) in its shard; None removes it."""

    def harm(source: Path) -> None:
        def edit(tensors: dict[str, Any]) -> None:
            new = change(tensors.pop(name))
            if new is not None:
                tensors[name] = new

        edit_shard(home_of(source, name), edit)
        reindex(source)

    return harm


def added(name: str, like: str = "model.norm.weight") -> Harm:
    def harm(source: Path) -> None:
        new = read_safetensors(source)[like]
        edit_shard(home_of(source, like), lambda tensors: tensors.update({name: new}))
        reindex(source)

    return harm


def config(**changes: Any) -> Harm:
    return lambda source: edit_json(source / "config.json", lambda table: table.update(changes))


def both(*harms: Harm) -> Harm:
    return lambda source: [harm(source) for harm in harms]


def renamed_prefix(source: Path) -> None:
    for shard in source.glob("*.safetensors"):
        edit_shard(shard, lambda tensors: [tensors.update({f"model.{n}": tensors.pop(n)}) for n in list(tensors)])
    reindex(source)


# harm done to a tiny Qwen3 (36 wide, 3 layers); exit code; what the message says
FROM_HF: dict[str, tuple[Harm, int, list[str]]] = {
    "a tensor that nothing maps": (
        added("model.layers.1.self_attn.extra.weight"),
        8,
        ["1 tensors that nothing maps: model.layers.1.self_attn.extra.weight", "nothing is skipped"],
    ),
    "a missing tensor": (
        tensor("model.layers.1.mlp.up_proj.weight", lambda _: None),
        8,
        ["1 tensors missing that the mapping needs: model.layers.1.mlp.up_proj.weight (dense_mlp.toml: group"],
    ),
    "one missing and one unknown": (
        both(tensor("model.norm.weight", lambda _: None), added("model.nrom.weight", "lm_head.weight")),
        8,
        ["nothing maps: model.nrom.weight; ", "the mapping needs: model.norm.weight (root.toml"],
    ),
    "a prefix on every name": (
        renamed_prefix,
        8,
        ["none of 36 tensors has a name that the mapping knows", "model.model.", "a common prefix"],
    ),
    "a wrong shape": (
        tensor("model.layers.0.self_attn.o_proj.weight", lambda t: (t[0], (60, 36), t[2])),
        6,
        ["model.layers.0.self_attn.o_proj.weight is [60, 36]", "(gqa.toml: group attention, row 3) say [36, 60]"],
    ),
    "a fused tensor of two dtypes": (
        tensor("model.layers.2.mlp.up_proj.weight", lambda t: ("F32", t[1], t[2] + t[2])),
        6,
        ["decoder.layers.2.mlp.linear_fc1.weight would be made of BF16 and F32 parts", "model.layers.2.mlp.up_proj"],
    ),
    "a missing shard": (
        lambda source: (source / "model-00002-of-00003.safetensors").unlink(),
        7,
        ["1 of 3 files", "model-00002-of-00003.safetensors"],
    ),
    "a truncated shard": (
        lambda source: (source / "model-00002-of-00003.safetensors").write_bytes(
            (source / "model-00002-of-00003.safetensors").read_bytes()[:-1]
        ),
        7,
        ["model-00002-of-00003.safetensors"],
    ),
    "no index": (lambda source: (source / INDEX).unlink(), 7, [INDEX]),
    "no config": (lambda source: (source / "config.json").unlink(), 5, ["no config.json"]),
    "a config that is no JSON": (
        lambda source: (source / "config.json").write_text("{"),
        5,
        ["config.json cannot be read"],
    ),
    "an unknown architecture": (
        config(architectures=["Qwen3XForCausalLM"]),
        10,
        ["no mapping file for the architecture 'Qwen3XForCausalLM'; the closest known one is Qwen3"],
    ),
    "no architecture": (config(architectures=None), 5, ["'architectures' is None", "--mapping FILE"]),
    "two architectures": (config(architectures=["A", "B"]), 5, ["'architectures' is ['A', 'B']; exactly one name"]),
    "a missing size": (
        lambda source: edit_json(source / "config.json", lambda table: table.pop("intermediate_size")),
        5,
        ["'intermediate_size' is neither a symbol", "group dense_mlp"],
    ),
    "heads that no number of groups divides": (
        config(num_key_value_heads=4),
        5,
        ["'num_attention_heads/num_key_value_heads' divides 6 by 4, which is not exact", "gqa.toml: group attention"],
    ),
    "a size that is no number": (config(hidden_size="36"), 5, ["'hidden_size' is '36' where an integer is needed"]),
    "a size of zero": (config(intermediate_size=0), 5, ["a tensor has no such shape", "dense_mlp.toml"]),
    "fewer layers in the config": (config(num_hidden_layers=2), 9, ["no place for MTP", "model.layers.2."]),
    "more layers in the config": (
        config(num_hidden_layers=4, layer_types=["full_attention"] * 4),
        8,
        ["missing", "model.layers.3.input_layernorm.weight"],
    ),
    "more layers than a list has": (config(num_hidden_layers=4), 5, ["layer_types[3] is missing"]),
}


@pytest.mark.parametrize("name", FROM_HF)
def test_from_hugging_face(name: str, run: Run, memory: Path) -> None:
    harm, code, texts = FROM_HF[name]
    source = write_tiny("qwen3", memory / "hf")
    harm(source)
    for command in (["plan", source], ["hf2mcore", source, memory / "out"]):
        result = run(*command)
        assert (result.code, result.out) == (code, "")
        for text in texts:
            assert text in result.err
        assert str(source) in result.err or "config.json" in result.err or ".toml" in result.err
    assert [path.name for path in memory.iterdir()] == ["hf"]


def test_every_unknown_name_is_in_one_message(run: Run, memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    names = [f"model.layers.{layer}.self_attn.{part}.bias" for layer in range(3) for part in ("x", "y", "z")]
    for name in names:
        added(name)(source)
    result = run("hf2mcore", source, memory / "out")
    assert result.code == 8
    assert all(name in result.err for name in names)


def test_the_routers_bias_must_be_float32(run: Run, memory: Path) -> None:
    """Field reports, class J: rounded to bf16 it routes almost every token elsewhere."""
    source = write_tiny("deepseek_v3", memory / "hf")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensor(name, lambda t: ("BF16", t[1], t[2][: len(t[2]) // 2]))(source)
    result = run("hf2mcore", source, memory / "out")
    assert result.code == 6
    assert f"{name} is BF16, the mapping (moe_mlp.toml: group moe_mlp, row 3) says F32" in result.err


# ---- from Megatron


@pytest.fixture
def qwen(run: Run, memory: Path) -> Path:
    """A Megatron checkpoint in ``mcore`` made from ``hf``."""
    assert run("hf2mcore", write_tiny("qwen3", memory / "hf"), memory / "mcore").code == 0
    return memory / "mcore"


def says(result: Result, code: int, *texts: str) -> None:
    assert (result.code, result.out) == (code, ""), result.err
    for text in texts:
        assert text in result.err
    assert "Traceback" not in result.err


def extra(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: tensors["decoder.final_layernorm.weight"].clone()})


def test_megatron_tensors_that_nothing_maps_or_that_are_missing(qwen: Path, run: Run, memory: Path) -> None:
    trained = resaved(qwen / "release", memory / "a", extra("decoder.odd.weight"))
    says(run("mcore2hf", trained, memory / "out", "--reference", qwen), 8, "nothing maps: decoder.odd.weight")
    lost = without(lambda key: key == "decoder.final_layernorm.weight")
    trained = resaved(qwen / "release", memory / "b", lost)
    result = run("mcore2hf", trained, memory / "out", "--reference", qwen)
    says(result, 8, "the mapping needs: decoder.final_layernorm.weight (root.toml: group root, row 2)")
    assert not (memory / "out").exists()


def test_a_megatron_tensor_of_another_shape(qwen: Path, run: Run, memory: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        name = "decoder.layers.mlp.linear_fc2.weight"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    trained = resaved(qwen / "release", memory / "trained", change)
    result = run("mcore2hf", trained, memory / "out", "--reference", qwen)
    says(result, 6, "decoder.layers.0.mlp.linear_fc2.weight is [52, 36]", "say [36, 52]")


def test_training_saves_carry_no_assets(qwen: Path, run: Run, memory: Path) -> None:
    (qwen / "release").rename(memory / "trained")
    result = run("mcore2hf", memory / "trained", memory / "out")
    says(result, 6, "carries no hf_assets", "pass --reference")


def test_vocabulary_rows_fewer_than_the_configs(qwen: Path, run: Run, memory: Path) -> None:
    edit_json(qwen / "hf_assets" / "config.json", lambda table: table.update(vocab_size=129))
    result = run("mcore2hf", qwen, memory / "out")
    says(result, 5, "embedding.word_embeddings.weight has 128 rows, config.json has vocab_size 129", "from-megatron")


def test_the_vocabulary_can_be_megatrons(qwen: Path, run: Run, memory: Path) -> None:
    result = run("mcore2hf", qwen, memory / "back", "--vocab-size", "from-megatron")
    assert result.code == 0
    assert "config.json changed: vocab_size = 128" in result.out
    tensors, before = read_safetensors(memory / "back"), read_safetensors(memory / "hf")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        dtype, _, data = before[name]
        assert tensors.pop(name) == (dtype, (128, 36), data + bytes(30 * 36 * 2))
        del before[name]
    assert tensors == before
    assert json.loads((memory / "back" / "config.json").read_text())["vocab_size"] == 128


def test_a_reference_of_another_model(qwen: Path, run: Run, memory: Path) -> None:
    """More tensors than Megatron gives, and fewer."""
    more = write_tiny("qwen3", memory / "more")
    added("model.layers.0.extra.weight")(more)
    result = run("mcore2hf", qwen, memory / "out", "--reference", more)
    says(
        result, 8, "the reference lists 1 tensors that nothing in the Megatron checkpoint provides",
        "model.layers.0.extra.weight", "is the reference the model",
    )  # fmt: skip
    fewer = write_tiny("qwen3", memory / "fewer")
    tensor("model.layers.2.mlp.up_proj.weight", lambda _: None)(fewer)
    result = run("mcore2hf", qwen, memory / "out", "--reference", fewer)
    says(result, 10, "gives 1 tensors that the reference does not list: model.layers.2.mlp.up_proj.weight")
    other = write_tiny("llama", memory / "other")
    assert run("mcore2hf", qwen, memory / "out", "--reference", other).code in (5, 6, 8)
    assert not (memory / "out").exists()


def test_a_reference_that_is_none(qwen: Path, run: Run, memory: Path) -> None:
    says(run("mcore2hf", qwen, memory / "out", "--reference", memory / "gone"), 2, "the reference is no directory")
    (memory / "empty").mkdir()
    says(run("mcore2hf", qwen, memory / "out", "--reference", memory / "empty"), 5, "no config.json in the reference")


def test_asides_whose_bytes_are_gone(run: Run, memory: Path) -> None:
    source = write_tiny("llama", memory / "hf")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_shard(home_of(source, "model.norm.weight"), lambda tensors: tensors.update({name: ("F32", (3,), bytes(12))}))
    reindex(source)
    assert run("hf2mcore", source, memory / "mcore").code == 0
    for path in sorted((memory / "mcore" / "hf_assets" / "passthrough").iterdir()):
        path.unlink()
    (memory / "mcore" / "hf_assets" / "passthrough").rmdir()
    says(run("mcore2hf", memory / "mcore", memory / "out"), 6, name, "no longer holds the bytes", "--reference")


# ---- wrong usage


def test_the_wrong_direction(qwen: Path, run: Run, memory: Path) -> None:
    says(run("hf2mcore", qwen, memory / "out"), 2, "is no Hugging Face directory", "mcore2hf goes the other way")
    says(run("mcore2hf", memory / "hf", memory / "out"), 2, "is no Megatron checkpoint", "hf2mcore goes the other way")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--iteration", "five"], 2, "neither a number nor 'release'"),
        (["--iteration", "-1"], 2, "neither a number nor 'release'"),
        (["--iteration", "²"], 2, "neither a number nor 'release'"),
        (["--tp", "0"], 2, "0 is not in the range"),
        (["--make-vocab-size-divisible-by", "0"], 2, "not in the range"),
        (["--spec", "fast"], 2, "'fast' is not one of"),
        (["--mcore-version", "0.7"], 2, "'0.7' is not one of"),
        (["--dtype", "bfloat16"], 2, "'bfloat16' is not 'keep'"),
        (["--format", "torch"], 10, "--format torch_dist"),
        (["--mapping", "/gone.toml"], 3, "cannot be read"),
        (["--nothing"], 2, "No such option"),
    ],
)
def test_options_of_hf2mcore(arguments: list[str], code: int, text: str, run: Run, memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    result = run("hf2mcore", source, memory / "out", *arguments)
    assert (result.code, result.out) == (code, "")
    assert text in result.err
    assert [path.name for path in memory.iterdir()] == ["hf"]


@pytest.mark.parametrize("size", ["0", "5 apples", "GB", "-1GB"])
def test_a_shard_size_that_is_none(size: str, qwen: Path, run: Run, memory: Path) -> None:
    result = run("mcore2hf", qwen, memory / "out", f"--max-shard-size={size}")
    assert result.code == 2
    assert size in result.err


@pytest.mark.parametrize("command", ["hf2mcore", "mcore2hf", "plan", "roundtrip"])
def test_a_source_that_is_not_there(command: str, run: Run, memory: Path) -> None:
    target = [memory / "out"] if "2" in command else []
    says(run(command, "deepseek-ai/DeepSeek-V3", *target), 2, "does not exist", "download it first")


def test_a_mapping_of_ones_own_that_is_no_bijection_exits_4(run: Run, memory: Path) -> None:
    from mtpconvert.mapping.catalogue import file_of

    text = file_of("Qwen3ForCausalLM").read_text()
    (memory / "own.toml").write_text(text.replace('rows  = ["attention", ', 'rows  = ["attention", "attention", '))
    source = write_tiny("qwen3", memory / "hf")
    result = run("hf2mcore", source, memory / "out", "--mapping", memory / "own.toml")
    says(result, 4, "related twice", "own.toml", "gqa.toml: group attention, row 1")
    (memory / "own.toml").write_text(text)
    assert run("hf2mcore", source, memory / "out", "--mapping", memory / "own.toml").code == 0
