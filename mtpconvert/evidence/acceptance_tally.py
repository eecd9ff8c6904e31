"""Counting drafts: how far each was accepted, rates with intervals, the change between two checkpoints. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RESAMPLES = 2000
Z95 = 1.959964  # 97.5th percentile of the normal distribution


@dataclass
class Tally:
    """``steps`` drafts of ``length`` tokens each; ``reached[k]``: how many had their first k + 1 tokens accepted.

    The counts are whole numbers where tokens were compared and sums of probabilities where those were computed.
    """

    length: int
    steps: float = 0.0
    reached: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = self.reached or [0.0] * self.length

    def add(self, accepted: int) -> None:
        """One draft whose first ``accepted`` tokens were accepted."""
        self.steps += 1
        for position in range(accepted):
            self.reached[position] += 1

    def merge(self, other: Tally) -> None:
        self.steps += other.steps
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]

    @property
    def accepted(self) -> float:
        """Accepted tokens."""
        return sum(self.reached)

    @property
    def drafted(self) -> float:
        """Drafted tokens."""
        return self.length * self.steps

    @property
    def rate(self) -> float | None:
        """Accepted of all drafted tokens, as vLLM's and SGLang's acceptance rate; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """E[A]: accepted tokens and the verifying pass's own one."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def by_position(self) -> list[float | None]:
        """Of the drafts accepted up to a position, the share accepted there too."""
        before = [self.steps, *self.reached[:-1]]
        return [now / of if of else None for now, of in zip(self.reached, before, strict=True)]


def total(tallies: Iterable[Tally], length: int) -> Tally:
    result = Tally(length)
    for tally in tallies:
        result.merge(tally)
    return result


def wilson(successes: float, trials: float) -> tuple[float, float] | None:
    """95 % interval of a share (E. B. Wilson, 1927), which stays inside [0, 1] for few trials; None for none."""
    if trials <= 0:
        return None
    share, square = successes / trials, Z95 * Z95
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = Z95 * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials)) / (1 + square / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def interval(tallies: Sequence[Tally], seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the rate over prompts: whole prompts are resampled, for the drafts of one text are alike."""
    return _bootstrap([(tally.accepted, tally.drafted, 0.0, 0.0) for tally in tallies], seed)


def change_interval(here: Sequence[Tally], base: Sequence[Tally], seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the rate here less the base's, over the same prompts in the same order."""
    rows = [(a.accepted, a.drafted, b.accepted, b.drafted) for a, b in zip(here, base, strict=True)]
    return _bootstrap(rows, seed)


def _bootstrap(rows: Sequence[tuple[float, float, float, float]], seed: int) -> tuple[float, float] | None:
    chooser = random.Random(seed)
    rows = [row for row in rows if row[1]]
    found = sorted(_difference(chooser.choices(rows, k=len(rows))) for _ in range(RESAMPLES if rows else 0))
    if not found:
        return None
    tail = round(RESAMPLES * 0.025)
    return found[tail], found[-tail - 1]


def _difference(rows: Sequence[tuple[float, float, float, float]]) -> float:
    accepted, drafted, base_accepted, base_drafted = (sum(row[column] for row in rows) for column in range(4))
    return accepted / drafted - (base_accepted / base_drafted if base_drafted else 0.0)
