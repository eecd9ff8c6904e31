"""Reports of a clean and of a harmed checkpoint in every format, and the command's exit codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.codes import CODES
from mtpconvert.audit.report import render
from mtpconvert.audit.report_model import Report
from mtpconvert.cli.main import call
from tests.support.json_schema import faults
from tests.support.sabotage import change_tensor, drop
from tests.support.tiny import write_tiny

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "audit-report.schema.json").read_text())
BAD = "model.layers.3.eh_proj.weight"


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sides")
    left = write_tiny("deepseek_v3", root / "left")
    right = root / "right | <b> *x*"
    shutil.copytree(left, right)
    change_tensor(BAD, lambda x: np.roll(x, x.shape[1] // 2, 1))(right)
    drop(lambda name: name == "model.layers.3.enorm.weight")(right)
    return left, right


@pytest.fixture(scope="module")
def clean(sides: tuple[Path, Path]) -> Report:
    return audit(sides[0], shutil.copytree(sides[0], sides[0].with_name("copy")))


@pytest.fixture(scope="module")
def harmed(sides: tuple[Path, Path]) -> Report:
    return audit(*sides)


@pytest.mark.parametrize("level", ["headers", "bits"])
def test_json_is_what_its_schema_says(sides: tuple[Path, Path], level: str) -> None:
    for pair in (sides, (sides[0], sides[0])):
        document = json.loads(render(audit(*pair, level=level), "json"))
        assert faults(document, SCHEMA, SCHEMA) == []
    document["verdict"], document["mtp"]["left"]["layers"], document["extra"] = "maybe", -1, 1
    assert len(faults(document, SCHEMA, SCHEMA)) == 3


def test_the_ledger_counts(harmed: Report, clean: Report) -> None:
    (row,) = harmed.as_json()["mtp"]["ledger"]
    # 788 tensors with 256 experts are 32 with 4: 256 - 4 = 252 experts of 3 tensors fewer
    assert (row["expected"], row["left"], row["right"], row["equal"]) == (788 - 3 * 252, 32, 31, 30)
    assert row["prefix"] == "model.layers.3."
    assert "1 of them not equal" in row["sentence"]
    assert clean.as_json()["mtp"]["ledger"][0]["equal"] == 32
    assert clean.as_json()["checked"]["bytes"] == clean.as_json()["right"]["bytes"]


def test_text_is_short_when_clean_and_says_mtp_first(clean: Report, harmed: Report) -> None:
    text = render(clean, "text")
    assert len(text.splitlines()) <= 10 and "PASS" in text
    lines = render(harmed, "text").splitlines()
    mtp, findings = (next(n for n, line in enumerate(lines) if line.startswith(word)) for word in ("MTP", "Findings"))
    assert mtp < findings and lines[-1].startswith("FAIL")
    assert any("halves exchanged" in line for line in lines)


def test_thousands_of_findings_are_one_line(sides: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(sides[0], tmp_path / "right")
    drop(lambda name: name.startswith("model.layers.3."))(tmp_path / "right")
    text = render(audit(sides[0], tmp_path / "right"), "text")
    assert len(text.splitlines()) < 20
    assert "32 times" in text


def test_findings_without_a_tensor_name_their_files_and_keys(sides: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_tiny("llama", tmp_path / "right")
    for name in ("LICENSE", "README.md", "tokenizer.json", "chat_template.jinja"):
        (other / name).unlink()
    report = audit(sides[0], other, level="headers")
    text = render(report, "text")
    assert "4 times: LICENSE, README.md, chat_template.jinja, tokenizer.json; first: LICENSE is not on" in text
    keys = [found.detail["key"] for found in report.findings if found.code == "config-changed"]
    assert {"architectures", "hidden_size"} <= set(keys) and f"{len(keys)} times: {', '.join(keys[:20])}" in text
    assert "?, ?" not in text + render(report, "markdown")


def test_a_finding_of_both_sides_says_which(sides: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(sides[0], tmp_path / "one")
    config = json.loads((sides[0] / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    report = audit(tmp_path / "one", tmp_path / "one", level="headers")
    for side in ("left", "right"):
        assert re.search(rf"error +{side} +mtp-count-mismatch ", render(report, "text"))
        assert f"| error | {side} | `mtp-count-mismatch` |" in render(report, "markdown")


def test_junit_counts_agree_with_its_cases(harmed: Report, clean: Report) -> None:
    suite = ElementTree.fromstring(render(harmed, "junit")).find("testsuite")
    assert suite is not None
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) >= 3
    assert any(BAD in (failure.text or "") for failure in suite.iter("failure"))
    good = ElementTree.fromstring(render(clean, "junit")).find("testsuite")
    assert good is not None and good.attrib["failures"] == "0" and int(good.attrib["tests"]) > 0


def test_sarif_results_point_to_their_rules(harmed: Report) -> None:
    document = json.loads(render(harmed, "sarif"))
    (run,) = document["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert document["version"] == "2.1.0"
    assert len(run["results"]) == len(harmed.findings)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert re.fullmatch(r"[^ <>|]+", result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])


def test_markdown_tables_hold(harmed: Report) -> None:
    text = render(harmed, "markdown")
    rows = [line for line in text.splitlines() if line.startswith("| error")]
    assert rows and all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    assert "### MTP" in text and "| 0 | 32 | 32 | 31 | 30 |" in text


def test_exit_codes(sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = map(str, sides)
    assert call(["audit", left, left]) == 0
    assert call(["audit", left, right, "--format", "json"]) == 1
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["verdict"] == "fail"
    assert call(["audit", left, str(tmp_path / "nowhere")]) == 6
    assert call(["audit", left, left, "--level", "some"]) == 2
    (tmp_path / "waivers.toml").write_text("[[waiver]]\ncode = 1")
    assert call(["audit", left, left, "--waivers", str(tmp_path / "waivers.toml")]) == 2
    assert call(["audit", left, left, "--format", "html", "--output", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert call(["audit", left, str(tmp_path / "nowhere"), "--output", str(tmp_path / "none" / "r.html")]) == 11
    assert "the folder for this file does not exist" in capsys.readouterr().err
    (tmp_path / "ro").symlink_to("/proc/self/status")
    assert call(["audit", left, left, "--output", str(tmp_path / "ro")]) == 11
    assert "ro cannot be written" in capsys.readouterr().err


def test_every_code_has_its_entry_in_the_docs_and_is_used() -> None:
    page = (DOCS / "findings.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^### `([a-z0-9-]+)` \((error|warning|note)\)$", page, re.M))
    assert entries == {code: entry.severity for code, entry in CODES.items()}
    for section in re.split(r"^### ", page, flags=re.M)[1:]:
        assert len([p for p in section.split("\n\n")[1:] if p.strip()]) >= 1, section
    source = "".join(path.read_text() for path in (DOCS.parent / "mtpconvert" / "audit").rglob("*.py"))
    unused = [code for code in CODES if source.count(f'"{code}"') < 2]
    assert unused == []
