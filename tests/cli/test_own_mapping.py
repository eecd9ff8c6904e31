"""``--mapping`` with a file that has no [arguments], as ``mappings new`` drafts it, of an unknown architecture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtpconvert.mapping.catalogue import folder
from tests.support.command_line import Run
from tests.support.sabotage import edit_json
from tests.support.tiny import write_tiny


@pytest.fixture
def source(memory: Path) -> Path:
    """Qwen3 under another name."""
    made = write_tiny("qwen3", memory / "hf")
    edit_json(made / "config.json", lambda config: config.update(architectures=["FooBarForCausalLM"]))
    return made


def mapping(memory: Path, *, arguments: bool) -> Path:
    text = (folder() / "Qwen3ForCausalLM.toml").read_text()
    text = text.replace('"Qwen3ForCausalLM"', '"FooBarForCausalLM"')
    if not arguments:
        text = re.sub(r"^\[arguments\].*\n(?:(?!\[).*\n)*", "", text, flags=re.M)
    file = memory / "FooBarForCausalLM.toml"
    file.write_text(text)
    assert ("[arguments]" in text) == arguments
    return file


def test_no_arguments_no_launch(source: Path, run: Run, memory: Path) -> None:
    file = mapping(memory, arguments=False)
    done = run("hf2mcore", source, memory / "mcore", "--mapping", file, "--audit", "none")
    assert done.code == 0, done.err
    assert "note: the mapping has no [arguments]: the checkpoint's args hold nothing of the model" in done.err
    assert "Megatron cannot be launched from them" in done.err
    assert "--" not in done.out
    assert "Launch" not in done.out
    document = run("hf2mcore", source, memory / "again", "--mapping", file, "--audit", "none", "--json").json
    assert document["launch_flags"] == []
    assert any("no [arguments]" in note for note in document["notes"])
    flags = run("args", source, "--mapping", file)
    assert (flags.code, flags.out, "has no [arguments]" in flags.err) == (3, "", True), flags.err
    back = run("mcore2hf", memory / "mcore", memory / "back", "--mapping", file)
    assert back.code == 0, back.err
    assert "the mapping has no [arguments]: of the checkpoint's, only those that change" in back.err


def test_with_arguments_as_ever(source: Path, run: Run, memory: Path) -> None:
    done = run("hf2mcore", source, memory / "mcore", "--mapping", mapping(memory, arguments=True))
    assert done.code == 0, done.err
    assert "--use-checkpoint-args" in done.out
    assert "[arguments]" not in done.err


@pytest.mark.parametrize("level", ["headers", "bits"])
def test_the_audit_says_what_leaves_it_out(level: str, source: Path, run: Run, memory: Path) -> None:
    file = mapping(memory, arguments=False)
    failed = run("hf2mcore", source, memory / "mcore", "--mapping", file, "--audit", level)
    assert failed.code == 1
    assert "the auditor knows no roles for architecture FooBarForCausalLM" in failed.err
    assert "a mapping of one's own has no roles in the auditor" in failed.err
    assert "--audit none leaves the audit out" in failed.err
    assert not (memory / "mcore").exists()
    run("hf2mcore", source, memory / "mcore", "--mapping", file)
    failed = run("mcore2hf", memory / "mcore", memory / "back", "--mapping", file, "--audit", level)
    assert (failed.code, "--audit none leaves the audit out" in failed.err) == (1, True), failed.err
