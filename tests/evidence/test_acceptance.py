"""``mtpconvert accept`` on the trained fixtures: MTP that drafts, the same numbers after a conversion and in
megatron-core, speculative output equal to greedy output, and a refusal for what transformers cannot run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpconvert.cli.main import call
from mtpconvert.errors import CheckpointError, MtpLostError, NotRunError, UsageError
from mtpconvert.evidence.acceptance import AcceptanceOptions, AcceptanceReport, changes, dropped, encode, measure
from mtpconvert.evidence.acceptance_model import load_drafter
from mtpconvert.evidence.acceptance_run import divergence, forced, generate
from mtpconvert.evidence.acceptance_tally import Tally
from mtpconvert.evidence.prompts import built_in
from mtpconvert.mapping.catalogue import architectures
from tests.support import mcore, mcore_forward, trained
from tests.support.frameworks_convert import to_hf, to_mcore
from tests.support.tiny import read_safetensors, write_tiny
from tests.support.trained import DEEPSEEK, MTP, TRAINED

PROMPTS = built_in()[:4]
OPTIONS = AcceptanceOptions(new_tokens=28)
CONVERTIBLE = [family for family, path in TRAINED.items() if trained.architecture_of(path) in architectures()]


@pytest.fixture(scope="module")
def reports() -> dict[str, AcceptanceReport]:
    return {family: measure(path, PROMPTS, OPTIONS) for family, path in TRAINED.items()}


@pytest.mark.parametrize("family", TRAINED)
def test_the_fixture_is_small_and_drafts(family: str, reports: dict[str, AcceptanceReport]) -> None:
    assert sum(file.stat().st_size for file in TRAINED[family].iterdir()) < 2_000_000
    report = reports[family]
    assert report.layers == report.draft_length == {"deepseek_v3": 1, "glm4_moe": 2}[family]
    for mode in ("forced_greedy", "free_greedy"):
        share = report.tally(mode).by_position[0]
        assert share is not None and share > 0.6, (mode, share)


@pytest.mark.parametrize("family", TRAINED)
def test_speculative_output_is_greedy_output_in_float32(family: str, reports: dict[str, AcceptanceReport]) -> None:
    report = reports[family]
    assert report.divergences == report.failures == []
    assert sum(result.generated for result in report.results) > 100


@pytest.mark.parametrize("family", TRAINED)
def test_generation_drafts_what_the_forced_pass_drafts(family: str) -> None:
    """Two ways to the same draft: with transformers' caches, step by step, and in one pass over the finished text."""
    drafter = load_drafter(TRAINED[family], dtype="float32", device="cpu", draft_length=3)
    tokens = encode(drafter, PROMPTS[0])
    output, steps = generate(drafter, tokens, 30, speculative=True, temperature=None, seed=0)
    compared = 0
    for step in steps:
        until = len(tokens) + step.at  # the draft is of the tokens from here on
        text = [*tokens, *output][: until + 2]  # what the third depth has to see
        if len(text) < until + 2:
            break
        before, _ = forced(drafter, text[:-1], 1.0)
        after, _ = forced(drafter, text, 1.0)
        last = [bool(b - a) for a, b in zip(before.reached, after.reached, strict=True)]
        chain = [all(step.agreed[: k + 1]) for k in range(3)]
        assert last == chain, step
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("family", CONVERTIBLE)
def test_a_round_trip_through_megatron_changes_no_draft(
    family: str, tmp_path: Path, reports: dict[str, AcceptanceReport]
) -> None:
    to_mcore(TRAINED[family], tmp_path / "mcore")
    to_hf(tmp_path / "mcore", tmp_path / "back")
    here, base = measure(tmp_path / "back", PROMPTS, OPTIONS), reports[family]
    assert here.results == base.results
    found = changes(here, base)
    assert len(found) == 4 and all(change.interval == (0.0, 0.0) for change in found)
    assert dropped(found, max_drop=0.0) == []


