"""Who may import whom, as docs/architecture.md draws it, read from the syntax trees; and what commands import at run
time. The border around the auditor is what makes its word worth something: it shares nothing with the converter
(``tests/audit/test_border.py`` goes further: no mapping file, and nothing between its own two halves)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mtpconvert"
SHARED = {"errors", "garbage", "tensors", ""}  # "": mtpconvert/__init__.py
ROOMS = {
    "__init__": {"audit"},  # `from mtpconvert import audit` is the library call
    "__main__": {"cli"},
    "errors": set(),
    "garbage": set(),
    "tensors": set(),
    "mapping": {"mapping"},
    "stores": {"stores"},
    "codecs": {"codecs"},
    "convert": {"convert", "mapping", "stores", "codecs"},
    "audit": {"audit"},
    "evidence": {"evidence", "convert", "mapping", "stores", "codecs", "audit"},
    "cli": {"cli", "evidence", "convert", "mapping", "stores", "codecs", "audit"},
}
FRAMEWORKS = {"torch", "transformers", "megatron", "safetensors", "transformer_engine", "accelerate"}
# Room or module -> frameworks that it may import, inside a function only.
ALLOWED_FRAMEWORKS = {"evidence": FRAMEWORKS, "codecs": {"torch"}}
RUNS_TEXT = {"__import__", "exec", "eval", "builtins.exec", "builtins.eval"}


@dataclass(frozen=True)
class Import:
    file: str  # relative to the package
    line: int
    target: str  # dotted; of `from a import b` both "a" and "a.b"
    late: bool  # inside a function

    @property
    def place(self) -> str:
        return f"mtpconvert/{self.file}:{self.line} imports {self.target}"

    @property
    def room(self) -> str:
        return self.file.removesuffix(".py").partition("/")[0]


def imports_of(source: str, file: str) -> Iterator[Import]:
    """Every import of a module, relative ones made absolute, ``TYPE_CHECKING`` ones included."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["mtpconvert", *file.split("/")][: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            targets = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for target in targets:
            yield Import(file, node.lineno, target, id(node) in inside)


def sources() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
    }


def wrong_rooms(files: dict[str, str]) -> list[str]:
    """Imports between rooms that the drawing does not have."""
    wrong = []
    for file, source in files.items():
        for found in imports_of(source, file):
            parts = found.target.split(".")
            if parts[0] != "mtpconvert":
                continue
            target = parts[1] if len(parts) > 1 else ""
            if target not in ROOMS[found.room] | SHARED and not target.startswith("__version__"):
                wrong.append(found.place)
    return wrong


def wrong_frameworks(files: dict[str, str]) -> list[str]:
    """Frameworks imported where they may not be, or at the top of a module."""
    wrong = []
    for file, source in files.items():
        allowed = set().union(*(names for prefix, names in ALLOWED_FRAMEWORKS.items() if file.startswith(prefix)))
        for found in imports_of(source, file):
            name = found.target.split(".")[0]
            if name in FRAMEWORKS and not (name in allowed and found.late):
                wrong.append(found.place)
    return wrong


def test_rooms_import_only_what_the_drawing_allows() -> None:
    files = sources()
    assert len(files) > 50, "the package was not found"
    assert {file.removesuffix(".py").partition("/")[0] for file in files} <= set(ROOMS)
    assert wrong_rooms(files) == []


def test_frameworks_are_imported_late_and_only_where_allowed() -> None:
    assert wrong_frameworks(sources()) == []


@pytest.mark.parametrize(
    ("file", "source", "caught"),
    [
        ("audit/pairs.py", "from mtpconvert.mapping.ops import rename", True),
        ("audit/pairs.py", "def f():\n    from mtpconvert import convert", True),
        ("audit/pairs.py", "import mtpconvert.stores.base as base", True),
        ("audit/roles/megatron.py", "from ...mapping import plan", True),
        ("audit/pairs.py", "if TYPE_CHECKING:\n    from mtpconvert.codecs import fp8_block", True),
        ("audit/pairs.py", "from mtpconvert.tensors import Box", False),
        ("audit/roles/megatron.py", "from .. import pairs", False),
        ("stores/base.py", "from mtpconvert.audit import findings", True),
        ("mapping/plan.py", "from mtpconvert.stores.base import Chunk", True),
        ("convert/execute.py", "from mtpconvert.cli.output import size", True),
        ("cli/plan.py", "from mtpconvert.convert.to_hf import ToHf", False),
    ],
)
def test_the_border_is_watched(file: str, source: str, caught: bool) -> None:
    assert bool(wrong_rooms({file: source})) is caught


