"""``mtpconvert accept HF``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mtpconvert.cli.options import EXISTING, TARGET, json_option
from mtpconvert.cli.output import print_json, write_file


@click.command()
@click.argument("hf", type=EXISTING)
@click.option("--against", type=EXISTING, help="What HF was made from: run it too, say the change.")
@click.option("--prompts", "prompts_file", type=EXISTING, help="Texts: *.jsonl with kind and text, or plain text.")
@click.option("--limit", type=click.IntRange(1), help="Use the first so many prompts.")
@click.option("--draft-length", type=click.IntRange(1), help="Tokens drafted at once; default: one a layer.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1; auto: cuda where there is one.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--max-drop", type=click.FloatRange(0, 1), help="Fail unless a larger drop from --against is ruled out.")
@click.option("--min-acceptance", type=click.FloatRange(0, 1), help="Fail below this share in greedy free generation.")
@click.option("--plot", "plot_file", type=TARGET, help="Write a plot by position and bucket (SVG).")
@json_option
def accept(
    hf: Path,
    against: Path | None,
    prompts_file: Path | None,
    limit: int | None,
    draft_length: int | None,
    max_new_tokens: int,
    temperature: float,
    dtype: str,
    device: str,
    seed: int,
    max_drop: float | None,
    min_acceptance: float | None,
    plot_file: Path | None,
    as_json: bool,
) -> int:
    """Say how many drafts of HF's MTP layers are accepted, run by transformers, in generation and over given text.

    Exit code 1: a threshold was missed, or speculative and greedy output differ in float32. 10: not run, and why.
    """
    from mtpconvert.evidence.acceptance import AcceptanceOptions, changes, dropped, measure
    from mtpconvert.evidence.acceptance_report import document, lines
    from mtpconvert.evidence.prompts import built_in, read_prompts
    from mtpconvert.evidence.transformers_model import choose_device

    if max_drop is not None and against is None:
        raise click.UsageError("--max-drop needs --against")
    prompts = (built_in() if prompts_file is None else read_prompts(prompts_file))[:limit]
    options = AcceptanceOptions(draft_length, max_new_tokens, temperature, dtype, choose_device(device), seed)
    report = measure(hf, prompts, options, _counter(f"{hf}"))
    base, found = None, []
    if against is not None:
        base = measure(against, prompts, replace(options, draft_length=report.draft_length), _counter(f"{against}"))
        found = changes(report, base)
    failures = [*report.failures, *([] if max_drop is None else dropped(found, max_drop))]
    rate = report.tally("free_greedy").rate
    if min_acceptance is not None and (rate is None or rate < min_acceptance):
        shown = "nothing was drafted" if rate is None else f"{rate:.1%} of drafts are accepted"
        failures.append(f"{shown}, at least {min_acceptance:.1%} are asked for")
    result = document(report, base, found) | {"failures": failures, "verdict": "fail" if failures else "pass"}
    if plot_file is not None:
        _write_plot(plot_file, result)
    if as_json:
        print_json(result)
    else:
        for line in lines(result):
            click.echo(line)
        for failure in failures:
            click.echo(f"fail: {failure}")
        click.echo(f"MTP layers: {report.layers} run; verdict: {result['verdict']}")
    return 1 if failures else 0


def _counter(what: str) -> Any:
    """Progress on a terminal's stderr: prompts done."""
    import sys

    if not sys.stderr.isatty():
        return lambda _done, _of: None
    return lambda done, of: click.echo(f"\r{what}: prompt {done} of {of}", err=True, nl=done == of)


def _write_plot(file: Path, result: dict[str, Any]) -> None:
    from mtpconvert.evidence.plot import acceptance_svg

    if file.suffix.lower() != ".svg":
        raise click.UsageError(f"--plot writes SVG; {file.name} does not end in .svg")
    write_file(file, acceptance_svg(result))
