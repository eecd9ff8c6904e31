"""HF -> torch_dist -> HF gives every file back byte for byte: weights, headers, index, config.json, side files.

The last of three shards mixes trunk and MTP tensors. F32 checkpoints hold a 32-bit pattern of its own in every element,
BF16 ones 16-bit patterns.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconvert.convert import to_hf as to_hf_module
from mtpconvert.convert import to_mcore as to_mcore_module
from mtpconvert.convert.execute import execute
from tests.support.frameworks_convert import FAMILIES, to_hf, to_mcore
from tests.support.sabotage import edit_json, edit_shard, home_of, reindex
from tests.support.tiny import INDEX, read_safetensors, sha256_tree, write_safetensors, write_tiny

PATTERNS = {"F32": "<u4", "BF16": "<u2"}


def equal_after(source: Path, folder: Path, options: dict[str, Any] | None = None) -> None:
    """Assert that ``source`` comes back as it is; the Megatron side is left in ``folder / "mcore"``."""
    before = sha256_tree(source)
    to_mcore(source, folder / "mcore", **(options or {}))
    to_hf(folder / "mcore", folder / "back")
    assert sha256_tree(folder / "back") == before
    assert sha256_tree(source) == before


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_shards(family: str, dtype: str, memory: Path) -> None:
    source = write_tiny(family, memory / "hf", dtype=dtype)
    assert len(list(source.glob("*.safetensors"))) == 3
    values = np.concatenate(
        [
            np.frombuffer(data, PATTERNS[dtype])
            for name, (kind, _, data) in read_safetensors(source).items()
            if kind == dtype and not name.endswith(("3.embed_tokens.weight", "3.shared_head.head.weight"))
        ]
    )
    assert dtype == "BF16" or len(np.unique(values)) == len(values)
    equal_after(source, memory)


def test_the_last_shard_of_deepseek_mixes_mtp_with_trunk(memory: Path) -> None:
    names = set(read_safetensors(write_tiny("deepseek_v3", memory / "hf") / "model-00003-of-00003.safetensors"))
    assert {"lm_head.weight", "model.layers.2.mlp.gate.weight", "model.layers.3.eh_proj.weight"} <= names


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("mtp_layers", [0, 1, 2, 3])
def test_mtp_depths(mtp_layers: int, copies: bool, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=mtp_layers, copies=copies)
    equal_after(source, memory)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "llama"])
@pytest.mark.parametrize(
    "options",
    [
        {"spec": "local"},
        {"mcore_version": "0.19"},
        {"spec": "local", "mcore_version": "0.19"},
        {"iteration": "5"},
        {"tp": 2, "ep": 2, "pp": 2, "make_vocab_size_divisible_by": 7},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_options(family: str, options: dict[str, Any], memory: Path) -> None:
    source = write_tiny(family, memory / "hf", dtype="F32")
    equal_after(source, memory, options)
    folder = "iter_0000005" if "iteration" in options else "release"
    assert (memory / "mcore" / folder / ".metadata").is_file()
    assert (memory / "mcore" / "latest_checkpointed_iteration.txt").read_text() == options.get("iteration", "release")
    to_hf(memory / "mcore" / folder, memory / "from iteration")
    assert sha256_tree(memory / "from iteration") == sha256_tree(source)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_file(family: str, memory: Path) -> None:
    source = write_tiny(family, memory / "hf", shards=1)
    assert not (source / INDEX).exists()
    equal_after(source, memory)


def test_odd_headers_and_index_come_back_as_they_are(memory: Path) -> None:
    """Reversed key order, unknown metadata, another file name, an index with other spacing and keys of its own."""
    source = write_tiny("deepseek_v3", memory / "hf")
    for number, shard in enumerate(sorted(source.glob("*.safetensors"))):
        tensors = dict(reversed(read_safetensors(shard).items()))
        write_safetensors(shard, tensors, {"format": "pt", "é": f"odd {number}"} if number != 1 else None)
    reindex(source)
    table = json.loads((source / INDEX).read_text())
    table["metadata"]["comment"] = "ü"
    (source / INDEX).write_text(json.dumps(table, indent=7, ensure_ascii=False) + "\r\n\n")
    equal_after(source, memory)


def with_head(source: Path) -> Path:
    """Add the tied head that some published files carry: the embedding once more."""
    home = home_of(source, "model.norm.weight")
    embedding = read_safetensors(source)["model.embed_tokens.weight"]
    edit_shard(home, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    reindex(source)
    return source


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_restored_only_where_it_was(family: str, memory: Path) -> None:
    tied = {"tie_word_embeddings": True}
    equal_after(write_tiny(family, memory / "hf", config_overrides=tied), memory)
    (memory / "with").mkdir()
    equal_after(with_head(write_tiny(family, memory / "with" / "hf", config_overrides=tied)), memory / "with")


@pytest.mark.parametrize("head", [True, False])
def test_a_tied_model_with_mtp_copies(head: bool, memory: Path) -> None:
    """shared_head.head repeats lm_head, which repeats the embedding and need not be there itself."""
    source = write_tiny("deepseek_v3", memory / "hf", config_overrides={"tie_word_embeddings": True}, mtp_layers=2)
    assert "model.layers.4.shared_head.head.weight" in read_safetensors(source)
    equal_after(with_head(source) if head else source, memory)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rotary_frequencies_are_set_aside_and_restored(family: str, dtype: str, memory: Path) -> None:
    source = write_tiny(family, memory / "hf")
    half = json.loads((source / "config.json").read_text())["head_dim"] // 2
    size = {"F32": 4, "BF16": 2, "F64": 8}[dtype]
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        data = bytes(range(layer + 1, layer + 1 + half * size))
        home = home_of(source, f"model.layers.{layer}.input_layernorm.weight")
        edit_shard(home, lambda tensors, name=name, data=data: tensors.update({name: (dtype, (half,), data)}))
    reindex(source)
    equal_after(source, memory)


def test_f16_and_mixed_dtypes(memory: Path) -> None:
    """F16 everywhere but for the norms, which are F32: nothing is cast, and no dtype changes."""
    source = write_tiny("qwen3", memory / "hf")

    def change(tensors: dict[str, Any]) -> None:
        for name, (_, shape, data) in list(tensors.items()):
            tensors[name] = ("F32", shape, data + data) if "norm" in name else ("F16", shape, data)

    for shard in source.glob("*.safetensors"):
        edit_shard(shard, change)
    reindex(source)
    equal_after(source, memory)


@pytest.mark.parametrize("threads", [1, 4])
def test_outputs_do_not_depend_on_the_number_of_threads(
    threads: int, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=2)
    to_mcore(source, memory / "mcore two")
    monkeypatch.setattr(to_mcore_module, "execute", lambda *given: execute(*given, threads=threads))
    monkeypatch.setattr(to_hf_module, "execute", lambda *given: execute(*given, threads=threads))
    equal_after(source, memory)
    assert sha256_tree(memory / "mcore") == sha256_tree(memory / "mcore two")


# ---- the shape of the HF side


def test_max_shard_size_cuts_shards_anew_with_the_same_tensors(memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    to_mcore(source, memory / "mcore")
    to_hf(memory / "mcore", memory / "back", max_shard_size="20KB")
    files = sorted(memory.joinpath("back").glob("*.safetensors"))
    assert len(files) > 5
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    for file in files:
        tensors = read_safetensors(file)
        assert sum(len(data) for _, _, data in tensors.values()) <= 20_000 or len(tensors) == 1
    assert read_safetensors(memory / "back") == read_safetensors(source)
    index = json.loads((memory / "back" / INDEX).read_text())
    assert index["weight_map"] == {name: file.name for file in files for name in read_safetensors(file)}
    to_hf(memory / "mcore", memory / "one", max_shard_size="1GB")
    assert [file.name for file in memory.joinpath("one").glob("*.safetensors*")] == ["model.safetensors"]


def test_a_reference_with_other_shards_and_side_files_decides(memory: Path) -> None:
    """Same tensors in one file, and without the copies: the result is the reference's shape with the source's bytes."""
    source = write_tiny("deepseek_v3", memory / "hf")
    reference = write_tiny("deepseek_v3", memory / "reference", shards=1, copies=False, fill="normal")
    (reference / "only here.txt").write_text("x")
    to_mcore(source, memory / "mcore")
    to_hf(memory / "mcore", memory / "back", reference=reference)
    wanted = read_safetensors(source)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        del wanted[f"model.layers.3.{name}"]
    assert read_safetensors(memory / "back" / "model.safetensors") == wanted
    assert (memory / "back" / "only here.txt").read_text() == "x"
    assert set(sha256_tree(memory / "back")) == set(sha256_tree(reference))


def test_a_reference_may_be_what_hf2mcore_wrote_or_its_assets(memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    to_mcore(source, memory / "mcore")
    trained = memory / "trained"  # as training saves: no hf_assets
    shutil.copytree(memory / "mcore" / "release", trained)
    mcore = memory / "mcore"
    for number, reference in enumerate((mcore, mcore / "hf_assets", mcore / "release", source)):
        to_hf(trained, memory / f"back {number}", reference=reference)
        assert sha256_tree(memory / f"back {number}") == sha256_tree(source)


def test_a_reference_with_config_only_gives_what_the_family_publishes(memory: Path) -> None:
    """No weights to take a shape from: one file, the MTP copies written, and no tied head."""
    source = write_tiny("deepseek_v3", memory / "hf")
    to_mcore(source, memory / "mcore")
    reference = memory / "reference"
    reference.mkdir()
    (reference / "config.json").write_bytes((source / "config.json").read_bytes())
    to_hf(memory / "mcore", memory / "back", reference=reference)
    assert sorted(sha256_tree(memory / "back")) == ["config.json", "model.safetensors"]
    assert read_safetensors(memory / "back") == read_safetensors(source)


def test_a_missing_or_null_count_leaves_the_decision_to_the_tensors(memory: Path) -> None:
    for number, value in enumerate((None, ...)):
        folder = memory / str(number)
        folder.mkdir()
        source = write_tiny("deepseek_v3", folder / "hf", mtp_layers=2)
        edit_json(source / "config.json", lambda table: table.update(num_nextn_predict_layers=None))
        if value is ...:
            edit_json(source / "config.json", lambda table: table.pop("num_nextn_predict_layers"))
        equal_after(source, folder)
