"""Texts to draft on: a small set of the tool's own (``prompts.jsonl``), in four kinds, or a file of the user's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mtpconvert.errors import UsageError

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Prompt:
    """``kind`` is the bucket it is reported under. ``tokens`` where the caller has ids and no tokenizer is needed."""

    kind: str
    text: str = ""
    tokens: tuple[int, ...] | None = None


def built_in() -> list[Prompt]:
    """Six texts of each kind, the kinds in turn, so that any first n hold every kind."""
    return read_prompts(Path(__file__).with_name("prompts.jsonl"))


def read_prompts(file: Path) -> list[Prompt]:
    """``*.jsonl``: an object a line with ``text`` or ``tokens`` and, optionally, ``kind``. Else: texts separated by
    empty lines, all of one kind.

    Raises UsageError naming file and line.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prompts cannot be read: {error}", where=str(file)) from error
    if file.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
        prompts = [_from_json(line, f"{file}, line {number}") for number, line in lines]
    else:
        prompts = [Prompt(PLAIN, text.strip("\n")) for text in content.split("\n\n") if text.strip()]
    if not prompts:
        raise UsageError(
            "there is not a single prompt", where=str(file), next_step="write texts, or leave --prompts out"
        )
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UsageError(f"this is no JSON: {error}", where=where) from error
    entry = entry if isinstance(entry, dict) else {}
    text, tokens, kind = entry.get("text"), entry.get("tokens"), entry.get("kind", PLAIN)
    if isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens):
        return Prompt(str(kind), "", tuple(tokens))
    if not isinstance(text, str) or not text:
        raise UsageError(
            "a prompt needs 'text' or 'tokens'", where=where, next_step='write {"kind": "code", "text": "def f("}'
        )
    return Prompt(str(kind), text)
