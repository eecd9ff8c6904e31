"""Waivers: by code, tensor and reason; stale ones are findings; waived findings stay in every report."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path

import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.report import FORMATS, render
from mtpconvert.audit.waivers import load_waivers
from mtpconvert.errors import UsageError
from tests.support.sabotage import drop
from tests.support.tiny import write_tiny

TEXT = """
[[waiver]]
code = "mtp-tensor-missing"
tensor = "model.layers.3.*"
reason = "dropped on purpose <17>"

[[waiver]]
code = "mtp-layer-missing"
tensor = "model.layers.3.*"
reason = "dropped on purpose <17>"
expires = 2030-01-31

[[waiver]]
code = "mtp-none-found"
reason = "the config follows"
"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    left = write_tiny("deepseek_v3", tmp_path / "left")
    shutil.copytree(left, tmp_path / "right")
    drop(lambda name: name.startswith("model.layers.3."))(tmp_path / "right")
    return left, tmp_path / "right"


def waivers_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    return path


def test_waived_findings_stay_in_every_report(pair: tuple[Path, Path], tmp_path: Path) -> None:
    waivers = load_waivers(waivers_of(tmp_path, TEXT))
    report = audit(*pair, waivers=waivers, today=date(2029, 1, 1))
    assert report.verdict() == "pass", [f.message for f in report.failing()]
    waived = [f for f in report.findings if f.waived_by]
    assert len(waived) == 34
    for name in FORMATS:
        text = render(report, name)
        assert "mtp-layer-missing" in text and "dropped on purpose" in text, name


def test_an_expired_waiver_waives_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    report = audit(*pair, waivers=load_waivers(waivers_of(tmp_path, TEXT)), today=date(2030, 2, 1))
    assert {f.code for f in report.failing()} == {"mtp-layer-missing", "waiver-expired"}


def test_a_waiver_that_matches_nothing_is_a_finding(tmp_path: Path) -> None:
    left = write_tiny("qwen3", tmp_path / "left")
    report = audit(left, left, waivers=load_waivers(waivers_of(tmp_path, TEXT)), today=date(2029, 1, 1))
    assert [f.code for f in report.failing()] == ["waiver-unused"] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[waiver]]\ncode = 'x'", "needs a code and a reason"),
        ("[[waiver]]\ncode = 'x'\nreason = ' '", "needs a code and a reason"),
        ("[[waiver]]\ncode = 'x'\nreason = 'y'\nwhy = 1", "unknown keys ['why']"),
        ("[[waiver]]\ncode = 'x'\nreason = 'y'\ntensor = 3", "tensor must be"),
        ("[[waiver]]\ncode = 'x'\nreason = 'y'\nexpires = '2030'", "expires must be"),
        ("strict = false", "nothing else"),
        ("waiver = [1]", "a waiver is a table"),
        ("[[waiver", "cannot be read"),
    ],
)
def test_a_bad_waiver_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        load_waivers(waivers_of(tmp_path, text))
    assert says in str(error.value) and "code, tensor, key, reason, expires" in str(error.value.next_step)
