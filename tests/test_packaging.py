"""What a user installs: the source distribution, the wheel made of it, and the tool run from that wheel, elsewhere,
with nothing but its runtime dependencies around it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.tiny import sha256_tree, write_tiny

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAPPINGS = sorted(path.relative_to(ROOT / "mappings").as_posix() for path in (ROOT / "mappings").rglob("*.*"))


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, with no path of this checkout in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel): ``build`` makes the wheel from the sdist, so what the sdist lacks the wheel lacks."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment that holds the wheel and what it asks for."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", environment, cwd=environment.parent)
    run(environment / "bin/python", "-m", "pip", "install", "--quiet", built[1], cwd=environment.parent)
    return environment / "bin"


def test_the_wheel_holds_the_package_its_mappings_and_the_licence(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mtpconvert").rglob("*.py")}
    assert len(MAPPINGS) >= 15
    assert package | {f"mtpconvert/_mappings/{name}" for name in MAPPINGS} | {"mtpconvert/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names} == {"mtpconvert", f"mtpconvert-{PROJECT['version']}.dist-info"}


def test_the_sdist_holds_what_the_wheel_is_built_of(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *(f"mappings/{name}" for name in MAPPINGS)} <= names


def test_the_environment_is_bare(installed: Path) -> None:
    names = run(installed / "python", "-m", "pip", "list", "--format=freeze", cwd=installed)
    present = {line.partition("==")[0].lower() for line in names.split()}
    assert {"mtpconvert", "click", "numpy", "pyyaml", "rich"} <= present
    assert present & {"torch", "transformers", "megatron-core", "safetensors"} == set()


def test_it_runs_from_anywhere(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import mtpconvert; print(mtpconvert.__file__)", cwd=tmp_path)
    assert not Path(where.strip()).is_relative_to(ROOT)
    assert run(installed / "mtpconvert", "--version", cwd=tmp_path).split()[-1] == PROJECT["version"]
    listed = run(installed / "mtpconvert", "mappings", "list", cwd=tmp_path)
    architectures = sorted(name.removesuffix(".toml") for name in MAPPINGS if "/" not in name)
    assert sorted(line.split()[0] for line in listed.splitlines()) == architectures
    checked = run(installed / "mtpconvert", "mappings", "check", cwd=tmp_path)
    assert "46,183 HF and 925 Megatron tensors; 682,636,487,424 elements a side" in checked
    assert sum("a bijection" in line for line in checked.splitlines()) == 2 * len(architectures)


def test_it_converts_both_ways_and_audits(installed: Path, tmp_path: Path) -> None:
    tool = installed / "mtpconvert"
    write_tiny("deepseek_v3", tmp_path / "hf")
    run(tool, "hf2mcore", "hf", "mcore", cwd=tmp_path)
    run(tool, "mcore2hf", "mcore", "back", cwd=tmp_path)
    assert sha256_tree(tmp_path / "back") == sha256_tree(tmp_path / "hf")
    run(tool, "audit", "hf", "mcore", cwd=tmp_path)
