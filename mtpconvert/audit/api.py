"""``audit(left, right) -> Report``: the order of the checks. Pure: reads both sides, prints and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

from mtpconvert.audit.arguments_check import check_arguments
from mtpconvert.audit.counts import check_counts
from mtpconvert.audit.describe import Description, describe
from mtpconvert.audit.dtypes import check_dtypes
from mtpconvert.audit.findings import Finding, Severity, finding
from mtpconvert.audit.itself import check_itself
from mtpconvert.audit.ledger import ledger_findings, make_ledger, trunk_lost
from mtpconvert.audit.mass import check_mass
from mtpconvert.audit.mtp import MtpLayers, mtp_layers, tell_kinds
from mtpconvert.audit.outcomes import Bits
from mtpconvert.audit.packed import as_compared, with_scales
from mtpconvert.audit.plan import Plan, make_plan, missing_findings
from mtpconvert.audit.quantised import check_quantisation
from mtpconvert.audit.readers.headers import Seen
from mtpconvert.audit.readers.opening import open_side
from mtpconvert.audit.readers.side import Side, same_tensors
from mtpconvert.audit.repeated_rows import check_repeated_rows
from mtpconvert.audit.report_model import Report, SideSummary, TensorState
from mtpconvert.audit.sidefiles import check_remote_code, check_side_files
from mtpconvert.audit.waivers import Waiver, apply_waivers
from mtpconvert.garbage import no_gc

LEVELS = ("headers", "bits")


def audit(
    left: Path,
    right: Path,
    *,
    level: str = "bits",
    trained: bool = False,
    waivers: list[Waiver] | None = None,
    today: date | None = None,
) -> Report:
    """Say whether ``right`` is what ``left`` became.

    ``level``: "headers" reads names, shapes, dtypes and configs; "bits" every byte too. ``trained``: a training lies
    between the two, so values must differ. CheckpointError where a side cannot be read at all.
    """
    if level not in LEVELS:
        raise ValueError(f"level {level!r}: one of {LEVELS}")
    with no_gc():
        return _audit(left, right, level, trained, waivers or [], today or date.today())


def _audit(left: Path, right: Path, level: str, trained: bool, waivers: list[Waiver], today: date) -> Report:
    seen = Seen()
    one, two = open_side(left, "left", seen), open_side(right, "right", seen)
    tell_kinds(one, two)
    alike = _alike(one, two)
    here = mtp_layers(one)
    there = here if alike else mtp_layers(two)
    findings = [*one.findings, *two.findings]
    quantisation, counts = check_quantisation(one, here), check_counts(one, here)
    findings += quantisation + (_of_right(quantisation) if alike else check_quantisation(two, there))
    one, two, about_scales = as_compared(one, two)
    findings += about_scales
    about_one, about_two = _descriptions(one, two)
    plan = make_plan(one, two, about_one, about_two)
    findings += counts + (_of_right(counts) if alike else check_counts(two, there, base=one))
    findings += check_arguments(one, two, about_one, about_two) + check_remote_code(one) + check_remote_code(two)
    if one.is_huggingface and two.is_huggingface:
        findings += check_side_files(one, two)
    if one.kind == two.kind == "gguf":
        from mtpconvert.audit.readers.gguf import check_gguf

        findings += check_gguf(one, two)
    findings += check_mass(one, two, plan) + check_itself(one, two)
    if level == "headers" or trained:
        findings += check_dtypes(one, two, plan)
    findings += plan.findings
    bits = Bits()
    if level == "bits":
        from mtpconvert.audit.bits import audit_bits

        bits = audit_bits(one, two, about_one, about_two, plan, trained)
        findings += bits.findings + check_repeated_rows(one, two, bits.equal)
    if level == "bits" or one.stored or two.stored:
        from mtpconvert.audit.packed_checks import check_packed

        findings += check_packed(one, two, plan, bits if level == "bits" else None, trained)
    if level == "bits" and one.stored and not trained:
        from mtpconvert.audit.kept import check_kept_scales

        findings += check_kept_scales(one, two, plan)
    beside = None
    if one.is_huggingface != two.is_huggingface:
        from mtpconvert.audit.kept import check_other_part

        beside = check_other_part(one, two, read=level == "bits" and not trained)
        findings += beside.findings
    findings += missing_findings(plan, one, two, here, there)
    equal = with_scales(bits.equal, two) if level == "bits" else None
    ledger = make_ledger(one, two, here, there, about_one, about_two, equal, plan)
    findings += ledger_findings(one, two, here, there, ledger) + trunk_lost(one, plan.missing, here)
    if trained and level == "bits":
        from mtpconvert.audit.trained import check_trained

        findings += check_trained(one, two, plan, bits, here, there)
    mtp_names = here.all_names() | there.all_names()
    for found in findings:
        if found.tensor in mtp_names:
            found.detail["mtp"] = True
    findings = _settle(findings, plan, waivers, today)
    return Report(
        _summary(one, about_one.dialect), _summary(two, about_two.dialect), level, trained, ledger,
        len(plan.matched), bits.nbytes, findings, partial(_states, one, two, plan, bits, here, there), bits.copies,
        {"tensors": beside.tensors if beside else 0, "bytes": beside.nbytes if beside else 0},
    )  # fmt: skip


def _descriptions(one: Side, two: Side) -> tuple[Description, Description]:
    """Meanings are worked out for both sides; where both are of one framework they only help to word and explain."""
    if _alike(one, two):
        first = describe(one, two)
        return first, first if one.is_huggingface else describe(two, one)
    if two.is_huggingface and not one.is_huggingface:
        second = describe(two, one)
        return describe(one, two, second.facts), second
    first = describe(one, two)
    return first, describe(two, one, first.facts if one.is_huggingface else None)


def _alike(one: Side, two: Side) -> bool:
    """Whether names, shapes, dtypes, config and arguments are the same: what is worked out from them is, too."""
    said = (one.kind, one.config, one.arguments) == (two.kind, two.config, two.arguments)
    return said and same_tensors(one, two)


def _of_right(findings: list[Finding]) -> list[Finding]:
    """What was found on the left, for a right that is alike."""
    return [replace(found, side="right", detail={**found.detail}) for found in findings]


def _settle(findings: list[Finding], plan: Plan, waivers: list[Waiver], today: date) -> list[Finding]:
    """Drop repeats, add "nothing was compared", apply waivers, order by severity."""
    if not plan.matched and not any(f.code == "architecture-unknown" for f in findings):
        findings.append(finding("nothing-compared", "not one tensor of the two sides could be matched", side="both"))
    elif not plan.matched:
        findings.append(finding("nothing-compared", "without meanings no tensor could be matched", side="both"))
    unique = list({(f.code, f.side, f.tensor, f.message): f for f in findings}.values())
    unique += apply_waivers(unique, waivers, today)
    return sorted(unique, key=lambda f: (f.waived_by is not None, -int(f.severity), not f.detail.get("mtp"), f.code))


def _summary(side: Side, dialect: str) -> SideSummary:
    side = side.stored or side
    layout = ", ".join(filter(None, (side.layout, dialect)))
    return SideSummary(str(side.root), side.kind, layout, len(side.inventory), side.bytes_total)


def _states(one: Side, two: Side, plan: Plan, bits: Bits, here: MtpLayers, there: MtpLayers) -> list[TensorState]:
    """The state of every tensor of the right, and of those of the left that are missing there."""
    extra, mtp = set(plan.unexpected), there.all_names() | here.all_names()
    equal, unequal = with_scales(bits.equal, two), with_scales(bits.unequal, two)
    one, two = one.stored or one, two.stored or two

    def state(name: str) -> str:
        if name in extra:
            return "unexpected"
        return "equal" if name in equal else "differs" if name in unequal else "unread"

    states = [
        TensorState(name, state(name), name in mtp, spec.shape, spec.dtype) for name, spec in two.inventory.items()
    ]
    for name in plan.missing:
        spec = one.inventory.get(name)
        states.append(
            TensorState(
                name,
                "missing",
                name in mtp or name.startswith("mtp."),
                spec.shape if spec else (),
                spec.dtype if spec else "",
            )
        )
    return states


def worst(report: Report) -> Severity:
    """The highest severity that is not waived."""
    return max((f.severity for f in report.findings if f.waived_by is None), default=Severity.NOTE)