@pytest.mark.parametrize("family", CONVERTIBLE)
def test_megatron_core_accepts_what_transformers_accepts(family: str, tmp_path: Path) -> None:
    """The real megatron-core, built from the torch_dist checkpoint and its args alone, drafts the same tokens."""
    source = TRAINED[family]
    directory = to_mcore(source, tmp_path / "mcore", spec="local")
    model = mcore.model_from_args(mcore.common_state(directory)["args"], spec="local")
    assert mcore.load_into(model, directory) == []
    drafter = load_drafter(source, dtype="float32", device="cpu", draft_length=None)
    vocabulary, length = drafter.main.config.vocab_size, drafter.draft_length
    for prompt in built_in()[:12]:
        tokens = encode(drafter, prompt)
        ids = torch.tensor([tokens])
        logits = [mcore_forward.trunk_logits(model, ids)]
        logits += [mcore_forward.mtp_logits(model, ids, depth) for depth in range(1, length + 1)]
        choices = [one[0, :, :vocabulary].argmax(-1) for one in logits]
        counted = Tally(length, float(len(tokens) - length))
        alive = torch.ones(len(tokens) - length, dtype=torch.bool)
        for depth in range(1, length + 1):
            alive &= choices[depth][: len(alive)] == choices[0][depth : depth + len(alive)]
            counted.reached[depth - 1] = float(alive.sum())
        assert forced(drafter, tokens, 1.0)[0] == counted


def test_a_longer_draft_uses_the_last_layer_again() -> None:
    report = measure(DEEPSEEK, PROMPTS[:2], AcceptanceOptions(draft_length=3, new_tokens=24))
    assert (report.layers, report.draft_length) == (1, 3)
    assert report.failures == []
    shares = report.tally("free_greedy").by_position
    assert len(shares) == 3 and shares[0] is not None and shares[0] > 0.5


def test_sampled_acceptance_is_what_sampling_accepts() -> None:
    """The first draft after a prompt: accepted as often, over 150 throws, as the probability computed for every token
    that the trunk may have chosen before it, weighted by the chance that it does (three standard deviations apart)."""
    drafter = load_drafter(DEEPSEEK, dtype="float32", device="cpu", draft_length=None)
    tokens = list(b"        if value is None:\n            ret")  # token id = byte
    with torch.no_grad():
        chance = drafter.main(torch.tensor([tokens])).logits[0, -1].softmax(-1)
    expected = 0.0
    for token in chance.argsort(descending=True)[:40].tolist():
        text = [*tokens, token]
        before, after = (forced(drafter, some, 1.0)[1].accepted for some in (text[:-1], text))
        expected += float(chance[token]) * (after - before)
    kept = 0
    for seed in range(150):
        _, steps = generate(drafter, tokens, 3, speculative=True, temperature=1.0, seed=seed)
        kept += steps[0].kept
    assert chance.sort(descending=True).values[:40].sum() > 0.98
    assert abs(kept / 150 - expected) < 3 * (expected * (1 - expected) / 150) ** 0.5


def test_bfloat16_tells_the_gap_at_the_first_divergence() -> None:
    drafter = load_drafter(DEEPSEEK, dtype="bfloat16", device="cpu", draft_length=None)
    tokens = encode(drafter, PROMPTS[0])
    output, _ = generate(drafter, tokens, 12, speculative=False, temperature=None, seed=0)
    assert divergence(drafter, tokens, output, output) is None
    other = [*output[:5], output[5] ^ 1, *output[6:]]
    apart = divergence(drafter, tokens, output, other)
    assert apart is not None and (apart.at, apart.plain, apart.speculative) == (5, output[5], other[5])
    with torch.no_grad():
        last = drafter.main(torch.tensor([[*tokens, *output[:5]]])).logits[0, -1].float()
    logits = last.sort(descending=True).values
    assert apart.gap == pytest.approx(float(logits[0] - logits[1]))


