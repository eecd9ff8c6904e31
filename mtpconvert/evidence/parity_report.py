"""A ParityReport for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mtpconvert import __version__
from mtpconvert.evidence.differences import Difference
from mtpconvert.evidence.parity import ParityReport


def lines(report: ParityReport) -> Iterator[str]:
    """The report as text, verdict last."""
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    yield f"transformers: {report.hf}"
    yield f"megatron-core: {report.mcore or 'a conversion made for this comparison'}"
    yield f"  {report.path}"
    yield f"{versions}; {report.tolerance.dtype} on {report.device}; {report.inputs}"
    yield f"tolerance: {report.tolerance.words}"
    yield f"{'point':<20}{'max |d|':>10}{'mean |d|':>10}{'max rel':>10}{'mean rel':>10}{'cosine':>10}{'KL':>10}  greedy"
    for found in report.found:
        yield _row(found) + ("" if found.within(report.tolerance) else "  departs")
    yield from report.apart
    yield f"trunk: {report.trunk}"
    yield mtp_line(report)
    if report.first is not None:
        yield f"first point that departs: {report.first.point}"
    yield (
        f"MTP layers: transformers {report.mtp.transformers}, Megatron {report.mtp.megatron},"
        f" compared {len(report.mtp.verdicts)}; verdict: {report.verdict}"
    )


def mtp_line(report: ParityReport) -> str:
    mtp = report.mtp
    depths = ", ".join(f"depth {depth} {verdict}" for depth, verdict in mtp.verdicts.items())
    if mtp.state == "compared":
        return f"MTP: {depths}"
    if mtp.state == "lost":
        return f"MTP: fail, because {mtp.why}" + (f" ({depths})" if depths else "")
    return f"MTP: not run, because {mtp.why}"


def _row(found: Difference) -> str:
    numbers = (found.max_abs, found.mean_abs, found.relative, found.mean_relative)
    text = f"{found.point:<20}" + "".join(f"{number:>10.2e}" for number in numbers) + f"{found.cosine:>10.6f}"
    if found.greedy is None or found.kl is None:
        return text
    return f"{text}{found.kl:>10.2e}  {found.greedy:.1%}"


def document(report: ParityReport) -> dict[str, Any]:
    """The JSON document. Numbers that are not finite are null."""
    first = report.first
    return {
        "schema_version": 1,
        "tool_version": __version__,
        "hf": str(report.hf),
        "mcore": None if report.mcore is None else str(report.mcore),
        "path": report.path,
        "versions": report.versions,
        "dtype": report.tolerance.dtype,
        "device": report.device,
        "inputs": report.inputs,
        "tolerance": {"measure": report.tolerance.measure, "limit": report.tolerance.limit},
        "points": [
            {name: _finite(value) for name, value in asdict(found).items()} | {"within": found.within(report.tolerance)}
            for found in report.found
        ],
        "not_comparable": report.apart,
        "first_departure": None if first is None else first.point,
        "trunk": report.trunk,
        "mtp": asdict(report.mtp) | {"verdicts": {str(k): v for k, v in report.mtp.verdicts.items()}},
        "verdict": report.verdict,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
