"""The speed model: reads counted by hand on a small model, against what DeepSeek publishes on the full one."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.cli.main import call
from mtpconvert.errors import ConfigError, UsageError
from mtpconvert.evidence.reads import ExpertLayer
from mtpconvert.evidence.speed import SpeedReport, cost_of_dropping, expected_tokens, lines_of, speed_report
from mtpconvert.tensors import Inventory, TensorSpec
from tests.support.tiny import write_tiny
from tests.support.tiny_families import CONFIGS, units

ROOT = Path(__file__).resolve().parents[2]


def inventory(config: dict[str, Any], mtp_layers: int, *, copies: bool = True) -> Inventory:
    shapes = {name: shape for unit in units(config, mtp_layers, copies=copies) for name, shape in unit.items()}
    return {name: TensorSpec(name, shape, "BF16") for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def deepseek() -> SpeedReport:
    config = json.loads((ROOT / "mappings/configs/DeepseekV3ForCausalLM.full.json").read_text())
    return speed_report(config, inventory(config, 1))


def test_reads_of_a_small_model_by_hand() -> None:
    """hidden 36, vocabulary 98, 3 layers of which 1 dense (ffn 44), 4 experts of 12, 2 active, 1 shared."""
    report = speed_report(CONFIGS["deepseek_v3"], inventory(CONFIGS["deepseek_v3"], 1))
    # q 28 x 36, norm 28, 64 x 28; kv (18 + 6) x 36, norm 18, 96 x 18; o 36 x 56; two norms of 36
    attention = 28 * 36 + 28 + 64 * 28 + 24 * 36 + 18 + 96 * 18 + 36 * 56 + 2 * 36
    expert = 3 * 12 * 36
    router = 4 * 36 + 4
    trunk, (mtp,) = report.trunk, report.mtp
    assert trunk.dense == 2 * (3 * attention + 3 * 44 * 36 + 2 * router + 36)  # 36: the final norm
    assert trunk.shared == 2 * 2 * expert
    assert trunk.layers == (ExpertLayer(4, 2, 2 * expert),) * 2
    assert trunk.head == 2 * 98 * 36
    assert trunk.embedding_row == 2 * 36
    assert mtp.dense == 2 * (attention + router + 36 * 72 + 3 * 36)  # eh_proj; enorm, hnorm and the head's norm
    assert mtp.layers == (ExpertLayer(4, 2, 2 * expert),)
    assert mtp.head == trunk.head


def test_copies_of_embedding_and_head_cost_nothing_twice() -> None:
    config = CONFIGS["deepseek_v3"]
    assert speed_report(config, inventory(config, 1)) == speed_report(config, inventory(config, 1, copies=False))


def test_experts_stacked_as_megatron_keeps_them_are_read_alike() -> None:
    config = CONFIGS["deepseek_v3"]
    shapes = {
        "embedding.word_embeddings.weight": (98, 36),
        "output_layer.weight": (98, 36),
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (4, 24, 36),
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": (4, 36, 12),
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (24, 36),
        "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight": (4, 24, 36),
        "mtp.layers.0.eh_proj.weight": (36, 72),
    }
    report = speed_report(config, {name: TensorSpec(name, shape, "BF16") for name, shape in shapes.items()})
    assert report.trunk.layers == (ExpertLayer(4, 2, 2 * (24 * 36 + 36 * 12)),)
    assert report.trunk.shared == 2 * 24 * 36
    assert report.trunk.head == 2 * 98 * 36
    assert report.mtp[0].layers == (ExpertLayer(4, 2, 2 * 24 * 36),)
    assert report.mtp[0].dense == 2 * 36 * 72


def test_a_tied_head_is_the_embedding() -> None:
    report = speed_report(CONFIGS["qwen2"], inventory(CONFIGS["qwen2"], 0))
    assert report.trunk.head == 2 * 98 * 36
    assert (report.mtp, report.speed_up(0.9), report.draft_share) == ((), 1.0, 0.0)
    assert "no MTP layer" in "\n".join(lines_of(report))


def test_distinct_experts() -> None:
    layer = ExpertLayer(experts=4, active=2, nbytes=1)
    assert layer.distinct(1) == 2
    assert layer.distinct(2) == 3  # the second token finds half of its two among the first's
    assert layer.distinct(1000) == pytest.approx(4)


def test_deepseek_v3_reads_what_deepseek_says_it_activates(deepseek: SpeedReport) -> None:
    """README_WEIGHTS.md: 36.7 B active with embedding and head, 2.4 B in MTP with both; counts rounded there, and the
    embedding of 0.9 B is read a row at a time here."""
    embedding = 129280 * 7168
    assert deepseek.trunk.nbytes(1) / 2 + embedding == pytest.approx(36.7e9, rel=0.03)
    assert deepseek.mtp[0].nbytes(1) / 2 + embedding == pytest.approx(2.4e9, rel=0.07)


def test_deepseek_v3_has_the_mtp_parameters_that_deepseek_says() -> None:
    config = json.loads((ROOT / "mappings/configs/DeepseekV3ForCausalLM.full.json").read_text())
    unit = units(config, 1, copies=False)[-1]
    mtp = sum(prod(shape) for name, shape in unit.items() if ".layers.61." in name)
    assert mtp == pytest.approx(11.5e9, rel=0.01)  # "11.5B unique parameters"


def test_deepseek_v3_is_as_much_faster_as_deepseek_says_where_batches_are_large(deepseek: SpeedReport) -> None:
    """Technical report, section 5.4.3: 85 to 90 % of second tokens accepted, 1.8 times the tokens per second."""
    low = deepseek.speed_up(0.85, batch=512)
    assert low == pytest.approx(1.8, abs=0.05)
    # one sequence alone: the second token's experts have to be read as well
    assert deepseek.speed_up(0.85, batch=1) < 1.25


def test_the_formula(deepseek: SpeedReport) -> None:
    trunk, draft = deepseek.trunk, deepseek.mtp[0]
    expected = (1 + 0.8 + 0.64) * trunk.nbytes(4) / (2 * draft.nbytes(4) + trunk.nbytes(12) + 0.1 * trunk.nbytes(4))
    assert deepseek.speed_up(0.8, draft_length=2, batch=4, overhead=0.1) == pytest.approx(expected)


@pytest.mark.parametrize(("rate", "length", "tokens"), [(0.0, 3, 1), (1.0, 3, 4), (0.5, 2, 1.75)])
def test_expected_tokens(rate: float, length: int, tokens: float) -> None:
    assert expected_tokens(rate, length) == tokens


def test_no_probability_is_refused() -> None:
    with pytest.raises(UsageError):
        expected_tokens(1.2, 1)


def test_a_config_that_does_not_say_how_many_experts_are_active_is_refused() -> None:
    config = {key: value for key, value in CONFIGS["deepseek_v3"].items() if key != "num_experts_per_tok"}
    with pytest.raises(ConfigError, match="active experts"):
        speed_report(config, inventory(CONFIGS["deepseek_v3"], 1))


def test_what_dropping_costs_is_said(deepseek: SpeedReport) -> None:
    said = cost_of_dropping(deepseek)
    assert "55%" in said and "85% acceptance" in said  # 1 / 1.82
    json.dumps(deepseek.document())


def test_inspect_prints_it_for_either_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Megatron checkpoint reads what the Hugging Face one reads, its padded vocabulary (128 rows of 98) apart."""
    model = write_tiny("deepseek_v3", tmp_path / "hf")
    assert call(["hf2mcore", str(model), str(tmp_path / "mcore"), "--audit", "none"]) == 0
    capsys.readouterr()
    found = []
    for path in (model, tmp_path / "mcore"):
        assert call(["inspect", str(path), "--speed", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["speed"]["bytes_per_token"])
    for reads in (*(side["trunk"] for side in found), *(side["mtp"][0] for side in found)):
        del reads["total"], reads["head"]
    assert found[0] == found[1]
    assert call(["inspect", str(model), "--speed"]) == 0
    assert "without MTP, decoding is modelled at" in capsys.readouterr().out
