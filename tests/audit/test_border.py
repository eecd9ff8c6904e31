"""The auditor shares no code and no mapping file with the converter; ``--level headers`` imports no heavy package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny

PACKAGE = Path(__file__).parents[2] / "mtpconvert"
FILES = sorted((PACKAGE / "audit").rglob("*.py"))
ALLOWED = ("mtpconvert.audit", "mtpconvert.tensors", "mtpconvert.errors", "mtpconvert.garbage")
FORBIDDEN = {"torch", "transformers", "megatron", "safetensors", "pickle5", "dill", "cloudpickle"}


def imports(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, wherever in it."""
    package = ["mtpconvert", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def foreign(name: str) -> bool:
    if name in ("mtpconvert", "mtpconvert.__version__") or name.split(".")[0] != "mtpconvert":
        return name.split(".")[0] in FORBIDDEN
    return not any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_auditor_imports_nothing_of_the_converter(path: Path) -> None:
    assert [name for name in imports(path) if foreign(name)] == []


def test_the_auditor_names_no_mapping_file() -> None:
    for path in FILES:
        constants = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        assert not [c for c in constants if isinstance(c, str) and ("_mappings" in c or c.endswith(".toml"))], path
        calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [
            c for c in calls if c in ("__import__", "importlib.import_module", "import_module", "eval", "exec")
        ], path


def test_the_halves_know_nothing_of_each_other() -> None:
    roles = PACKAGE / "audit" / "roles"
    for path in roles.glob("*.py"):
        other = {"huggingface": "megatron", "megatron": "huggingface"}.get(path.stem.split("_")[0])
        assert other is None or not [name for name in imports(path) if f"roles.{other}" in name], path


def test_converters_do_not_import_the_auditor() -> None:
    for part in ("mapping", "stores", "convert", "codecs"):
        for path in (PACKAGE / part).rglob("*.py"):
            assert not [name for name in imports(path) if name.startswith("mtpconvert.audit")], path


def test_the_border_test_sees_a_breach(tmp_path: Path) -> None:
    """A planted import is found in every form."""
    planted = [
        "import mtpconvert.mapping.load",
        "from mtpconvert import stores",
        "from mtpconvert.convert import x",
        "def f():\n    import torch",
    ]
    path = PACKAGE / "audit" / "planted.py"
    for text in planted:
        names = list(imports_of(text))
        assert [name for name in names if foreign(name)], text
    assert not path.exists()


def imports_of(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("level", ["headers", "bits"])
def test_neither_level_imports_torch_or_transformers(tmp_path: Path, level: str) -> None:
    left = write_tiny("deepseek_v3", tmp_path / "left")
    code = (
        "import sys; from mtpconvert.cli.main import call;"
        f"code = call(['audit', '--level', '{level}', {str(left)!r}, {str(left)!r}, '--format', 'json']);"
        "heavy = [m for m in ('torch', 'transformers', 'megatron', 'safetensors') if m in sys.modules];"
        "sys.exit(99 if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stdout + done.stderr
