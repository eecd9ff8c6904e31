"""``mtpconvert parity``: the trained fixture agrees, what is wrong with a side is said, and nothing is claimed that was
not run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mtpconvert.evidence import transformers_model
from mtpconvert.evidence.differences import TOLERANCES, difference, differences
from tests.support.command_line import Run
from tests.support.frameworks_convert import Converted, Tiny, to_mcore
from tests.support.parity_faults import with_args
from tests.support.trained import DEEPSEEK, GLM

POINTS = ["embedding", "layer 0", "layer 1", "layer 2", "final norm", "trunk logits"]
DEPTH = ["eh_proj", "layer", "final norm", "logits"]


@pytest.mark.parametrize(("fixture", "depths"), [(DEEPSEEK, 1), (GLM, 2)])
def test_the_trained_fixtures_agree(fixture: Path, depths: int, run: Run) -> None:
    result = run("parity", fixture, "--require-mtp", "--json")
    assert (result.code, result.err) == (0, "")
    report = result.json
    expected = dict.fromkeys(POINTS, 2 * 64)
    for depth in range(1, depths + 1):
        expected |= {f"MTP {depth}: {part}": 2 * (64 - depth) for part in DEPTH}
    assert [(point["point"], point["positions"]) for point in report["points"]] == list(expected.items())
    assert max(point["relative"] for point in report["points"]) < 1e-5
    logits = [point for point in report["points"] if point["point"].endswith("logits")]
    assert all(point["greedy"] == 1 and point["kl"] < 1e-9 and point["cosine_min"] > 1 - 1e-9 for point in logits)
    assert (report["verdict"], report["trunk"], report["first_departure"]) == ("pass", "pass", None)
    assert report["mtp"]["state"] == "compared"
    assert report["mtp"]["verdicts"] == {str(depth): "pass" for depth in range(1, depths + 1)}
    assert "dist_checkpointing.load; converted on the fly" in report["path"]


@pytest.mark.parametrize(("fixture", "norms", "depths"), [(DEEPSEEK, 9, 1), (GLM, 4, 2)])
def test_the_default_conversion_agrees_in_bfloat16(
    fixture: Path, norms: int, depths: int, run: Run, converted: Converted
) -> None:
    """For Transformer Engine, where norms have other names: of DeepSeek-V3 the 2 of MLA in 4 layers and the MLP norm of
    the dense one, of GLM-4.5 the MLP norm of 4 MoE layers."""
    result = run("parity", fixture, converted(fixture), "--dtype", "bf16", "--require-mtp")
    assert result.code == 0, result.out
    assert f"{norms} norms asked for under their Transformer Engine names" in result.out
    last = f"MTP layers: transformers {depths}, Megatron {depths}, compared {depths}; verdict: pass"
    assert result.last_line == last


def test_two_depths(run: Run, tiny: Tiny) -> None:
    result = run("parity", tiny("deepseek_v3", mtp_layers=2), "--tokens", "1 2,3 4 5 6", "--json")
    assert result.code == 0
    assert result.json["mtp"]["verdicts"] == {"1": "pass", "2": "pass"}
    assert result.json["inputs"] == "6 tokens as given"
    assert [p["positions"] for p in result.json["points"] if p["point"].endswith("logits")] == [6, 5, 4]


def test_text_goes_through_the_tokenizer(run: Run) -> None:
    result = run("parity", DEEPSEEK, "--text", "def f(é):", "--json")  # a token a byte, and é has two
    assert (result.code, result.json["inputs"]) == (0, "10 tokens of the given text")


def test_a_model_without_mtp(run: Run, tiny: Tiny, converted: Converted) -> None:
    """The trunk passes; of MTP it is said that there is none, and --require-mtp is not satisfied."""
    source = tiny("qwen3")
    result = run("parity", source, converted(source))
    assert result.code == 0
    assert "MTP: not run, because neither side has MTP layers" in result.out
    required = run("parity", source, converted(source), "--require-mtp", "--json")
    assert (required.code, required.json["verdict"], required.json["trunk"]) == (10, "not-run", "pass")


def test_mtp_that_transformers_cannot_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run, because: never a pass."""
    monkeypatch.setattr(transformers_model, "_why_no_mtp", lambda _config: "transformers knows no MTP of it")
    result = run("parity", DEEPSEEK)
    assert (result.code, result.last_line[-16:]) == (0, "verdict: partial")
    assert "MTP: not run, because transformers knows no MTP of it" in result.out
    required = run("parity", DEEPSEEK, "--require-mtp", "--json")
    assert (required.code, required.json["verdict"]) == (10, "not-run")
    assert all(not point["point"].startswith("MTP") for point in required.json["points"])


