"""Every command that README.md shows is run, in a directory with the checkpoints that it speaks of."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.support.tiny import sha256_tree, write_tiny

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Shown, but run elsewhere: by whom.
ELSEWHERE = {
    "make demo": "test_make_demo",
    "make test": "this run; that the target is there is checked below",
    "pip install .": "tests/test_packaging.py, from the wheel in an empty environment",
}


def shown(text: str) -> Iterator[str]:
    """Commands of the fenced ``bash`` blocks, comments and blank lines left out, continued lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                yield line.strip()


COMMANDS = list(shown(README))
TOOL = [command for command in COMMANDS if command not in ELSEWHERE]


def tool(command: str, cwd: Path) -> None:
    words = shlex.split(command)
    assert words[0] == "mtpconvert", f"README shows '{command}', and no test knows how to run it"
    done = subprocess.run(
        [sys.executable, "-m", "mtpconvert", *words[1:]],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3, and DeepSeek-V3-trained: other numbers under a training's name, without the assets that only
    hf2mcore writes."""
    folder = tmp_path_factory.mktemp("readme")
    write_tiny("deepseek_v3", folder / "DeepSeek-V3")
    write_tiny("deepseek_v3", folder / "other-numbers", fill="normal", seed=1)
    tool("mtpconvert hf2mcore other-numbers DeepSeek-V3-trained --iteration 500", folder)
    shutil.rmtree(folder / "DeepSeek-V3-trained" / "hf_assets")
    return folder


def test_the_commands_run_in_the_order_shown(workplace: Path) -> None:
    for command in TOOL:
        tool(command, workplace)
    assert sha256_tree(workplace / "DeepSeek-V3-again") == sha256_tree(workplace / "DeepSeek-V3")
    tuned, numbers = workplace / "DeepSeek-V3-tuned", workplace / "other-numbers"
    assert {name: digest for name, digest in sha256_tree(tuned).items() if name.endswith(".safetensors")} == {
        name: digest for name, digest in sha256_tree(numbers).items() if name.endswith(".safetensors")
    }


def test_the_daily_commands_are_shown() -> None:
    daily = {"hf2mcore", "mcore2hf", "audit", "inspect", "plan", "roundtrip", "slice", "mappings"}
    assert daily <= {command.split()[1] for command in TOOL}


def test_the_first_commands_are_make_demo_and_make_test() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    assert re.search(rf"^{command.split()[1]}:", MAKEFILE, re.MULTILINE)


def test_make_demo(tmp_path: Path) -> None:
    """In a copy of what git tracks, from nothing: it makes its environment itself."""
    copy = tmp_path / "copy"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for file in filter(None, files):
        if (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy / file)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={sys.executable}"],
        cwd=copy,
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PYTHONPATH")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to those of demo/hf, by SHA-256" in done.stdout
    assert "mtp-layer-missing" in done.stdout
    assert sha256_tree(copy / "demo/back") == sha256_tree(copy / "demo/hf")


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?://)([^)#]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).is_file()


def test_the_command_line_is_documented_whole() -> None:
    """docs/command-line.md names every option of every command and every exit code."""
    from mtpconvert import errors
    from mtpconvert.cli.main import COMMANDS as OFFERED
    from mtpconvert.cli.main import main

    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in OFFERED]
    commands += [one for group in commands if isinstance(group, click.Group) for one in group.commands.values()]
    options = {option for command in commands if command for param in command.params for option in param.opts}
    missing = sorted(option for option in options if option.startswith("--") and f"`{option}" not in text)
    assert len(options) > 20
    assert missing == []
    codes = {one.exit_code for one in vars(errors).values() if isinstance(one, type)} | {0, 130}
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes
