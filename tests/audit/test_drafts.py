"""Every published kind of draft part in ``inspect`` and in HF-against-HF audits: recognised, counted, named, missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.mtp import mtp_layers
from mtpconvert.audit.readers.opening import open_side
from tests.support.command_line import Run, run
from tests.support.draft_kinds import KINDS, Checkpoint, base, trunk
from tests.support.json_schema import faults
from tests.support.sparse import write_headers

__all__ = ["run"]

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/audit-report.schema.json").read_text())


def written(folder: Path, checkpoint: Checkpoint, *, without: frozenset[str] | set[str] = frozenset()) -> Path:
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name not in without}
    return write_headers(folder, checkpoint.config, shapes, checkpoint.dtypes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_part_is_recognised_counted_and_named(kind: str, tmp_path: Path, run: Run) -> None:
    checkpoint = KINDS[kind]
    source = written(tmp_path / "hf", checkpoint)
    found = mtp_layers(open_side(source, "left"))
    assert found.kind.key == checkpoint.kind
    assert {k: set(names) for k, names in found.names.items()} == {k: set(p) for k, p in checkpoint.parts.items()}
    shown = run("inspect", source, "--json").json["mtp"]
    nbytes = sum(open_side(source, "left").inventory[name].nbytes for name in checkpoint.draft_names)
    assert shown == {
        "kind": checkpoint.kind, "key": checkpoint.key, "declared": checkpoint.declared,
        "present": len(checkpoint.parts), "tensors": len(checkpoint.draft_names), "bytes": nbytes,
    }  # fmt: skip
    line = run("inspect", source).last_line
    assert line.startswith(f"{checkpoint.one}s: declared {checkpoint.declared or 'nothing'}")
    assert f"present {len(checkpoint.parts)}; {len(checkpoint.draft_names)} tensors" in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_passes_and_a_loss_is_named(kind: str, tmp_path: Path) -> None:
    checkpoint = KINDS[kind]
    left = written(tmp_path / "left", checkpoint)
    report = audit(left, written(tmp_path / "same", checkpoint), level="headers")
    assert report.verdict("warning") == "pass", [found.message for found in report.findings]
    assert report.mtp.kinds == {"left": checkpoint.kind, "right": checkpoint.kind}
    assert faults(report.as_json(), SCHEMA, SCHEMA) == []
    plural = f"{len(checkpoint.parts)} {checkpoint.one}{'s' if len(checkpoint.parts) > 1 else ''} present"
    assert plural in report.mtp.sentences[0]
    last = max(checkpoint.parts)
    lost = set(checkpoint.parts[last])
    if checkpoint.draft_only and last == 0:
        lost = {max(lost)}  # all but one: a checkpoint without a tensor is none
    report = audit(left, written(tmp_path / "lost", checkpoint, without=lost), level="headers")
    assert report.verdict() == "fail"
    assert {found.tensor for found in report.findings if found.code == "mtp-tensor-missing"} == lost
    if len(lost) > 1:
        (gone,) = (found for found in report.findings if found.code == "mtp-layer-missing")
        assert gone.message.startswith(f"{checkpoint.one} {last}: 0 of {len(lost)} tensors present on the right")


TELLING = {
    "gemma 4 assistant": ("pre_projection.weight", "post_projection.weight"),
    "eagle 1": ("fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight"),
    "eagle 3": ("d2t", "midlayer.self_attn.q_proj.weight"),
    "medusa": ("0.0.linear.weight",),
    "meta": ("extra_heads.2.feed_forward.w1.weight", "norm.weight"),
    "dspark": ("mtp_dspark.markov_head.weight",),
}


@pytest.mark.parametrize("kind", TELLING)
def test_a_draft_without_a_telling_tensor_is_still_one(kind: str, tmp_path: Path, run: Run) -> None:
    """Either side; inspect and the converter, which have only the one checkpoint, say it too."""
    checkpoint = KINDS[kind]
    whole = written(tmp_path / "whole", checkpoint)
    for lost in TELLING[kind]:
        source = written(tmp_path / lost, checkpoint, without={lost})
        for left, right in ((whole, source), (source, whole)):
            report = audit(left, right, level="headers")
            assert report.mtp.kinds == {"left": checkpoint.kind, "right": checkpoint.kind}
            code = "missing" if right is source else "unexpected"
            found = {f.code for f in report.findings if f.tensor == lost}
            assert found <= {f"mtp-tensor-{code}", f"tensor-{code}"} and found
            assert (f"mtp-tensor-{code}" in found) == (lost in checkpoint.draft_names)
            (count, more), *_ = {
                (len(part), len(part) - (lost in part)) for part in checkpoint.parts.values() if lost in part
            } or {(0, 0)}
            said = f"{more} of {count} tensors present" if right is source else f"{more} of {more} tensors present"
            sentences = [row.sentence for row in report.mtp.layers]
            assert not count or any(said in sentence for sentence in sentences), sentences
            assert right is source or not count or any(sentence.endswith("; 1 unexpected") for sentence in sentences)
        shown = run("inspect", source, "--json").json["mtp"]
        assert (shown["kind"], shown["declared"]) == (checkpoint.kind, checkpoint.declared)
        assert shown["tensors"] == len(checkpoint.draft_names - {lost})
        result = run("plan", source)
        assert result.code == 10 and checkpoint.reason in result.err


def test_the_other_side_says_what_a_config_does_not(tmp_path: Path) -> None:
    """Half of an assistant's projections, and a config that names no architecture."""
    assistant = KINDS["gemma 4 assistant"]
    config = {"text_config": assistant.config["text_config"]}
    left = write_headers(tmp_path / "left", config, assistant.shapes, assistant.dtypes)
    shapes = {name: shape for name, shape in assistant.shapes.items() if name != "pre_projection.weight"}
    report = audit(left, write_headers(tmp_path / "right", config, shapes, assistant.dtypes), level="headers")
    assert report.mtp.kinds == {"left": "assistant", "right": "assistant"}
    assert "config declares 2 assistant layers; 2 assistant layers present" in report.mtp.sentences[1]
    other = write_headers(tmp_path / "other", base("LlamaForCausalLM", "llama"), trunk())
    assert audit(left, other, level="headers").mtp.kinds == {"left": "assistant", "right": None}