def test_an_architecture_without_a_mapping(run: Run, tiny: Tiny) -> None:
    source = tiny("qwen3", config_overrides={"architectures": ["Qwen3CousinForCausalLM"]}, name="cousin")
    result = run("parity", source, "--json")
    assert result.code == 10
    assert result.json["error"]["kind"] == "NotRunError"
    assert result.json["error"]["what"].startswith("parity not run, because it cannot be converted: no mapping file")


def test_mtp_dropped_on_the_way_fails(run: Run, tmp_path: Path) -> None:
    dropped = to_mcore(DEEPSEEK, tmp_path / "mcore", mtp="drop")
    result = run("parity", DEEPSEEK, dropped)
    assert result.code == 1
    assert "trunk: pass" in result.out
    assert "MTP: fail, because the Hugging Face side alone has MTP layers" in result.out


def test_args_that_build_another_model(run: Run, tmp_path: Path) -> None:
    """One layer more than the checkpoint has: refused, with the keys that are missing."""
    source = to_mcore(DEEPSEEK, tmp_path / "mcore", spec="local")
    with_args(source, {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]})
    result = run("parity", DEEPSEEK, source)
    assert result.code == 6
    assert "decoder.layers.3." in result.err


def test_args_from_which_nothing_can_be_built(run: Run, tmp_path: Path) -> None:
    source = to_mcore(DEEPSEEK, tmp_path / "mcore", spec="local")
    with_args(source, {"hidden_size": None})
    result = run("parity", DEEPSEEK, source)
    assert result.code == 5
    assert "megatron-core builds no model from the checkpoint's args" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1 2 258"], "token 258 is none of the vocabulary's 258"),
        (["--tokens", "1 2"], "2 tokens are too few for 1 MTP layers"),
        (["--tokens", "one"], "numbers"),
        (["--tokens", "1 2 3", "--text", "x"], "exclude each other"),
    ],
)
def test_wrong_usage(run: Run, words: list[str], message: str) -> None:
    result = run("parity", DEEPSEEK, *words)
    assert result.code == 2
    assert message in result.err


def test_difference_by_hand() -> None:
    """Two positions of three logits: the second position is 1 off in one of them."""
    left = torch.tensor([[[0.0, 2.0, -4.0], [1.0, 1.5, 0.0]]])
    right = torch.tensor([[[0.0, 2.0, -4.0], [2.0, 1.5, 0.0]]])
    found = difference("trunk logits", left, right)
    assert (found.max_abs, found.scale, found.relative) == (1.0, 4.0, 0.25)
    assert found.mean_abs == pytest.approx(1 / 6)
    assert found.mean_relative == pytest.approx(1 / 8.5)
    assert found.cosine_min == pytest.approx((2 + 2.25) / math.sqrt((1 + 2.25) * (4 + 2.25)))
    assert found.greedy == 0.5
    ours, theirs = [math.exp(x) for x in (2, 1.5, 0)], [math.exp(x) for x in (1, 1.5, 0)]
    kl = sum(
        t / sum(theirs) * (math.log(t / sum(theirs)) - math.log(o / sum(ours)))
        for t, o in zip(theirs, ours, strict=True)
    )
    assert found.kl_max == pytest.approx(kl)
    assert found.kl == pytest.approx(kl / 2)
    assert not found.within(TOLERANCES["float32"]) and not found.within(TOLERANCES["bfloat16"])


def test_what_is_not_a_number_is_no_match() -> None:
    left = torch.zeros(1, 2, 3)
    right = torch.full((1, 2, 3), float("nan"))
    for dtype in TOLERANCES:
        assert not difference("layer 0", left, right).within(TOLERANCES[dtype])
        assert not difference("MTP 1: logits", right, right).within(TOLERANCES[dtype])


def test_points_of_one_side_alone() -> None:
    left = {"layer 0": torch.ones(1, 2, 3), "layer 1": torch.ones(1, 2, 3), "trunk logits": torch.ones(1, 2, 5)}
    right = {"layer 0": torch.ones(1, 2, 4), "layer 2": torch.ones(1, 2, 3), "trunk logits": torch.ones(1, 2, 8)}
    found, apart = differences(left, right)
    assert [one.point for one in found] == ["trunk logits"]  # rows past the vocabulary are padding
    assert [text.partition(":")[0] for text in apart] == ["layer 0", "layer 1", "layer 2"]
