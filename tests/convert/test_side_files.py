"""Everything of a Hugging Face directory that is no weight goes there and back byte for byte; nothing else appears."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from mtpconvert.convert.assets import left_out_notes, side_files
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from mtpconvert.errors import CheckpointError
from tests.support.frameworks_convert import to_hf, to_mcore
from tests.support.sabotage import edit_json
from tests.support.tiny import INDEX, SIDE_FILES, sha256_tree, write_tiny


def put(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_sub_folders_odd_names_and_any_bytes(memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    put(
        source,
        {
            "empty": b"",
            ".gitattributes": b"*.safetensors filter=lfs\n",
            "assets/a/b/deep.bin.txt": b"\x00\xff" * 7,
            "figures/benchmark é.png": bytes(range(256)),
            "encoding/model.py": b"print('no')\n",
            "tokenizer.model": b"\x0a\x09",
            "name with\nnewline": b"x",
        },
    )
    before = sha256_tree(source)
    to_mcore(source, memory / "mcore")
    assets = sha256_tree(memory / "mcore" / "hf_assets")
    ours = {name for name in assets if name.startswith("mtpconvert/")}
    weights = {name for name in before if name.endswith(".safetensors")}
    assert {name: digest for name, digest in assets.items() if name not in ours} == {
        name: digest for name, digest in before.items() if name not in weights
    }
    assert {"LICENSE", "config.json", INDEX, *SIDE_FILES} <= set(assets)
    to_hf(memory / "mcore", memory / "back")
    assert sha256_tree(memory / "back") == before


def test_links_become_files(memory: Path) -> None:
    """As in the hub's cache, where a snapshot holds links to blobs; and a link to a folder elsewhere."""
    source = write_tiny("qwen3", memory / "hf")
    blobs = memory / "blobs"
    put(blobs, {"extra/one.txt": b"1"})
    for name in ("tokenizer.json", "model-00002-of-00003.safetensors", "config.json"):
        (source / name).rename(blobs / name)
        (source / name).symlink_to(Path("..") / "blobs" / name)
    (source / "linked").symlink_to(blobs / "extra")
    before = sha256_tree(source)
    to_mcore(source, memory / "mcore")
    to_hf(memory / "mcore", memory / "back")
    back = memory / "back"
    assert sha256_tree(back) == before | {"linked/one.txt": sha256_tree(blobs)["extra/one.txt"]}
    assert not any(path.is_symlink() for path in back.rglob("*"))


BACK = "this link leads back into its own folder"


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"self": "."}, BACK),
        ({"a/up": ".."}, BACK),
        ({"x/to_y": "../y", "y/to_x": "../x"}, BACK),
        ({"loop": "loop2", "loop2": "loop"}, "loop is a broken link"),
    ],
)
def test_links_in_a_circle_are_refused(links: dict[str, str], message: str, memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    for name, target in links.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=message) as refusal:
        to_mcore(source, memory / "mcore")
    assert str(source) in str(refusal.value.where)
    assert list(memory.iterdir()) == [source]


