"""The conversions under test, called in one place, and the fixtures that the evidence shares."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.convert.result import Callbacks, Conversion
from mtpconvert.convert.to_hf import ToHf, mcore2hf
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from tests.support.family_tables import CASES, write_case
from tests.support.tiny import write_tiny

FAMILIES = ("deepseek_v3", "qwen3", "qwen2", "llama", "mistral")


def to_mcore(source: Path, target: Path, **options: Any) -> Path:
    """``hf2mcore`` with these options; the directory that ``dist_checkpointing.load`` takes."""
    hf2mcore(source, target, ToMcore(**options), Callbacks())
    return iteration_of(target)


def iteration_of(root: Path) -> Path:
    """The directory that Megatron-LM would read below ``root`` (checkpointing.py:read_metadata)."""
    tracker = (root / "latest_checkpointed_iteration.txt").read_text().strip()
    return root / (tracker if tracker == "release" else f"iter_{int(tracker):07d}")


def to_hf(source: Path, target: Path, **options: Any) -> Conversion:
    """``mcore2hf`` with these options."""
    return mcore2hf(source, target, ToHf(**options), Callbacks())


Tiny = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """``tiny(family, **options of write_tiny)``: a tiny HF checkpoint, each written once; do not change it.

    Or ``tiny(case of family_tables, **changes of its config)``.
    """
    made: dict[str, Path] = {}

    def make(family: str, *, name: str = "", **options: Any) -> Path:
        key = f"{family}{name}-{options}"
        if key not in made:
            write = write_case if family in CASES else write_tiny
            made[key] = write(family, tmp_path_factory.mktemp("tiny") / family, **{"fill": "normal"} | options)
        return made[key]

    return make


Converted = Callable[..., Path]


@pytest.fixture(scope="session")
def converted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """``converted(hf_dir, **options of hf2mcore)``: its conversion, each made once; the iteration's directory."""
    made: dict[str, Path] = {}

    def make(source: Path, **options: Any) -> Path:
        key = f"{source}-{options}"
        if key not in made:
            made[key] = to_mcore(source, tmp_path_factory.mktemp("converted") / source.name, **options)
        return made[key]

    return make
