"""The table of docs/evidence.md: damaged copies of the trained fixtures, and what each kind of evidence says of them.

``python -m tests.support.acceptance_faults`` writes it anew; ``tests/evidence/test_acceptance_faults.py`` holds it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mtpconvert.audit.api import audit
from mtpconvert.errors import MtpLostError
from mtpconvert.evidence.acceptance import encode
from mtpconvert.evidence.acceptance_model import load_drafter
from mtpconvert.evidence.acceptance_run import forced
from mtpconvert.evidence.acceptance_tally import Tally
from mtpconvert.evidence.prompts import built_in
from tests.support import trained
from tests.support.trained import DEEPSEEK, GLM, MTP, SECOND, Damage

PAGE = Path(__file__).resolve().parents[2] / "docs/evidence.md"
BEGIN, END = "<!-- fault table: written by tests/support/acceptance_faults.py -->", "<!-- end of the fault table -->"

FAULTS: dict[str, Damage] = {
    "halves of `eh_proj` exchanged": trained.halves(f"{MTP}eh_proj.weight", 1),
    "`enorm` and `hnorm` exchanged": trained.exchange_norms,
    "gate and up of MTP's experts exchanged": trained.gate_and_up(MTP),
    "MTP's experts in reverse order": trained.reverse_experts,
    "rows of MTP's router rotated by one": trained.rotate_rows(f"{MTP}mlp.gate.weight", 1),
    "MTP's router bias zero": trained.constant(f"{MTP}mlp.gate.e_score_correction_bias", 0),
    "MTP layer freshly initialised": trained.fresh,
    "MTP's block a copy of the last trunk layer": trained.block_of_the_last_trunk_layer,
    "head norm of MTP the trunk's": trained.head_norm_of_the_trunk,
    "`enorm` zero: the next token is not seen": trained.constant(f"{MTP}enorm.weight", 0),
    "`hnorm` zero: the trunk's state is not seen": trained.constant(f"{MTP}hnorm.weight", 0),
    "heads of MTP's query rotated by one": trained.rotate_rows(f"{MTP}self_attn.q_b_proj.weight", 24),
    "MTP rounded to FP8's three bits of mantissa": trained.three_bits_of_mantissa,
    "lowest bit of one weight of `eh_proj`": trained.one_bit(f"{MTP}eh_proj.weight", 0),
    "highest bit of the exponent of that weight": trained.one_bit(f"{MTP}eh_proj.weight", 14),
    "gate and up of the last trunk layer's experts exchanged": trained.gate_and_up("model.layers.2."),
    "MTP tensors dropped, count left in config": trained.drop(MTP),
}
GLM_FAULTS: dict[str, Damage] = {
    "GLM: halves of depth 1's `eh_proj` exchanged": trained.halves(f"{MTP}eh_proj.weight", 1),
    "GLM: halves of depth 2's `eh_proj` exchanged": trained.halves(f"{SECOND}eh_proj.weight", 1),
    "GLM: the two MTP layers exchanged": trained.exchange_depths,
}


@dataclass(frozen=True)
class Row:
    """``headers`` and ``bits``: the auditor's verdict against the original; ``by_position``: shares accepted, or None
    where nothing was run."""

    fault: str
    headers: str
    bits: str
    by_position: list[float] | None

    def line(self) -> str:
        shown = "not run: MTP missing" if self.by_position is None else ", ".join(f"{r:.0%}" for r in self.by_position)
        return f"| {self.fault} | {self.headers} | {self.bits} | {shown} |"


def acceptance(path: Path, length: int | None = None) -> Tally:
    """Teacher-forced greedy acceptance over the built-in prompts, in float32."""
    drafter = load_drafter(path, dtype="float32", device="cpu", draft_length=length)
    counted = Tally(drafter.draft_length)
    for prompt in built_in():
        counted.merge(forced(drafter, encode(drafter, prompt), 1.0)[0])
    return counted


def row(fault: str, original: Path, path: Path) -> Row:
    verdicts = []
    for level in ("headers", "bits"):
        verdicts.append("pass" if audit(original, path, level=level).verdict() == "pass" else "**fails**")
    try:
        rates: list[float] | None = [rate or 0.0 for rate in acceptance(path).by_position]
    except MtpLostError:
        rates = None
    return Row(fault, verdicts[0], verdicts[1], rates)


def rows(folder: Path) -> list[Row]:
    found = [row("none: DeepSeek-V3", DEEPSEEK, DEEPSEEK)]
    for number, (fault, damage) in enumerate(FAULTS.items()):
        found.append(row(fault, DEEPSEEK, trained.damaged(DEEPSEEK, folder / f"d{number}", damage)))
    found.append(row("none: GLM-4.5, two MTP layers", GLM, GLM))
    for number, (fault, damage) in enumerate(GLM_FAULTS.items()):
        found.append(row(fault, GLM, trained.damaged(GLM, folder / f"g{number}", damage)))
    return found


def table(found: list[Row]) -> str:
    head = ["| fault | inventory | bits | drafts accepted, by position |", "|---|---|---|---|"]
    return "\n".join([BEGIN, *head, *(one.line() for one in found), END])


def documented() -> list[Row]:
    """The rows that the page has."""
    inside = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found = []
    for line in inside.strip().splitlines()[2:]:
        fault, headers, bits, shown = (cell.strip() for cell in line.strip("|").split("|"))
        shares = re.findall(r"(\d+)%", shown)
        found.append(Row(fault, headers, bits, [int(share) / 100 for share in shares] if shares else None))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        new = table(rows(Path(folder)))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + new + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(new + "\n")


if __name__ == "__main__":
    main()
