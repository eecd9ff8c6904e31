"""What ``detect`` says a path is, on trees that real tools write, and what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from mtpconvert.errors import CheckpointError, ConfigError, IncompleteError, MtpConvertError, UsageError
from mtpconvert.stores.detect import Found, detect
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from tests.support import refusals
from tests.support.tiny import write_tiny

# megatron-core 0.16.1, dist_checkpointing/core.py: what save_config writes
METADATA_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
TRACKER = "latest_checkpointed_iteration.txt"


def files(root: Path, *names: str, content: bytes = b"x") -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def iteration(folder: Path, backend: str = "torch_dist") -> Path:
    files(folder, ".metadata", "common.pt", "__0_0.distcp")
    (folder / "metadata.json").write_text(json.dumps(METADATA_JSON | {"sharded_backend": backend}))
    return folder


def megatron(root: Path, tracker: str, folder: str) -> Path:
    iteration(root / folder)
    (root / TRACKER).write_text(tracker)
    return root


def refusal(path: Path, kind: type[MtpConvertError], *words: str) -> str:
    return refusals.refusal(lambda: detect(path), kind, *words)


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    tiny = write_tiny("qwen3", tmp_path / "tiny")
    assert detect(tiny) == Found("hf", tiny)
    files(tiny, "hf_assets/config.json", "metadata.json", "pytorch_model.bin", "original/consolidated.00.pth")
    assert detect(tiny) == Found("hf", tiny)
    one = write_tiny("qwen3", tmp_path / "one", shards=1)
    assert detect(one).kind == "hf"


def test_an_index_whose_shards_are_all_gone_is_still_a_hugging_face_directory(tmp_path: Path) -> None:
    tiny = write_tiny("qwen3", tmp_path / "tiny")
    for path in tiny.glob("*.safetensors"):
        path.unlink()
    assert detect(tiny).kind == "hf"
    with pytest.raises(IncompleteError, match=r"3 of 3 files .* are missing: model-00001-of-00003.safetensors \(12 "):
        SafetensorsReader(tiny)


@pytest.mark.parametrize(("tracker", "folder"), [("release", "release"), ("12\n", "iter_0000012")])
def test_a_megatron_root_and_its_iteration_folder(tracker: str, folder: str, tmp_path: Path) -> None:
    root = megatron(tmp_path / "ckpt", tracker, folder)
    assert detect(root) == Found("torch_dist", root, root / folder)
    assert detect(root / folder) == Found("torch_dist", root / folder, root / folder)
    assets = files(root / "hf_assets", "config.json", "tokenizer.json")
    assert detect(root) == Found("torch_dist", root, root / folder, assets)
    assert detect(root / folder) == Found("torch_dist", root / folder, root / folder, assets)


@pytest.mark.parametrize("shards", [1, 3])
def test_side_files_of_a_conversion_are_no_checkpoint(shards: int, tmp_path: Path) -> None:
    tiny = write_tiny("qwen3", tmp_path / "tiny", shards=shards)
    hf2mcore(tiny, tmp_path / "mcore", ToMcore(), Callbacks())
    kept = tmp_path / "mcore" / "hf_assets"
    refusal(kept, CheckpointError, "hf_assets holds the side files", f"belongs to: {kept.parent}")


def test_a_path_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal(tmp_path / "gone", UsageError, "gone does not exist", "check the path")
    monkeypatch.chdir(tmp_path)
    refusal(Path("deepseek-ai/DeepSeek-V3"), UsageError, "deepseek-ai/DeepSeek-V3 does not exist", "hf download")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refusal(tmp_path / "link", UsageError, "link does not exist")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", ["a single weights file", "give its directory"]),
        ("model-Q8_0.gguf", ["a GGUF file"]),
        ("model.nemo", ["a NeMo archive"]),
        ("pytorch_model.bin", ["a PyTorch pickle", "safe_serialization"]),
        ("model_optim_rng.pt", ["a PyTorch pickle"]),
        (TRACKER, ["one file of a checkpoint", "give its directory"]),
        ("__0_0.distcp", ["one file of a checkpoint"]),
        ("notes.txt", ["not a checkpoint directory"]),
    ],
)
def test_a_file_is_refused_with_what_to_give_instead(name: str, words: list[str], tmp_path: Path) -> None:
    files(tmp_path, name)
    refusal(tmp_path / name, CheckpointError, name, *words)


def test_pickles_only_and_gguf_only(tmp_path: Path) -> None:
    bins = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "config.json")
    refusal(files(tmp_path / "bin", *bins), CheckpointError, "PyTorch pickles only", bins[0], "safe_serialization")
    refusal(files(tmp_path / "meta", "consolidated.00.pth"), CheckpointError, "PyTorch pickles only")
    refusal(files(tmp_path / "heads", "medusa_lm_head.pt"), CheckpointError, "PyTorch pickles only")
    refusal(files(tmp_path / "gguf", "m-Q8_0.gguf", "config.json"), CheckpointError, "GGUF files only", "m-Q8_0.gguf")


def test_lfs_pointers(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4986211280\n"
    tiny = write_tiny("qwen3", tmp_path / "tiny")
    files(tiny, "model-00002-of-00003.safetensors", content=pointer)
    refusal(tiny, CheckpointError, "1 of 3 weight files", "git-LFS pointers", "model-00002-of-00003", "git lfs pull")
    refusal(tiny / "model-00002-of-00003.safetensors", CheckpointError, "a git-LFS pointer", "git lfs pull")


def test_weights_without_config(tmp_path: Path) -> None:
    tiny = write_tiny("qwen3", tmp_path / "tiny")
    (tiny / "config.json").unlink()
    refusal(tiny, ConfigError, "no config.json")
    files(tiny, "adapter_config.json")
    refusal(tiny, ConfigError, "PEFT adapter")


def test_neither_names_the_folder_that_may_be_meant(tmp_path: Path) -> None:
    refusal(files(tmp_path / "empty", "README.md"), CheckpointError, "neither a Hugging Face", "check the path")
    write_tiny("qwen3", tmp_path / "cache" / "snapshots")
    refusal(tmp_path / "cache", CheckpointError, "neither", "perhaps you mean a folder in it: snapshots")
    iteration(tmp_path / "untracked" / "iter_0000005")
    refusal(tmp_path / "untracked", CheckpointError, TRACKER, "perhaps you mean a folder in it: iter_0000005")


def test_both_at_once(tmp_path: Path) -> None:
    root = megatron(write_tiny("qwen3", tmp_path / "both", shards=1), "release", "release")
    refusal(root, CheckpointError, "both Hugging Face weights (model.safetensors) and a Megatron checkpoint")
    flat = iteration(write_tiny("qwen3", tmp_path / "flat", shards=1))
    refusal(flat, CheckpointError, "both Hugging Face weights")


def test_a_tracker_that_points_nowhere(tmp_path: Path) -> None:
    root = megatron(tmp_path / "ckpt", "20", "iter_0000010")
    refusal(root, IncompleteError, "says 20", "no folder iter_0000020", "iter_0000010")
    (root / TRACKER).write_text("latest")
    refusal(root, CheckpointError, "'latest'", "neither 'release' nor a number")
    (root / TRACKER).write_bytes(b"\xff\xfe")
    refusal(root, CheckpointError, TRACKER, "cannot be read")
    (root / TRACKER).write_text("../../etc")
    refusal(root, CheckpointError, "neither 'release' nor a number")


def test_unfinished_iterations(tmp_path: Path) -> None:
    root = megatron(tmp_path / "ckpt", "3", "iter_0000003")
    (root / "iter_0000003" / ".metadata").unlink()
    refusal(root, IncompleteError, "iter_0000003 has no .metadata", "did not finish")
    (root / "iter_0000003" / "metadata.json").unlink()
    refusal(root, IncompleteError, "neither .metadata nor metadata.json")
    (root / TRACKER).write_text("4")
    (root / "iter_0000004").mkdir()
    refusal(root, IncompleteError, "iter_0000004 has neither .metadata nor metadata.json")


def test_other_megatron_formats_are_named(tmp_path: Path) -> None:
    legacy = files(tmp_path / "legacy", "iter_0000001/mp_rank_00/model_optim_rng.pt", TRACKER, content=b"1")
    refusal(legacy, CheckpointError, "legacy 'torch' checkpoint", "mp_rank_")
    refusal(legacy / "iter_0000001", CheckpointError, "legacy 'torch' checkpoint", "--ckpt-format torch_dist")

    zarr = iteration(tmp_path / "zarr", backend="zarr")
    refusal(zarr, CheckpointError, "'zarr' checkpoint")
    bare = files(tmp_path / "oldzarr", "decoder.final_layernorm.weight/.zarray")
    refusal(bare, CheckpointError, "zarr checkpoint", "decoder.final_layernorm.weight")

    fsdp = iteration(tmp_path / "fsdp")
    (fsdp / "metadata.json").unlink()
    refusal(fsdp, CheckpointError, "no metadata.json", "torch_dcp")
    (fsdp / ".metadata").write_bytes(b"..model.module.decoder.layers.0..")
    refusal(fsdp, CheckpointError, "fsdp_dtensor checkpoint of Megatron-FSDP")

    refusal(files(tmp_path / "nemo2", "weights/a", "context/b"), CheckpointError, "NeMo checkpoint")
    refusal(files(tmp_path / "nemo1", "megatron.nemo"), CheckpointError, "NeMo checkpoint")

    broken = iteration(tmp_path / "broken")
    for content in ("{", "[]", "{}", "[" * 100_000):
        (broken / "metadata.json").write_text(content)
        refusal(broken, CheckpointError, "metadata.json", "names no sharded_backend")
