# ruff: noqa: E501 (tables)
"""MTP by name in every published layout; count keys at every level; prefixes. Tensors are scraps: names are the point."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.mass import likely_prefix
from mtpconvert.audit.mtp import count_keys, mtp_layers
from mtpconvert.audit.readers.opening import open_side
from tests.support.sabotage import drop
from tests.support.tiny import write_safetensors, write_tiny


def directory(root: Path, names: list[str], config: dict[str, Any]) -> Path:
    root.mkdir(parents=True)
    tensors = {name: ("BF16", (2, 2), bytes([n % 250 + 1, 0x3C] * 4)) for n, name in enumerate(names)}
    write_safetensors(root / "model.safetensors", tensors)
    (root / "config.json").write_text(json.dumps(config))
    return root


TRUNK = [f"model.layers.{n}.self_attn.o_proj.weight" for n in range(2)] + [
    "model.embed_tokens.weight",
    "lm_head.weight",
]
BASE = {"num_hidden_layers": 2, "architectures": ["XForCausalLM"]}
# layout -> (trunk prefix before "layers", config, MTP names by layer, prefix of layer 0)
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[int, list[str]], str]] = {
    "deepseek": ("model.", {"num_nextn_predict_layers": 2}, {k: [f"model.layers.{2 + k}.{n}" for n in ("eh_proj.weight", "mlp.up_proj.weight")] for k in (0, 1)}, "model.layers.2."),
    "glm ocr": ("model.language_model.", {"text_config": {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}}, {0: ["model.language_model.layers.2.eh_proj.weight"]}, "model.language_model.layers.2."),
    "kimi k3": ("language_model.model.", {"text_config": {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}}, {0: ["language_model.model.layers.2.enorm.weight"]}, "language_model.model.layers.2."),
    "qwen": ("model.language_model.", {"text_config": {"num_hidden_layers": 2, "mtp_num_hidden_layers": 1}}, {0: ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight"]}, "mtp."),
    "mimo": ("model.", {"num_nextn_predict_layers": 2}, {k: [f"model.mtp_layers.{k}.input_proj.weight"] for k in (0, 1)}, "model.mtp_layers.0."),
    "mimo v2": ("model.", {"model_type": "mimo_v2_flash"}, {k: [f"model.mtp.layers.{k}.eh_proj.weight"] for k in (0, 1, 2)}, "model.mtp.layers.0."),
    "longcat": ("model.", {"num_nextn_predict_layers": 1}, {0: ["model.mtp.embed_tokens.weight", "model.mtp.norm.weight", "model.mtp.layers.0.eh_proj.weight"]}, "model.mtp."),
    "minimax m3": ("language_model.model.", {"text_config": {"num_hidden_layers": 2, "num_mtp_modules": 1}}, {0: ["language_model.model.mtp.layers.0.transformer_layer.mlp.up_proj.weight"]}, "language_model.model.mtp.layers.0."),
    "ernie": ("model.", {"num_nextn_predict_layers": 1}, {0: ["model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight", "model.mtp_block.0.mlp.up_proj.weight"]}, "model.mtp_"),
    "deepseek v4": ("", {"num_nextn_predict_layers": 2}, {k: [f"mtp.{k}.e_proj.weight"] for k in (0, 1)}, "mtp.0."),
    "nemotron": ("backbone.", {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}, {0: ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight"]}, "mtp.layers."),
    "inkling": ("model.llm.", {"mtp_config": {"num_nextn_predict_layers": 2}}, {k: [f"model.mtp.layers.{k}.input_proj.weight"] for k in (0, 1)}, "model.mtp.layers.0."),
    "exaone": ("model.", {"num_nextn_predict_layers": 1}, {0: ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"]}, "mtp."),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_seen_and_its_loss_named(tmp_path: Path, layout: str) -> None:
    root, config, layers, prefix = LAYOUTS[layout]
    names = [name.replace("model.", root, 1) for name in TRUNK]
    left = directory(tmp_path / "left", names + [n for part in layers.values() for n in part], BASE | config)
    found = mtp_layers(open_side(left, "left"))
    assert {k: sorted(v) for k, v in found.names.items()} == {k: sorted(v) for k, v in layers.items()}
    assert found.prefix[0].startswith(prefix)
    counts = {c.value for c in count_keys(BASE | config)}
    assert counts <= {len(layers)}
    shutil.copytree(left, tmp_path / "right")
    same = audit(left, tmp_path / "right")
    assert same.verdict("warning") == "pass", [f.message for f in same.findings]
    mtp = {n for part in layers.values() for n in part}
    drop(lambda name: name in mtp, fix_index=False)(tmp_path / "right")
    report = audit(left, tmp_path / "right")
    lost = [f for f in report.findings if f.code == "mtp-layer-missing"]
    assert len(lost) == len(layers)
    assert {f.tensor for f in report.findings if f.code == "mtp-tensor-missing"} == mtp
    assert ("mtp-none-found" in {f.code for f in report.findings}) == bool(counts)


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"]
)
@pytest.mark.parametrize("level", [(), ("text_config",), ("mtp_config",), ("a", "b")])
@pytest.mark.parametrize("value", [0, 2, None])
def test_a_count_is_checked_at_every_level(tmp_path: Path, key: str, level: tuple[str, ...], value: int | None) -> None:
    inner: dict[str, Any] = {key: value}
    for name in reversed(level):
        inner = {name: inner}
    root = directory(tmp_path / "x", [*TRUNK, "model.layers.2.eh_proj.weight"], BASE | inner)
    found = [f for f in audit(root, root).findings if f.code in ("mtp-count-mismatch", "mtp-count-null")]
    assert found and all(".".join((*level, key)) in f.message for f in found)


def test_counts_out_of_all_proportion_end(tmp_path: Path) -> None:
    root = directory(tmp_path / "x", TRUNK, BASE | {"num_hidden_layers": 10**12})
    (found,) = (f for f in audit(root, root).findings if f.code == "layer-set" and f.side == "left")
    assert found.message.startswith("1000000000000 layers declared; without a tensor: [2, 3, 4,")


def test_one_repeated_layer_may_be_counted_often(tmp_path: Path) -> None:
    """41: stored once, applied several times."""
    config = BASE | {"num_nextn_predict_layers": 4, "mtp_share_layers": True}
    root = directory(tmp_path / "x", [*TRUNK, "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], config)
    shutil.copytree(root, tmp_path / "right")
    assert audit(root, tmp_path / "right").verdict("warning") == "pass"


def test_declared_and_never_there(tmp_path: Path) -> None:
    """MiniMax-M2 declares three and publishes none."""
    root = directory(tmp_path / "x", TRUNK, BASE | {"num_mtp_modules": 3})
    report = audit(root, root)
    assert report.verdict() == "fail"
    assert "declares 3 MTP layers; 0 of ? tensors present" in report.mtp.sentences[0]


def test_a_layer_past_the_trunk_is_found_without_a_config(tmp_path: Path) -> None:
    root = directory(tmp_path / "x", [*TRUNK, "model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"], {})
    assert mtp_layers(open_side(root, "left")).names == {
        0: ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"]
    }


def test_a_vision_tower_is_no_mtp(tmp_path: Path) -> None:
    names = [*TRUNK, *(f"vision_tower.encoder.layers.{n}.mlp.weight" for n in range(9)), "visual.blocks.7.attn.weight"]
    assert mtp_layers(open_side(directory(tmp_path / "x", names, BASE), "left")).names == {}


@pytest.mark.parametrize(
    ("lost", "extra", "change"),
    [
        (["model.a.w", "model.b.w"], ["a.w", "b.w"], ("model.", "", 2)),
        (["model.a.w", "model.b.w"], ["model.language_model.a.w", "model.language_model.b.w"], ("model.", "model.language_model.", 2)),
        (["a.w", "b.w"], ["c.x", "d.y"], None),
    ],
)  # fmt: skip
def test_the_likely_prefix(lost: list[str], extra: list[str], change: tuple[str, str, int] | None) -> None:
    found = likely_prefix(lost, extra)
    assert found == change or (
        found is not None and change is not None and found[2] == change[2] and change[1].startswith(change[0])
    )


@pytest.mark.parametrize("said", ["1", True, 1.5, -1, [1], {}])
@pytest.mark.parametrize("level", ["", "text_config"])
def test_a_count_of_the_wrong_type_fails(tmp_path: Path, said: Any, level: str) -> None:
    """Readers that do not check types build no layer, or crash."""
    names = [*TRUNK, "model.layers.2.eh_proj.weight"]
    count = {"num_nextn_predict_layers": said}
    left = directory(tmp_path / "left", names, BASE | ({level: count} if level else count))
    report = audit(left, left)
    found = [f for f in report.findings if f.code == "mtp-count-type"]
    assert [f.side for f in found] == ["left", "right"]
    key = f"{level}{'.' if level else ''}num_nextn_predict_layers"
    assert found[0].message == f"config.json: {key} is {said!r}, no count; the names say 1"
    assert found[0].detail["key"] == key
    assert report.verdict() == "fail"


def test_a_null_count_is_a_warning(tmp_path: Path) -> None:
    names = [*TRUNK, "model.layers.2.eh_proj.weight"]
    left = directory(tmp_path / "left", names, BASE | {"num_nextn_predict_layers": None})
    assert {f.code for f in audit(left, left).findings} & {"mtp-count-null", "mtp-count-type"} == {"mtp-count-null"}


@pytest.mark.parametrize("how", ["folder", "hard links", "symbolic links", "through a link", "copy", "one file more"])
def test_one_checkpoint_given_twice_is_said(tmp_path: Path, how: str) -> None:
    left = directory(tmp_path / "left", TRUNK, BASE)
    right = tmp_path / "right"
    if how == "folder":
        right = left / ".." / "left"
    elif how == "through a link":
        right.symlink_to(left)
    elif how == "hard links":
        shutil.copytree(left, right, copy_function=os.link)
    elif how == "symbolic links":
        right.mkdir()
        for path in left.iterdir():
            (right / path.name).symlink_to(path)
    else:
        shutil.copytree(left, right)
    if how == "one file more":
        (right / "model.safetensors").unlink()
        (right / "model.safetensors").hardlink_to(left / "model.safetensors")
        write_safetensors(right / "more.safetensors", {"x": ("BF16", (1,), b"12")})
    found = {f.code: f for f in audit(left, right).findings}
    assert ("compared-with-itself" in found) is (how not in ("copy", "one file more"))
    if "compared-with-itself" in found:
        assert found["compared-with-itself"].severity.label == "warning"


@pytest.mark.parametrize(
    "harm",
    [
        {"num_attention_heads": 5},  # which the two groups of keys do not divide
        {"num_hidden_layers": "2"},
        {"hidden_size": None},
        {"head_dim": 0.5},
    ],
)
def test_a_known_config_that_contradicts_itself_is_said(tmp_path: Path, harm: dict[str, Any]) -> None:
    """HF against HF: tensors are compared by name as ever, and the report says what it could not look at."""
    left = write_tiny("qwen3", tmp_path / "left")
    assert "config-contradiction" not in {f.code for f in audit(left, left).findings}
    config = json.loads((left / "config.json").read_text())
    (left / "config.json").write_text(json.dumps(config | harm))
    report = audit(left, left)
    found = [f for f in report.findings if f.code == "config-contradiction"]
    assert [f.side for f in found] == ["left", "right"]
    assert next(iter(harm)) in found[0].message
    assert report.tensors == len(open_side(left, "left").inventory)


def test_an_unknown_architecture_contradicts_nothing(tmp_path: Path) -> None:
    left = directory(tmp_path / "left", TRUNK, BASE)
    assert "config-contradiction" not in {f.code for f in audit(left, left).findings}
