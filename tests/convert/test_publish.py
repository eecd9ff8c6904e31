"""The target appears at the end or not at all; what stood there before is replaced only then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.convert.publish import refuse_overlap, staged
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_hf import ToHf, mcore2hf
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from mtpconvert.errors import (
    AuditFailedError,
    CheckpointError,
    IncompleteError,
    MtpConvertError,
    TargetError,
    UsageError,
)
from tests.support.tiny import sha256_tree, write_tiny


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(memory: Path) -> Path:
    return write_tiny("qwen3", memory / "hf")


def build(target: Path, content: str = "new", *, overwrite: bool = False) -> None:
    with staged(target, overwrite=overwrite, needed=0) as staging:
        (staging.path / "file").write_text(content)
        staging.publish()


# ---- an existing target


def test_an_existing_target_is_refused_and_untouched(source: Path, memory: Path) -> None:
    target = memory / "mcore"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(UsageError, match="the target exists") as refusal:
        hf2mcore(source, target, ToMcore(), Callbacks())
    assert "--overwrite" in str(refusal.value.next_step)
    assert names(target) == ["precious"]
    (target / "precious").unlink()
    with pytest.raises(UsageError, match=r"the target exists \(an empty folder\)"):
        hf2mcore(source, target, ToMcore(), Callbacks())
    assert names(memory) == ["hf", "mcore"]


@pytest.mark.parametrize("direction", ["hf2mcore", "mcore2hf"])
def test_overwrite_replaces_only_at_the_end(direction: str, source: Path, memory: Path) -> None:
    target = memory / "target"
    target.mkdir()
    (target / "old").write_text("x")
    seen = []

    def gate(_: Path, result: Path) -> None:
        seen.append((names(target), result.name, len(names(result)) > 1))

    if direction == "hf2mcore":
        hf2mcore(source, target, ToMcore(overwrite=True), Callbacks(gate=gate))
    else:
        hf2mcore(source, memory / "mcore", ToMcore(), Callbacks())
        mcore2hf(memory / "mcore", target, ToHf(overwrite=True), Callbacks(gate=gate))
    assert seen == [(["old"], ".target.partial", True)]
    assert "old" not in names(target)
    assert {"hf", "target"} <= set(names(memory)) <= {"hf", "target", "mcore"}


@pytest.mark.parametrize("kind", ["file", "link to a folder", "broken link"])
def test_overwrite_of_what_is_no_folder(kind: str, memory: Path) -> None:
    target, elsewhere = memory / "target", memory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    if kind == "file":
        target.write_text("x")
    else:
        target.symlink_to(elsewhere if kind == "link to a folder" else memory / "gone")
    with pytest.raises(UsageError, match="the target exists"):
        build(target)
    build(target, overwrite=True)
    assert (target / "file").read_text() == "new"
    assert not target.is_symlink()
    assert names(elsewhere) == ["kept"]
    assert names(memory) == ["elsewhere", "target"]


def test_a_target_that_appears_meanwhile_is_not_replaced(memory: Path) -> None:
    target = memory / "target"
    with pytest.raises(UsageError, match="the target exists"), staged(target, overwrite=False, needed=0) as staging:
        target.mkdir()
        (target / "someone's").write_text("x")
        staging.publish()
    assert names(target) == ["someone's"]
    assert names(memory) == ["target"]


# ---- what a killed run leaves


def test_a_target_that_was_being_replaced_gets_its_name_back(memory: Path) -> None:
    """Killed between the two renames: the old one lies beside, and is neither lost nor in the way."""
    (memory / ".target.replaced").mkdir()
    (memory / ".target.replaced" / "old").write_text("x")
    with pytest.raises(UsageError, match="the target exists"):
        build(memory / "target")
    assert names(memory) == ["target"]
    assert names(memory / "target") == ["old"]
    build(memory / "target", overwrite=True)
    assert names(memory / "target") == ["file"]


def test_what_a_finished_replacement_left_is_removed(memory: Path) -> None:
    build(memory / "target", "first")
    (memory / ".target.replaced").mkdir()
    (memory / ".target.partial").mkdir()
    build(memory / "target", "second", overwrite=True)
    assert names(memory) == ["target"]
    assert (memory / "target" / "file").read_text() == "second"


# ---- errors on the way


def failing(error: BaseException) -> Any:
    def gate(source: Path, result: Path) -> None:
        raise error

    return gate


@pytest.mark.parametrize("error", [KeyError("x"), CheckpointError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_any_error_leaves_nothing(error: BaseException, source: Path, memory: Path) -> None:
    with pytest.raises(type(error)):
        hf2mcore(source, memory / "mcore", ToMcore(), Callbacks(gate=failing(error)))
    assert names(memory) == ["hf"]


def test_what_an_audit_rejects_is_kept_as_failed(source: Path, memory: Path) -> None:
    (memory / "mcore.failed").mkdir()
    (memory / "mcore.failed" / "of an earlier run").write_text("x")
    with pytest.raises(AuditFailedError) as refusal:
        hf2mcore(source, memory / "mcore", ToMcore(), Callbacks(gate=failing(AuditFailedError("x"))))
    assert refusal.value.where == str(memory / "mcore.failed")
    assert names(memory) == ["hf", "mcore.failed"]
    assert "release" in names(memory / "mcore.failed")
    assert "of an earlier run" not in names(memory / "mcore.failed")


@pytest.mark.parametrize("direction", ["hf2mcore", "mcore2hf"])
def test_a_source_that_shrinks_while_it_is_read_is_refused(direction: str, source: Path, memory: Path) -> None:
    """The executor reads past the end of a file that was whole when its header was read."""
    target = memory / "target"
    target.mkdir()
    (target / "old").write_text("x")
    if direction == "mcore2hf":
        hf2mcore(source, memory / "mcore", ToMcore(), Callbacks())
    victim = source / "model-00002-of-00003.safetensors"
    if direction == "mcore2hf":
        victim = memory / "mcore" / "release" / "__0_1.distcp"

    def start(total: int) -> Any:
        os.truncate(victim, victim.stat().st_size // 2)
        return lambda count, name: None

    with pytest.raises(MtpConvertError) as refusal:
        if direction == "hf2mcore":
            hf2mcore(source, target, ToMcore(overwrite=True), Callbacks(start=start))
        else:
            mcore2hf(memory / "mcore", target, ToHf(overwrite=True), Callbacks(start=start))
    assert isinstance(refusal.value, CheckpointError)
    if direction == "hf2mcore":
        assert isinstance(refusal.value, IncompleteError)
        assert refusal.value.where == str(victim)
    assert names(target) == ["old"]
    assert not [name for name in names(memory) if "partial" in name or "lock" in name]


def test_a_source_file_that_disappears_is_the_sources_fault(source: Path, memory: Path) -> None:
    def start(total: int) -> Any:
        (source / "model-00002-of-00003.safetensors").unlink()
        return lambda count, name: None

    with pytest.raises(CheckpointError, match="the file cannot be opened: No such file") as refusal:
        hf2mcore(source, memory / "mcore", ToMcore(), Callbacks(start=start))
    assert refusal.value.where == str(source / "model-00002-of-00003.safetensors")
    assert names(memory) == ["hf"]


# ---- where a target may be


def test_a_target_in_a_folder_that_is_not_there_is_refused(source: Path, memory: Path) -> None:
    with pytest.raises(TargetError, match="the folder for the target does not exist") as refusal:
        hf2mcore(source, memory / "no" / "mcore", ToMcore(), Callbacks())
    assert refusal.value.where == str(memory / "no")
    assert refusal.value.exit_code == 11


@pytest.mark.parametrize("target", ["hf", "hf/mcore", ".", "hf/../hf", "link", "link/deep/mcore"])
def test_a_target_that_would_change_its_source_is_refused(target: str, source: Path, memory: Path) -> None:
    (memory / "link").symlink_to(source)
    before = sha256_tree(source)
    with pytest.raises(UsageError, match=r"replace what is read|inside the source"):
        hf2mcore(source, memory / target, ToMcore(overwrite=True), Callbacks())
    assert sha256_tree(source) == before


def test_the_way_back_may_not_replace_its_source_or_reference_but_may_lie_in_the_source(
    source: Path, memory: Path
) -> None:
    mcore = memory / "mcore"
    hf2mcore(source, mcore, ToMcore(), Callbacks())
    for target, reference in (
        (mcore, None),
        (memory, None),
        (source, source),
        (mcore / "hf_assets", mcore / "hf_assets"),
    ):
        with pytest.raises(UsageError, match=r"replace what is read|inside the source"):
            mcore2hf(mcore, target, ToHf(overwrite=True, reference=reference), Callbacks())
    mcore2hf(mcore, mcore / "exported", ToHf(), Callbacks())
    assert sha256_tree(mcore / "exported") == sha256_tree(source)


def test_overlap_by_name_only_is_none(tmp_path: Path) -> None:
    refuse_overlap(tmp_path / "model-mcore", tmp_path / "model", inside=False)


@pytest.mark.parametrize("target", ["/", ".."])
def test_a_target_without_a_name_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match="needs a name of its own"):
        build(Path(target), overwrite=True)


def test_a_lock_of_a_dead_run_is_no_hindrance(memory: Path) -> None:
    (memory / ".target.lock").touch()
    build(memory / "target")
    assert names(memory) == ["target"]


def test_a_lock_of_a_living_run_is(memory: Path) -> None:
    with staged(memory / "target", overwrite=False, needed=0) as staging:
        with pytest.raises(UsageError, match="another mtpconvert is building this target"):
            build(memory / "target")
        build(memory / "other")
        assert staging.path.is_dir()
        staging.publish()
    assert names(memory) == ["other", "target"]
