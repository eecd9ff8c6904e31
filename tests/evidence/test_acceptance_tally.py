"""Counting and statistics of acceptance, prompts and the plot: hand arithmetic and textbook values; no torch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mtpconvert.errors import UsageError
from mtpconvert.evidence.acceptance import (
    AcceptanceOptions,
    AcceptanceReport,
    Change,
    PromptResult,
    changes,
    dropped,
    length_bucket,
    length_buckets,
)
from mtpconvert.evidence.acceptance_report import document, lines
from mtpconvert.evidence.acceptance_run import Divergence
from mtpconvert.evidence.acceptance_tally import Tally, change_interval, interval, total, wilson
from mtpconvert.evidence.plot import acceptance_svg
from mtpconvert.evidence.prompts import Prompt, built_in, read_prompts


def tally(length: int, *accepted: int) -> Tally:
    result = Tally(length)
    for count in accepted:
        result.add(count)
    return result


def test_rates_by_hand() -> None:
    """Four drafts of two tokens, of which 2, 1, 0 and 2 were accepted."""
    counted = tally(2, 2, 1, 0, 2)
    assert counted.rate == 5 / 8
    assert counted.by_position == [3 / 4, 2 / 3]
    assert counted.tokens_per_step == 1 + 5 / 4
    assert total([counted, tally(2, 0)], 2).rate == 5 / 10


def test_nothing_drafted_is_no_rate() -> None:
    assert (Tally(2).rate, Tally(2).tokens_per_step, Tally(2).by_position) == (None, None, [None, None])
    assert (wilson(0, 0), interval([Tally(1)])) == (None, None)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe (1998), Statistics in Medicine 17, 857-872, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_over_prompts_has_its_level() -> None:
    """Of 60 samples of 40 prompts with a rate of 0.7 each, the interval holds 0.7 in about 57."""
    chooser = random.Random(1)
    held = 0
    for seed in range(60):
        prompts = [tally(1, *(int(chooser.random() < 0.7) for _ in range(12))) for _ in range(40)]
        low, high = interval(prompts, seed) or (1.0, 0.0)
        held += low <= 0.7 <= high
    assert 52 <= held <= 60


def test_equal_checkpoints_do_not_change_at_all() -> None:
    prompts = [tally(1, 1, 0, 1), tally(1, 0, 0), tally(1, 1)]
    assert change_interval(prompts, prompts) == (0.0, 0.0)


def test_a_pair_of_prompts_is_resampled_together() -> None:
    """Each prompt drops from 10/10 to 5/10: however prompts differ, the change is -0.5 in every resample."""
    assert change_interval([tally(1, *[1] * 5, *[0] * 5)] * 4, [tally(1, *[1] * 10)] * 4) == (-0.5, -0.5)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(-0.01, 0.01, None), (-0.30, -0.20, "fell by more than"), (-0.05, 0.03, "is not shown")],
)
def test_the_threshold_fails_unless_a_drop_is_ruled_out(low: float, high: float, said: str | None) -> None:
    sentences = dropped([Change("free_greedy", 0.6, 0.62, (low, high))], max_drop=0.02)
    assert [said in sentence for sentence in sentences] == ([] if said is None else [True])
    assert dropped([Change("free_sampled", 0.1, 0.9, (low, high))], max_drop=0.02) == []


def test_output_lengths_fall_into_buckets() -> None:
    assert length_buckets() == ["1-16", "17-64", "65-256", "257+"]
    assert [length_bucket(at) for at in (0, 15, 16, 63, 64, 255, 256, 9999)] == [
        "1-16", "1-16", "17-64", "17-64", "65-256", "65-256", "257+", "257+",
    ]  # fmt: skip


def report(path: str, *, dtype: str = "float32", apart: Divergence | None = None) -> AcceptanceReport:
    """Two prompts of two kinds; two MTP layers."""
    results = [
        PromptResult(
            kind,
            {
                "forced_greedy": {"": tally(2, 2, 1, 0)},
                "forced_sampled": {"": Tally(2, 3, [2.4, 1.2])},
                "free_greedy": {"1-16": tally(2, 2, 0), "17-64": tally(2, 1)},
                "free_sampled": {"1-16": tally(2, 1)},
            },
            20,
            apart,
        )
        for kind in ("code", "<prose>")
    ]
    return AcceptanceReport(Path(path), "some_model", 2, 2, AcceptanceOptions(dtype=dtype), "5.24.0", results)


def test_the_document_holds_what_was_counted() -> None:
    one = report("here")
    result = document(one, report("base"), changes(one, report("base")))
    free = result["modes"]["free_greedy"]
    assert free["rate"] == 3 / 6
    assert free["by_position"][0]["rate"] == 2 / 3
    assert free["by_kind"]["code"]["rate"] == 3 / 6
    assert free["by_output_length"]["17-64"]["rate"] == 1 / 2
    assert free["by_output_length"]["257+"]["rate"] is None
    assert result["modes"]["forced_sampled"]["rate"] == pytest.approx(3.6 / 6)
    assert result["against"]["change"][0]["drop"] == 0
    assert json.loads(json.dumps(result)) is not None
    text = "\n".join(lines(result))
    assert "equals greedy output" in text and "against base" in text and "50.0%" in text


def test_a_divergence_fails_in_float32_and_is_told_in_bfloat16() -> None:
    apart = Divergence(at=7, plain=1, speculative=2, gap=0.001)
    assert report("x").failures == []
    assert "differs from greedy" in report("x", apart=apart).failures[0]
    rounded = report("x", dtype="bfloat16", apart=apart)
    assert rounded.failures == []
    assert "token 7: greedy 1, speculative 2, gap between the two best logits 0.001" in "\n".join(
        lines(document(rounded, None, []))
    )


def test_the_plot_is_svg_with_a_bar_for_each_figure() -> None:
    one = report("here")
    root = ElementTree.fromstring(acceptance_svg(document(one, None, [])))
    space = "{http://www.w3.org/2000/svg}"
    hints = [title.text for bar in root.iter(f"{space}rect") if (title := bar.find(f"{space}title")) is not None]
    # 2 positions and 2 kinds in 4 modes; two lengths of greedy output and one of sampled
    assert len(hints) == 2 * 4 + 2 * 4 + 3
    assert "free generation, greedy, <prose>: 50.0%" in hints


def test_built_in_prompts_come_in_four_kinds_in_turn() -> None:
    prompts = built_in()
    assert len(prompts) == 24
    assert [prompt.kind for prompt in prompts[:4]] == ["code", "prose", "structured", "dialogue"]
    assert all(prompt.text for prompt in prompts)


def test_prompts_from_files(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("one\ntwo\n\n\nthree\n")
    assert read_prompts(plain) == [Prompt("plain", "one\ntwo"), Prompt("plain", "three")]
    lined = tmp_path / "a.jsonl"
    lined.write_text('{"kind": "x", "text": "one"}\n\n{"tokens": [3, 4]}\n')
    assert read_prompts(lined) == [Prompt("x", "one"), Prompt("plain", "", (3, 4))]


@pytest.mark.parametrize(
    ("content", "said"), [("{", "line 1"), ('{"text": 3}', "line 1"), ('{"tokens": [-1]}', "line 1"), ("", "a.jsonl")]
)
def test_bad_prompts_are_refused_by_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_prompts(file)
    assert said in str(caught.value)
