"""Runs a conversion with progress and says what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click

from mtpconvert.cli.output import mtp_json, mtp_line, print_json, print_notes, progress
from mtpconvert.convert.result import Callbacks, Conversion, Gate
from mtpconvert.tensors import size_words


def run_conversion(
    run: Callable[[Callbacks], Conversion],
    gate: Gate | None,
    *,
    as_json: bool,
    say_more: Callable[[Conversion], None] = lambda _result: None,
) -> None:
    """Run, show progress, print notes to stderr and the outcome to stdout: ``say_more`` in words, the MTP line last."""
    began = time.monotonic()
    with ExitStack() as stack:
        result = run(Callbacks(start=lambda total: stack.enter_context(progress(total)), gate=gate))
    seconds = time.monotonic() - began
    if as_json:
        print_json(_document(result, seconds))
        return
    print_notes(result.notes)
    click.echo(f"{result.target}: {size_words(result.moved.written)} in {seconds:.1f} s")
    for key, value in result.config_changes.items():
        click.echo(f"config.json changed: {key} {'removed' if value is None else f'= {value!r}'}")
    if result.audit is not None:
        click.echo("audit: pass")
        for reason, count in _accepted(result.audit).items():
            click.echo(f"  accepted: {count} finding{'s' * (count > 1)}: {reason}")
    say_more(result)
    click.echo(mtp_line(result.plan.mtp))


def _accepted(audit: Any) -> dict[str, int]:
    """Reason -> findings that it waived."""
    return Counter(found.waived_by for found in audit.findings if found.waived_by is not None)


def _document(result: Conversion, seconds: float) -> dict[str, Any]:
    plan = result.plan
    return {
        "schema_version": 1,
        "source": str(result.source),
        "target": str(result.target),
        "direction": plan.direction,
        "architecture": plan.architecture,
        "plan_sha256": plan.digest(),
        "moved": {"read": result.moved.read, "written": result.moved.written, "zeros": result.moved.zeros},
        "seconds": round(seconds, 3),
        "launch_flags": result.launch_flags,
        "config_changes": result.config_changes,
        "notes": result.notes,
        "dialect": result.dialect,
        "audit": None if result.audit is None else result.audit.verdict(),
        "accepted": {} if result.audit is None else _accepted(result.audit),
        "mtp": mtp_json(plan.mtp),
    }