def test_a_config_of_another_eagle_is_no_draft(tmp_path: Path) -> None:
    """NVIDIA's Eagle 2.5 and 3 are vision models; a bare trunk that lost its last norm is no EAGLE either."""
    for number, (name, shapes) in enumerate((
        ("Eagle2_5_VLForConditionalGeneration", trunk()), ("Eagle3_VLForConditionalGeneration", trunk()),
        ("LlamaModel", {n: s for n, s in trunk("").items() if n not in ("norm.weight", "lm_head.weight")}),
    )):  # fmt: skip
        source = write_headers(tmp_path / f"{number}", base(name, "other"), shapes)
        assert mtp_layers(open_side(source, "left")).kind.key == "mtp"


@pytest.mark.parametrize("kind", ["medusa", "meta", "eagle 3", "gemma 4 assistant"])
def test_a_count_of_another_kind_is_checked(kind: str, tmp_path: Path) -> None:
    checkpoint = KINDS[kind]
    assert checkpoint.key is not None
    assert checkpoint.declared is not None
    config = json.loads(json.dumps(checkpoint.config))
    *path, last = checkpoint.key.split(".")
    level = config
    for part in path:
        level = level[part]
    level[last] += 1
    source = write_headers(tmp_path / "hf", config, checkpoint.shapes, checkpoint.dtypes)
    report = audit(source, source, level="headers")
    (found,) = (f for f in report.findings if f.code == "mtp-count-mismatch" and f.side == "left")
    assert f"{checkpoint.key} stands for {checkpoint.declared + 1} {checkpoint.one}s" in found.message
    assert f"{len(checkpoint.parts)} are stored" in found.message


@pytest.mark.parametrize("kind", ["medusa", "eagle 1", "step 3.5"])
def test_speed_is_modelled_for_mtp_layers_only(kind: str, tmp_path: Path, run: Run) -> None:
    checkpoint = KINDS[kind]
    result = run("inspect", written(tmp_path / "hf", checkpoint), "--speed")
    assert result.code == 0
    assert ("one decoded token reads" in result.out) == (kind == "step 3.5")
    said = f"--speed models a trunk and its MTP layers; {checkpoint.one}s are neither"
    assert (said in result.err) == (kind != "step 3.5")
    assert "no mapping for it" in result.out or kind == "medusa"


def test_heads_of_ones_own_stay_plain_in_a_quantised_checkpoint(tmp_path: Path) -> None:
    """As the trunk's head does under every scheme; a plain projection in the same layer is reported."""
    step = KINDS["step 3.5"]
    config = step.config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    packed = [n for n in step.shapes if "_proj." in n and "eh_proj" not in n and not n.endswith("4.mlp.up_proj.weight")]
    shapes = step.shapes | {f"{name}_scale_inv": (1, 1) for name in packed}
    dtypes = dict.fromkeys(packed, "F8_E4M3") | {f"{name}_scale_inv": "F32" for name in packed}
    source = write_headers(tmp_path / "hf", config, shapes, dtypes)
    found = [f for f in audit(source, source, level="headers").failing("warning") if f.side == "left"]
    assert [(f.code, f.tensor) for f in found] == [("quant-mtp-plain", "model.layers.4.mlp.up_proj.weight")]


def test_a_layer_far_beyond_the_trunk_is_missed_by_its_number(tmp_path: Path) -> None:
    step = KINDS["step 3.5"]
    shapes = {name.replace("layers.4.", "layers.9."): shape for name, shape in step.shapes.items()}
    left = write_headers(tmp_path / "left", step.config, shapes)
    right = {name: shape for name, shape in shapes.items() if "layers.9." not in name}
    report = audit(left, write_headers(tmp_path / "right", step.config, right), level="headers")
    assert [f.message[:13] for f in report.findings if f.code == "mtp-layer-missing"] == ["MTP layer 7: "]


def test_a_count_out_of_all_proportion_ends(tmp_path: Path) -> None:
    step = KINDS["step 3.5"]
    config = step.config | {"num_nextn_predict_layers": 10**12}
    source = write_headers(tmp_path / "hf", config, step.shapes)
    assert "mtp-count-mismatch" in {found.code for found in audit(source, source, level="headers").findings}
