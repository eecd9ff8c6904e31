"""What MTP is worth: the speed-up of decoding that an acceptance rate buys, from a checkpoint's headers alone.

    speed-up = E[A] x C_decode / (C_draft + C_verify + C_overhead)

E[A]: tokens that one step yields, the verifying pass's own one included. C: bytes read, since decoding waits for
memory. The model leaves out the KV cache (short contexts), communication and arithmetic, so it says nothing where
batches are so large that arithmetic decides. Routing is taken to be even and independent of token to token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.errors import UsageError
from mtpconvert.evidence.reads import Reads, reads_of
from mtpconvert.tensors import Inventory

BATCHES = (1, 8, 64, 512)
RATES = (0.7, 0.8, 0.85, 0.9)
ASSUMPTIONS = (
    "a pass takes as long as reading each weight that it needs once; KV cache, communication and arithmetic left out",
    "a token goes to its experts evenly and independently of the others, so a verified draft token reads experts of its"
    " own until all are read anyway",
    "every draft reads its MTP layer and the whole output head once more; the last MTP layer drafts again where the"
    " draft is longer than there are layers",
    "each drafted token is accepted with the same probability, whatever its position",
)


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """What ``inspect --speed`` prints: reads of the trunk and of each MTP layer, and the model over them."""

    trunk: Reads
    mtp: tuple[Reads, ...]

    @property
    def draft_share(self) -> float:
        """Cost of one draft of one token relative to decoding one token; 0.0 without MTP."""
        return self.mtp[0].nbytes(1) / self.trunk.nbytes(1) if self.mtp else 0.0

    def speed_up(self, rate: float, *, draft_length: int = 1, batch: int = 1, overhead: float = 0.0) -> float:
        """Tokens per second with MTP relative to without, for ``batch`` sequences decoded together.

        ``overhead``: C_overhead as a share of C_decode. 1.0 where there is no MTP layer to draft with.
        """
        if not self.mtp:
            return 1.0
        decode = self.trunk.nbytes(batch)
        layers = [self.mtp[min(k, len(self.mtp) - 1)] for k in range(draft_length)]
        draft = sum(layer.nbytes(batch) for layer in layers)
        verify = self.trunk.nbytes(batch * (draft_length + 1))
        return expected_tokens(rate, draft_length) * decode / (draft + verify + overhead * decode)

    def document(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return {
            "bytes_per_token": {"trunk": _document(self.trunk), "mtp": [_document(reads) for reads in self.mtp]},
            "draft_relative_to_decode": round(self.draft_share, 4),
            "formula": "E[A] x C_decode / (C_draft + C_verify + C_overhead)",
            "assumptions": list(ASSUMPTIONS),
            "modelled_speed_up": [
                {"batch": batch, "acceptance": rate, "speed_up": round(self.speed_up(rate, batch=batch), 3)}
                for batch in BATCHES
                for rate in RATES
            ]
            if self.mtp
            else [],
        }


def speed_report(config: Mapping[str, Any], inventory: Inventory) -> SpeedReport:
    """The report for one checkpoint's config (or Megatron arguments) and headers. Raises ConfigError."""
    trunk, mtp = reads_of(config, inventory)
    return SpeedReport(trunk, mtp)


def expected_tokens(rate: float, draft_length: int) -> float:
    """E[A]: 1 + rate + rate^2 + ... for drafts accepted one after another with the same probability."""
    if not 0 <= rate <= 1:
        raise UsageError(f"an acceptance rate of {rate} is no probability", next_step="give a number from 0 to 1")
    return float(sum(rate**k for k in range(draft_length + 1)))


def lines_of(report: SpeedReport) -> list[str]:
    """The report in words, a line each."""
    trunk = report.trunk
    lines = [
        f"one decoded token reads {_gb(trunk.nbytes(1))}: dense {_gb(trunk.dense)}, shared experts {_gb(trunk.shared)},"
        f" active experts {_gb(trunk.active_experts)}, head {_gb(trunk.head)}"
    ]
    if not report.mtp:
        return [*lines, "no MTP layer is present: nothing drafts, every token costs a whole pass"]
    first = report.mtp[0]
    lines += [
        f"one drafted token reads {_gb(first.nbytes(1))} more ({report.draft_share:.1%} of that): dense"
        f" {_gb(first.dense)}, shared experts {_gb(first.shared)}, active experts {_gb(first.active_experts)},"
        f" head {_gb(first.head)}",
        "modelled speed-up, drafting one token: E[A] x C_decode / (C_draft + C_verify + C_overhead), C_overhead = 0:",
        "  sequences at once " + "".join(f"  acceptance {rate:.0%}" for rate in RATES),
    ]
    for batch in BATCHES:
        cells = "".join(f"{report.speed_up(rate, batch=batch):15.2f}x" for rate in RATES)
        lines.append(f"  {batch:17}{cells}")
    lines += [f"  assumed: {assumption}" for assumption in ASSUMPTIONS]
    return lines


def cost_of_dropping(report: SpeedReport, rate: float = 0.85) -> str:
    """A sentence for whoever is about to lose MTP: the throughput that goes with it, for few and for many users."""
    few, many = (report.speed_up(rate, batch=batch) for batch in (BATCHES[0], BATCHES[-1]))
    return (
        f"without MTP, decoding is modelled at {1 / few:.0%} ({BATCHES[0]} sequence at once) to {1 / many:.0%}"
        f" ({BATCHES[-1]} at once) of the tokens per second that MTP gives at {rate:.0%} acceptance"
    )


def _document(reads: Reads) -> dict[str, int]:
    return {
        "dense": reads.dense,
        "shared_experts": reads.shared,
        "active_experts": reads.active_experts,
        "head": reads.head,
        "embedding_row": reads.embedding_row,
        "total": round(reads.nbytes(1)),
    }


def _gb(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