@pytest.mark.parametrize(
    ("file", "source", "caught"),
    [
        ("stores/base.py", "def f():\n    import torch", True),
        ("convert/execute.py", "from transformers.modeling_utils import load_state_dict", True),
        ("evidence/parity.py", "import torch", True),
        ("evidence/parity.py", "def f():\n    import torch.distributed", False),
        ("codecs/fp8_block.py", "def f():\n    from torch import float8_e4m3fn", False),
        ("codecs/fp8_block.py", "def f():\n    import safetensors", True),
        ("audit/readers/headers.py", "def f():\n    from torch import load", True),
    ],
)
def test_frameworks_are_watched(file: str, source: str, caught: bool) -> None:
    assert bool(wrong_frameworks({file: source})) is caught


def dynamic_calls(file: str, source: str) -> list[str]:
    """Imports by name and code run from text. Harmless is ``import_module(f"mtpconvert.<own room>....")`` alone."""
    wrong = []
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    for node in calls:
        called = ast.unparse(node.func)
        if called not in RUNS_TEXT and not called.endswith("import_module"):
            continue
        name = node.args[0] if node.args else None
        start = name.values[0] if isinstance(name, ast.JoinedStr) else name
        text = start.value if isinstance(start, ast.Constant) else None
        own = f"mtpconvert.{file.partition('/')[0]}."
        if not (called.endswith("import_module") and str(text).startswith(own)):
            wrong.append(f"mtpconvert/{file}:{node.lineno} {called}")
    return wrong


def test_nothing_is_imported_by_name_out_of_another_room_or_run_from_text() -> None:
    assert [call for file, source in sources().items() for call in dynamic_calls(file, source)] == []
    assert dynamic_calls("audit/api.py", 'importlib.import_module("mtpconvert.stores.base")') != []
    assert dynamic_calls("audit/api.py", "importlib.import_module(name)") != []
    assert dynamic_calls("audit/api.py", "__import__(f'mtpconvert.audit.{x}')") != []
    assert dynamic_calls("audit/api.py", "importlib.import_module(f'mtpconvert.audit.{x}')") == []


def test_only_the_command_line_prints_or_exits() -> None:
    loud = [
        f"mtpconvert/{file}:{node.lineno}"
        for file, source in sources().items()
        if not file.startswith("cli/")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "exit", "quit", "sys.exit", "os._exit")
    ]
    assert loud == []


def test_no_module_is_longer_than_300_lines() -> None:
    long = {file: lines for file, source in sources().items() if (lines := source.count("\n")) > 300}
    assert long == {}


LISTED = """
import sys
from mtpconvert.cli.main import call
code = call(sys.argv[1:])
sys.stdout.flush()
print("MODULES", *sorted({name.partition(".")[0] for name in sys.modules}))
sys.exit(code)
"""


def modules_after(*arguments: object) -> set[str]:
    """Top-level modules that a command has imported when it ends; it must end well."""
    run = subprocess.run(
        [sys.executable, "-c", LISTED, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rpartition("MODULES ")[2].split())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny checkpoint, and what hf2mcore makes of it; that and the way back import no framework either."""
    folder = tmp_path_factory.mktemp("imports")
    source = write_tiny("deepseek_v3", folder / "hf")
    assert modules_after("hf2mcore", source, folder / "mcore") & FRAMEWORKS == set()
    assert modules_after("mcore2hf", folder / "mcore", folder / "back") & FRAMEWORKS == set()
    return source, folder / "mcore"


def test_help_imports_nothing_heavy() -> None:
    assert modules_after("--help") & (FRAMEWORKS | {"numpy", "rich", "yaml", "multiprocessing", "asyncio"}) == set()


@pytest.mark.parametrize("command", ["inspect", "plan", "audit --level headers", "audit", "roundtrip"])
def test_commands_import_no_framework(pair: tuple[Path, Path], command: str) -> None:
    name, *options = command.split()
    left, right = pair
    sides = (left, right) if name == "audit" else (left,)
    assert modules_after(name, *options, *sides) & FRAMEWORKS == set()
