"""An acceptance report as plain values (for ``--json``) and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mtpconvert.evidence.acceptance import MODES, AcceptanceReport, Change, length_buckets
from mtpconvert.evidence.acceptance_tally import Tally, interval, wilson

SHOWN = 5  # divergences


def document(report: AcceptanceReport, base: AcceptanceReport | None, found: Sequence[Change]) -> dict[str, Any]:
    """Schema version 1; ``docs/evidence.md`` describes the keys."""
    return {
        "schema_version": 1,
        **_measured(report),
        "against": None
        if base is None
        else {"base": _measured(base), "change": [asdict(change) | {"drop": change.drop} for change in found]},
    }


def _measured(report: AcceptanceReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "exercised": f"transformers {report.version}: MtpModel and generate(use_mtp=True), {report.model_type}",
        "dtype": report.options.dtype,
        "device": report.options.device,
        "mtp_layers": report.layers,
        "draft_length": report.draft_length,
        "prompts": len(report.results),
        "new_tokens": report.options.new_tokens,
        "temperature": report.options.temperature,
        "seed": report.options.seed,
        "modes": {mode: _mode(report, mode) for mode in MODES},
        "speculative_equals_greedy": {
            "prompts": len(report.results),
            "tokens": sum(result.generated for result in report.results),
            "has_to_be_exact": report.exact,
            "divergences": [{"prompt": number, **asdict(one)} for number, one in report.divergences],
        },
    }


def _mode(report: AcceptanceReport, mode: str) -> dict[str, Any]:
    tally = report.tally(mode)
    return {
        "rate": tally.rate,
        "interval": interval(report.per_prompt(mode)),
        "accepted": tally.accepted,
        "drafted": tally.drafted,
        "tokens_per_step": tally.tokens_per_step,
        "by_position": [
            {"position": k + 1, "rate": rate, "interval": wilson(tally.reached[k], tried)}
            for k, (rate, tried) in enumerate(zip(tally.by_position, [tally.steps, *tally.reached[:-1]], strict=True))
        ],
        "by_kind": {kind: _cell(report.tally(mode, kind=kind)) for kind in report.kinds},
        "by_output_length": {
            bucket: _cell(report.tally(mode, bucket=bucket))
            for bucket in (length_buckets() if mode.startswith("free") else [])
        },
    }


def _cell(tally: Tally) -> dict[str, Any]:
    return {
        "rate": tally.rate,
        "interval": wilson(tally.accepted, tally.drafted),
        "drafted": tally.drafted,
        "tokens_per_step": tally.tokens_per_step,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """What a person reads of a ``document``."""
    yield f"{result['path']}: {result['exercised']}, {result['dtype']} on {result['device']}"
    yield (
        f"{result['mtp_layers']} MTP layers draft {result['draft_length']} tokens at once;"
        f" {result['prompts']} prompts, {result['new_tokens']} tokens each"
    )
    yield f"{'':26}{'accepted':>9}  {'95 % over prompts':>19}  {'E[A]':>5}  by position"
    for mode, name in MODES.items():
        figures = result["modes"][mode]
        positions = "  ".join(_percent(entry["rate"]) for entry in figures["by_position"])
        per_step = "-" if figures["tokens_per_step"] is None else f"{figures['tokens_per_step']:.2f}"
        yield f"{name:26}{_percent(figures['rate']):>9}  {_bounds(figures['interval']):>19}  {per_step:>5}  {positions}"
    free = result["modes"]["free_greedy"]
    for title, cells in (("kind", free["by_kind"]), ("output", free["by_output_length"])):
        filled = [f"{name} {_percent(cell['rate'])}" for name, cell in cells.items() if cell["drafted"]]
        yield f"free generation, greedy, by {title}: {', '.join(filled) or 'nothing drafted'}"
    yield from _equality(result["speculative_equals_greedy"])
    if result["against"] is not None:
        yield f"against {result['against']['base']['path']}, on the same tokens:"
        for change in result["against"]["change"]:
            yield (
                f"{MODES[change['mode']]:26}{_percent(change['base']):>9} -> {_percent(change['here'])},"
                f" change {change['interval'][0]:+.1%} to {change['interval'][1]:+.1%} (95 %)"
            )


def _equality(equality: dict[str, Any]) -> Iterator[str]:
    found = equality["divergences"]
    count, tokens = equality["prompts"], equality["tokens"]
    if not found:
        yield f"speculative output equals greedy output, token for token: {count} prompts, {tokens} tokens"
        return
    why = "a fault" if equality["has_to_be_exact"] else "ties that rounding parts, where the gap is small"
    yield f"speculative output leaves greedy output on {len(found)} of {count} prompts ({why}):"
    for one in found[:SHOWN]:
        yield (
            f"  prompt {one['prompt']}, token {one['at']}: greedy {one['plain']}, speculative {one['speculative']},"
            f" gap between the two best logits {one['gap']:.3g}"
        )


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _bounds(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.1%} to {bounds[1]:.1%}"
