"""The command line in this process: exit code, stdout and stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mtpconvert.cli.main import call


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON document that it must be."""
        return json.loads(self.out)

    @property
    def last_line(self) -> str:
        return self.out.rstrip("\n").rpartition("\n")[2]


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("hf2mcore", source, target, "--json")``; no audit is made unless the arguments say which."""

    def run_one(*arguments: object) -> Result:
        words = list(map(str, arguments))
        if words[0] in ("hf2mcore", "mcore2hf") and "--audit" not in words:
            words += ["--audit", "none"]
        capsys.readouterr()
        code = call(words)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run_one
