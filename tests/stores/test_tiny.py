"""The tiny checkpoints against transformers itself: names, shapes, dtypes, config; and what their bytes promise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny import CONFIGS, INDEX, SIDE_FILES, read_safetensors, sha256_tree, write_tiny

FAMILIES = sorted(CONFIGS)


def is_mtp(name: str) -> bool:
    return name.startswith(("model.layers.3.", "model.layers.4."))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize(
    ("family", "overrides"), [*((family, {}) for family in FAMILIES), ("llama", {"tie_word_embeddings": True})]
)
def test_save_pretrained_writes_the_same_names_shapes_and_config(
    family: str, overrides: dict[str, object], dtype: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = write_tiny(family, tmp_path / "tiny", dtype=dtype, config_overrides=overrides)
    config = transformers.AutoConfig.from_pretrained(tiny)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(tmp_path / "theirs")

    ours = {k: v[:2] for k, v in read_safetensors(tiny).items() if not is_mtp(k)}
    theirs = {k: v[:2] for k, v in read_safetensors(tmp_path / "theirs").items()}
    if family == "deepseek_v3":
        # transformers keeps the router in F32 or casts the bias; published checkpoints have BF16 gates and F32 biases
        router = [name for name in theirs if ".mlp.gate." in name]
        assert len(router) == 4
        assert all(ours[name][0] == ("F32" if name.endswith("bias") else dtype) for name in router)
        theirs |= {name: (ours[name][0], theirs[name][1]) for name in router}
    assert ours == theirs
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert json.loads((tiny / "config.json").read_text()) == written


def test_transformers_loads_every_trunk_value(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = write_tiny("deepseek_v3", tmp_path / "tiny", dtype="F32", fill="normal")
    torch = pytest.importorskip("torch")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not info["missing_keys"]
    tensors = read_safetensors(tiny)
    loaded = model.state_dict()
    for name in ("model.layers.2.self_attn.q_b_proj.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"):
        assert loaded[name].numpy().tobytes() == tensors[name][2], name
    logits = model(input_ids=torch.arange(12)[None]).logits
    assert 0.1 < logits.std().item() < 10


def test_mtp_layer_has_the_published_names_and_bit_equal_copies(tmp_path: Path) -> None:
    tensors = read_safetensors(write_tiny("deepseek_v3", tmp_path / "tiny", mtp_layers=2))
    per_layer = 7 + 2 + 2 + 5 * 3 + 6  # MLA, layer norms, router, gate/up/down of 4 experts and a shared one, MTP's own
    assert sum(is_mtp(name) for name in tensors) == 2 * per_layer
    for layer in (3, 4):
        prefix = f"model.layers.{layer}."
        assert tensors[prefix + "eh_proj.weight"][1] == (36, 72)
        assert tensors[prefix + "embed_tokens.weight"] == tensors["model.embed_tokens.weight"]
        assert tensors[prefix + "shared_head.head.weight"] == tensors["lm_head.weight"]
    bare = read_safetensors(write_tiny("deepseek_v3", tmp_path / "bare", mtp_layers=2, copies=False))
    assert len(tensors) - len(bare) == 4


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_unique_and_finite(family: str, dtype: str, tmp_path: Path) -> None:
    tensors = read_safetensors(write_tiny(family, tmp_path / "tiny", dtype=dtype, copies=False))
    kinds = {"F32": np.dtype("<u4"), "BF16": np.dtype("<u2")}
    mask = {"F32": 0x7F800000, "BF16": 0x7F80}
    for kind, code in kinds.items():
        parts = [np.frombuffer(data, code) for found, _, data in tensors.values() if found == kind]
        if parts:
            bits = np.concatenate(parts)
            assert len(np.unique(bits)) == len(bits)
            assert not ((bits & mask[kind]) == mask[kind]).any()
            assert bits.all()


def test_one_shard_mixes_mtp_with_head_and_trunk_layer(tmp_path: Path) -> None:
    tiny = write_tiny("deepseek_v3", tmp_path / "tiny")
    names = {path.name: set(read_safetensors(path)) for path in tiny.glob("*.safetensors")}
    assert sorted(names) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    last = names["model-00003-of-00003.safetensors"]
    assert {"lm_head.weight", "model.layers.2.input_layernorm.weight", "model.layers.3.eh_proj.weight"} <= last
    index = json.loads((tiny / INDEX).read_text())
    assert {name: file for file, held in names.items() for name in held} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in read_safetensors(tiny).values())
    assert set(SIDE_FILES) | {"config.json", INDEX, *names} == set(sha256_tree(tiny))


def test_the_reference_library_reads_the_same_tensors(tmp_path: Path) -> None:
    from safetensors import deserialize

    for shards in (1, 3):
        tiny = write_tiny("qwen3", tmp_path / str(shards), shards=shards)
        assert (tiny / INDEX).exists() == (shards > 1)
        theirs = {}
        for path in tiny.glob("*.safetensors"):
            for name, entry in deserialize(path.read_bytes()):
                theirs[name] = (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        assert theirs == read_safetensors(tiny)
        assert len(theirs) == 3 + 3 * 11


def test_overrides_change_shapes_and_can_remove_a_key(tmp_path: Path) -> None:
    tiny = write_tiny("deepseek_v3", tmp_path / "a", config_overrides={"q_lora_rank": None, "rope_interleave": ...})
    assert read_safetensors(tiny)["model.layers.0.self_attn.q_proj.weight"][1] == (64, 36)
    assert "rope_interleave" not in json.loads((tiny / "config.json").read_text())
    lying = write_tiny("deepseek_v3", tmp_path / "b", mtp_layers=0, config_overrides={"num_nextn_predict_layers": 1})
    assert json.loads((lying / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert not any(is_mtp(name) for name in read_safetensors(lying))