def test_a_broken_link_is_refused_by_its_name(memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    (source / "notes.md").symlink_to("gone.md")
    with pytest.raises(CheckpointError, match=r"notes\.md is a broken link") as refusal:
        to_mcore(source, memory / "mcore")
    assert refusal.value.where == str(source / "notes.md")
    assert list(memory.iterdir()) == [source]


def test_hidden_folders_and_other_weights_stay_behind_and_the_weights_are_said(memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    put(
        source,
        {
            ".git/config": b"x",
            ".cache/huggingface/y": b"y",
            "original/consolidated.00.pth": b"PK",
            "mtp/model.safetensors": b"weights that nobody reads",
            "training_args.bin": b"PK",
        },
    )
    result = hf2mcore(source, memory / "mcore", ToMcore(), Callbacks())
    (note,) = [note for note in result.notes if "left out" in note]
    assert "3 files are weights" in note
    for name in ("mtp/model.safetensors", "original/consolidated.00.pth", "training_args.bin"):
        assert name in note
    assert not (memory / "mcore" / "hf_assets" / ".git").exists()
    assert not list((memory / "mcore" / "hf_assets").rglob("*.bin"))
    assert left_out_notes(write_tiny("qwen3", memory / "plain")) == []


@pytest.mark.parametrize("file", ["mtpconvert/manifest.json", "passthrough/README.md", "passthrough"])
def test_what_is_called_as_ours_is_refused_in_a_source(file: str, memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    put(source, {file: b"{}"})
    with pytest.raises(CheckpointError, match=f"something called '{file.partition('/')[0]}'"):
        to_mcore(source, memory / "mcore")


def test_a_reference_with_such_a_folder_keeps_it(memory: Path) -> None:
    """Only hf_assets has a folder of ours; in a Hugging Face reference it is a side file like any other."""
    source = write_tiny("qwen3", memory / "hf")
    to_mcore(source, memory / "mcore")
    put(source, {"mtpconvert/x.txt": b"x", "passthrough/z.txt": b"z", "hf_assets_of_another/y.txt": b"y"})
    to_hf(memory / "mcore", memory / "back", reference=source)
    assert sha256_tree(memory / "back") == sha256_tree(source)


# ---- remote code


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_remote_code_that_is_not_there_is_refused(file: str, memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    if not (source / file).exists():
        (source / file).write_text("{}")
    edit_json(source / file, lambda table: table.update(auto_map={"AutoModel": "modeling_gone.Model"}))
    with pytest.raises(CheckpointError, match=r"modeling_gone\.Model, and modeling_gone\.py is not there") as refusal:
        to_mcore(source, memory / "mcore")
    assert refusal.value.where == str(source / file)
    assert list(memory.iterdir()) == [source]


def test_remote_code_is_carried_and_never_run(memory: Path) -> None:
    """modeling_x.py raises when it is imported. Code of another repository, null and lists are allowed."""
    source = write_tiny("qwen3", memory / "hf")
    auto_map = {
        "AutoConfig": "someone/else--configuration_y.Config",
        "AutoModel": "modeling_x.Model",
        "AutoTokenizer": ["modeling_x.Slow", None],
    }
    edit_json(source / "config.json", lambda table: table.update(auto_map=auto_map))
    to_mcore(source, memory / "mcore")
    to_hf(memory / "mcore", memory / "back")
    assert sha256_tree(memory / "back") == sha256_tree(source)
    assert (memory / "back" / "modeling_x.py").read_bytes() == SIDE_FILES["modeling_x.py"]


def test_a_side_file_that_only_looks_like_json_is_carried(memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    put(source, {"odd_config.json": b"not json \xff", "list_config.json": b"[1]"})
    to_mcore(source, memory / "mcore")
    assert {Path("odd_config.json"), Path("list_config.json")} <= set(side_files(memory / "mcore" / "hf_assets"))


# ---- config.json


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_config_changes_only_where_mtp_is_dropped(mark: bytes, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=1)
    raw = mark + (source / "config.json").read_bytes().replace(b"\n", b"\r\n").rstrip()
    (source / "config.json").write_bytes(raw)
    to_mcore(source, memory / "mcore")
    assert (memory / "mcore" / "hf_assets" / "config.json").read_bytes() == raw
    dropped = raw.replace(b'"num_nextn_predict_layers": 1', b'"num_nextn_predict_layers": 0')
    to_mcore(source, memory / "dropped", mtp="drop")
    assert (memory / "dropped" / "hf_assets" / "config.json").read_bytes() == dropped
    result = to_hf(memory / "mcore", memory / "back", mtp="drop")
    assert (memory / "back" / "config.json").read_bytes() == dropped
    assert result.config_changes == {"num_nextn_predict_layers": 0}


def test_from_megatron_rewrites_vocab_size_and_keeps_the_rows(memory: Path) -> None:
    source = write_tiny("qwen3", memory / "hf")
    to_mcore(source, memory / "mcore")
    to_hf(memory / "mcore", memory / "back", vocab_size="from-megatron")
    raw = (source / "config.json").read_bytes()
    assert (memory / "back" / "config.json").read_bytes() == raw.replace(b'"vocab_size": 98', b'"vocab_size": 128')
    index = json.loads((memory / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == json.loads((source / INDEX).read_text())["metadata"]["total_size"] + (
        2 * 30 * 36 * 2  # embedding and head, 30 rows more, of 36 BF16 elements
    )
