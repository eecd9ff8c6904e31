"""Use in CI: the GitHub action's own script, the pre-commit hook, the worked examples, the library call."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mtpconvert
from mtpconvert.cli.main import call
from mtpconvert.errors import CheckpointError
from tests.support.sabotage import change_tensor
from tests.support.tiny import write_tiny

ROOT = Path(__file__).parents[2]


def yaml_of(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint, an equal one, one with a changed MTP tensor; in a folder whose name a shell would trip over."""
    root = tmp_path_factory.mktemp("ci") / "it's $(a) folder"
    left = write_tiny("deepseek_v3", root / "left")
    equal, harmed = Path(shutil.copytree(left, root / "equal")), Path(shutil.copytree(left, root / "harmed"))
    change_tensor("model.layers.3.eh_proj.weight", lambda x: x[::-1])(harmed)
    return left, equal, harmed


# ---- the action


def action() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml_of((ROOT / "action.yml").read_text(encoding="utf-8"))
    return loaded


def run_action(tmp: Path, **inputs: str) -> tuple[int, dict[str, str], str]:
    """Exit code, outputs and job summary of the audit step, its inputs filled in as GitHub does."""
    step = next(step for step in action()["runs"]["steps"] if step.get("id") == "audit")
    defaults = {name: str(entry.get("default", "")) for name, entry in action()["inputs"].items()}
    values = defaults | {"sarif-file": str(tmp / "out.sarif")} | inputs
    env = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: values[m[1]], text)
        for name, text in step["env"].items()
    }
    assert "${{" not in step["run"], "inputs may not become text of the script"
    files = {name: tmp / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        | {"RUNNER_TEMP": str(tmp), "GITHUB_ACTION_PATH": str(ROOT)}
        | {name: str(file) for name, file in files.items()}
        | env,
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    return done.returncode, outputs, files["GITHUB_STEP_SUMMARY"].read_text()


def test_the_action_passes_and_fails(sides: tuple[Path, Path, Path], tmp_path: Path) -> None:
    left, equal, harmed = map(str, sides)
    code, outputs, summary = run_action(tmp_path, left=left, right=equal)
    assert (code, outputs["verdict"]) == (0, "pass")
    assert summary.startswith("## Checkpoint audit: pass")
    code, outputs, summary = run_action(tmp_path, left=left, right=harmed)
    assert (code, outputs["verdict"]) == (1, "fail")
    assert "`bytes-differ`" in summary and "eh_proj" in summary
    sarif = json.loads(Path(outputs["sarif-file"]).read_text())
    assert [result["ruleId"] for result in sarif["runs"][0]["results"]] == ["bytes-differ"]
    code, outputs, _ = run_action(tmp_path, left=left, right=harmed, level="headers")
    assert (code, outputs["verdict"]) == (0, "pass")


def test_the_actions_waivers_and_errors(sides: tuple[Path, Path, Path], tmp_path: Path) -> None:
    left, _, harmed = map(str, sides)
    waivers = tmp_path / "waivers.toml"
    waivers.write_text('[[waiver]]\ncode = "bytes-differ"\ntensor = "model.layers.3.*"\nreason = "known"\n')
    code, outputs, summary = run_action(tmp_path, left=left, right=harmed, waivers=str(waivers))
    assert (code, outputs["verdict"]) == (0, "pass") and "waived: known" in summary
    code, outputs, summary = run_action(tmp_path, left=left, right=str(tmp_path / "nowhere"))
    assert (code, outputs, summary) == (6, {"verdict": "error"}, "")
    assert run_action(tmp_path, left=left, right=left, trained="true")[0] == 1


def test_the_action_is_a_composite_one() -> None:
    """The keys that GitHub asks for (docs.github.com, metadata syntax): each input said, each script with its shell."""
    table = action()
    assert set(table) == {"name", "description", "inputs", "outputs", "runs"}
    assert table["runs"]["using"] == "composite"
    assert [name for name, entry in table["inputs"].items() if entry.get("required")] == ["left", "right"]
    assert all(entry["description"] for part in ("inputs", "outputs") for entry in table[part].values())
    steps = table["runs"]["steps"]
    assert all(("uses" in step) != ("run" in step and step["shell"] == "bash") for step in steps)
    used = set(re.findall(r"inputs\.([\w-]+)", json.dumps(steps)))
    assert used == set(table["inputs"])
    assert re.findall(r"steps\.audit\.outputs\.([\w-]+)", json.dumps(table["outputs"])) == list(table["outputs"])


# ---- the hook and the examples


def test_the_hook_runs_what_it_says(sides: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    left, equal, harmed = map(str, sides)
    (hook,) = yaml_of((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {"id", "name", "entry", "language"} <= set(hook)  # what pre-commit's manifest must have
    assert hook["pass_filenames"] is False
    command, *words = hook["entry"].split()
    scripts = re.search(r"\[project\.scripts\]\n(\w+) = ", (ROOT / "pyproject.toml").read_text())
    assert scripts is not None and command == scripts[1]
    assert call([*words, left, equal, "--level", "headers"]) == 0
    assert call([*words, left, harmed]) == 1
    for name in (
        "a/model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "x/config.json",
        "r/__0_0.distcp",
    ):
        assert re.search(hook["files"], name), name
    for name in ("README.md", "generation_config.json", "x.metadata.py", "tokenizer.json"):
        assert not re.search(hook["files"], name), name


def test_the_examples_use_what_there_is() -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    workflow, hooks = (yaml_of(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S))
    steps = workflow["jobs"]["audit"]["steps"]
    (step,) = [step for step in steps if "mtpconvert" in step["uses"]]
    assert set(step["with"]) <= set(action()["inputs"])
    assert set(re.findall(r"steps\.audit\.outputs\.([\w-]+)", json.dumps(steps))) <= set(action()["outputs"])
    (hook,) = yaml_of((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hooks["repos"][0]["hooks"][0]["id"] == hook["id"]


# ---- several reports, and the library call


def test_several_reports_of_one_audit(
    sides: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, _, harmed = map(str, sides)
    wanted = {name: tmp_path / f"r.{name}" for name in ("json", "markdown", "junit")}
    options = [word for name, file in wanted.items() for word in ("--report", f"{name}={file}")]
    assert call(["audit", left, harmed, *options]) == 1
    assert "bytes-differ" in capsys.readouterr().out
    assert json.loads(wanted["json"].read_text())["verdict"] == "fail"
    assert all("bytes-differ" in file.read_text() for file in wanted.values())
    for wrong in ("pdf=x", "json", "json="):
        assert call(["audit", left, left, "--report", wrong]) == 2
        assert "FORMAT=FILE" in capsys.readouterr().err
    assert call(["audit", left, left, "--report", f"json={tmp_path}/none/r"]) == 11


def test_the_library_call(sides: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from mtpconvert.audit import Report, Waiver

    left, equal, harmed = sides
    report = mtpconvert.audit(left, str(equal))
    assert isinstance(report, Report) and report.verdict() == "pass"
    assert mtpconvert.audit(left, harmed, level="headers").verdict() == "pass"
    assert mtpconvert.audit(left, harmed).verdict() == "fail"
    waiver = Waiver("bytes-differ", "model.layers.3.eh_proj.weight", "known")
    assert mtpconvert.audit(left, harmed, waivers=(waiver,)).verdict() == "pass"
    assert "nothing-changed" in {f.code for f in mtpconvert.audit(left, left, trained=True).findings}
    with pytest.raises(CheckpointError):
        mtpconvert.audit(left, left / "nowhere")
    assert capsys.readouterr().out == ""


def test_the_package_is_loaded_when_first_asked_for() -> None:
    code = (
        "import sys, mtpconvert; assert 'mtpconvert.audit' not in sys.modules and callable(mtpconvert.audit);"
        "from mtpconvert.audit.api import audit; import mtpconvert.audit.report; assert callable(mtpconvert.audit);"
        "assert not hasattr(mtpconvert, 'nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
