"""Whole checkpoints in the dialect of Megatron-Bridge: what the report calls them, and without arguments."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpconvert.audit.api import audit
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from tests.support.bridge_tables import write_bridge_case
from tests.support.mcore_edit import resaved
from tests.support.sabotage import reindex
from tests.support.scratch import scratch
from tests.support.tiny import write_safetensors, write_tiny

# cases with, between them, all that the dialect has; MiMo's key/value heads and sizes of values stand in no argument
NAMES = ("Gemma 2", "OLMo 2", "MiniMax-M2", "MiMo-V2-Flash", "openPangu-Ultra-MoE")


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    with scratch() as root:
        yield root


def converted(root: Path, name: str) -> tuple[Path, Path]:
    source, target = root / name, root / f"{name}, converted"
    if not source.exists():
        write_bridge_case(name, source, fill="normal")
        hf2mcore(source, target, ToMcore(dialect="bridge"), Callbacks(gate=None))
    return source, target


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_without_arguments_is_read_by_the_other_sides_and_the_report_names_the_dialect(
    name: str, folders: Path
) -> None:
    source, target = converted(folders, name)
    bare = resaved(target / "release", folders / f"{name}, bare", lambda tensors: None, args=False)
    report = audit(source, bare)
    assert report.verdict("warning") == "pass", [f.message for f in report.failing("warning")]
    assert (report.left.layout, report.right.layout) == ("safetensors, 1 file", "torch_dist, bridge")


def test_a_stock_checkpoint_has_no_dialect(folders: Path) -> None:
    hf2mcore(write_tiny("llama", folders / "llama"), folders / "llama mcore", ToMcore(), Callbacks(gate=None))
    assert audit(folders / "llama", folders / "llama mcore", level="headers").right.layout == "torch_dist"


def test_mtp_that_is_declared_and_not_published_is_a_note_and_lost_where_it_was_there(folders: Path) -> None:
    """MiniMaxAI/MiniMax-M2: ``num_mtp_modules`` 3, and no tensor of them."""
    source, target = converted(folders, "MiniMax-M2")
    report = audit(source, target)
    (note,) = (f for f in report.findings if f.code.startswith("mtp-"))
    assert (note.code, note.side, report.mtp.layers) == ("mtp-none-published", "left", [])
    assert "declared 3, published none" in note.message
    trained = folders / "with MTP"
    shutil.copytree(source, trained)
    write_safetensors(trained / "mtp.safetensors", {"model.layers.3.enorm.weight": ("BF16", (36,), bytes(72))})
    reindex(trained)
    codes = {f.code for f in audit(trained, source, level="headers").failing()}
    assert "mtp-layer-missing" in codes