def test_damage_is_a_drop_against_the_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = trained.damaged(DEEPSEEK, tmp_path / "broken", trained.halves(f"{MTP}eh_proj.weight", 1))
    plot = tmp_path / "plot.svg"
    arguments = ["accept", str(broken), "--against", str(DEEPSEEK), "--limit", "4", "--max-new-tokens", "16"]
    assert call([*arguments, "--max-drop", "0.05", "--json", "--plot", str(plot)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "fail" and "fell by more than 5.0%" in result["failures"][0]
    assert result["speculative_equals_greedy"]["divergences"] == []  # bad drafts cost time, never the output
    assert plot.read_text().startswith("<svg")


def test_a_threshold_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["accept", str(DEEPSEEK), "--limit", "2", "--max-new-tokens", "8"]
    assert call([*arguments, "--min-acceptance", "1.0"]) == 1
    assert "at least 100.0% are asked for" in capsys.readouterr().out
    assert call([*arguments, "--min-acceptance", "0.1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "MTP layers: 1 run; verdict: pass"


# --- not run, because


def test_a_family_whose_mtp_transformers_does_not_know_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3 whose last layer the config takes for an MTP layer."""
    model = write_tiny("qwen3", tmp_path / "model")
    changes = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(trained.config_of(model) | changes))
    assert call(["accept", str(model), "--json"]) == 10
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "NotRunError"
    assert error["what"].startswith("draft acceptance not run, because transformers")


def test_a_checkpoint_without_mtp_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(NotRunError, match="it has no MTP"):
        measure(write_tiny("qwen3", tmp_path / "model"), PROMPTS, OPTIONS)


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    model = _changed(tmp_path, model_type="some_new_model")
    with pytest.raises(NotRunError, match="has no class for it"):
        measure(model, PROMPTS, OPTIONS)


def test_quantised_weights_are_not_run_on_a_cpu(tmp_path: Path) -> None:
    model = _changed(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(NotRunError, match=r"quantised \(fp8\)"):
        measure(model, PROMPTS, OPTIONS)


def test_missing_mtp_is_lost_not_passed(tmp_path: Path) -> None:
    without = trained.damaged(DEEPSEEK, tmp_path / "without", trained.drop(MTP))
    with pytest.raises(MtpLostError, match="declares 1 MTP"):
        measure(without, PROMPTS, OPTIONS)
    one = trained.damaged(DEEPSEEK, tmp_path / "one", trained.drop(f"{MTP}hnorm.weight"))
    with pytest.raises(MtpLostError, match="hnorm"):
        measure(one, PROMPTS, OPTIONS)


def test_a_missing_trunk_tensor_is_not_made_up(tmp_path: Path) -> None:
    broken = trained.damaged(DEEPSEEK, tmp_path / "broken", trained.drop("model.layers.1.self_attn.o_proj.weight"))
    with pytest.raises(CheckpointError, match="o_proj"):
        measure(broken, PROMPTS, OPTIONS)


def test_a_megatron_checkpoint_is_sent_to_the_converter(tmp_path: Path) -> None:
    to_mcore(DEEPSEEK, tmp_path / "mcore")
    with pytest.raises(UsageError, match="Hugging Face checkpoints only"):
        measure(tmp_path / "mcore", PROMPTS, OPTIONS)


def test_nothing_of_transformers_stays_changed() -> None:
    from transformers import DeepseekV3ForCausalLM
    from transformers.generation import utils
    from transformers.modeling_layers import MtpModel

    before: list[Any] = [
        DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected,
        utils.MTPCandidateGenerator,
        MtpModel.__dict__["from_pretrained"],
    ]
    measure(DEEPSEEK, PROMPTS[:1], AcceptanceOptions(new_tokens=4))
    assert before == [
        DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected,
        utils.MTPCandidateGenerator,
        MtpModel.__dict__["from_pretrained"],
    ]


def _changed(tmp_path: Path, **changes: Any) -> Path:
    """The DeepSeek fixture with other values in its config."""
    model = tmp_path / "changed"
    shutil.copytree(DEEPSEEK, model)
    (model / "config.json").write_text(json.dumps(trained.config_of(model) | changes))
    assert read_safetensors(model)
    return model
