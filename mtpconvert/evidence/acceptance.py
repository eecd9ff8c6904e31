"""Draft acceptance of a checkpoint's MTP: measured per prompt, summed per position and bucket, compared with a base.

What is run is transformers' own MTP, never code of this tool: a checkpoint that it cannot run is refused by
``acceptance_model`` with the reason, so no report says more than was exercised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtpconvert.errors import UsageError
from mtpconvert.evidence.acceptance_model import Drafter, load_drafter
from mtpconvert.evidence.acceptance_run import Divergence, Step, divergence, forced, generate
from mtpconvert.evidence.acceptance_tally import Tally, change_interval, total
from mtpconvert.evidence.prompts import Prompt
from mtpconvert.evidence.transformers_model import transformers_version

LENGTHS = (16, 64, 256)  # output positions at which a new bucket begins
MODES = {
    "forced_greedy": "teacher-forced, greedy",
    "forced_sampled": "teacher-forced, sampled",
    "free_greedy": "free generation, greedy",
    "free_sampled": "free generation, sampled",
}


@dataclass(frozen=True)
class AcceptanceOptions:
    """Options of ``accept`` under the names of its flags."""

    draft_length: int | None = None
    new_tokens: int = 64
    temperature: float = 1.0
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0


@dataclass
class PromptResult:
    """``tallies``: mode -> length bucket -> counts; teacher-forced modes have the one bucket ``""``."""

    kind: str
    tallies: dict[str, dict[str, Tally]]
    generated: int
    divergence: Divergence | None

    def of(self, mode: str, length: int, bucket: str | None = None) -> Tally:
        buckets = self.tallies[mode]
        return total([t for name, t in buckets.items() if bucket is None or name == bucket], length)


@dataclass
class AcceptanceReport:
    """``layers`` of the checkpoint drafted ``draft_length`` tokens at once; ``version`` is transformers'."""

    path: Path
    model_type: str
    layers: int
    draft_length: int
    options: AcceptanceOptions
    version: str
    results: list[PromptResult] = field(default_factory=list)

    def per_prompt(self, mode: str) -> list[Tally]:
        return [result.of(mode, self.draft_length) for result in self.results]

    def tally(self, mode: str, *, kind: str | None = None, bucket: str | None = None) -> Tally:
        chosen = [result for result in self.results if kind is None or result.kind == kind]
        return total([result.of(mode, self.draft_length, bucket) for result in chosen], self.draft_length)

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(result.kind for result in self.results))

    @property
    def divergences(self) -> list[tuple[int, Divergence]]:
        """(prompt, where speculative output leaves plain greedy output)."""
        return [(n, result.divergence) for n, result in enumerate(self.results) if result.divergence is not None]

    @property
    def exact(self) -> bool:
        """Whether the outputs have to be equal. In bfloat16 a pass over several tokens rounds otherwise than a pass
        over one, which parts ties."""
        return self.options.dtype == "float32"

    @property
    def failures(self) -> list[str]:
        """What is wrong with this checkpoint alone, as sentences."""
        if self.exact and self.divergences:
            return [f"speculative output differs from greedy output on {len(self.divergences)} prompts, in float32"]
        return []


@dataclass(frozen=True)
class Change:
    """A mode's rate here and in the base, over the same tokens. ``interval``: 95 %, of here less base."""

    mode: str
    here: float
    base: float
    interval: tuple[float, float]

    @property
    def drop(self) -> float:
        return self.base - self.here


def measure(
    path: Path,
    prompts: Sequence[Prompt],
    options: AcceptanceOptions,
    advance: Callable[[int, int], None] = lambda _done, _of: None,
) -> AcceptanceReport:
    """Run every prompt through the checkpoint ``path``. Raises as ``load_drafter`` does, UsageError for prompts."""
    drafter = load_drafter(path, dtype=options.dtype, device=options.device, draft_length=options.draft_length)
    report = AcceptanceReport(
        path, drafter.main.config.model_type, drafter.layers, drafter.draft_length, options, transformers_version()
    )
    for number, prompt in enumerate(prompts):
        report.results.append(_one(drafter, prompt, encode(drafter, prompt), options, options.seed + number))
        advance(number + 1, len(prompts))
    return report


def encode(drafter: Drafter, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Raises UsageError without a tokenizer, or for ids that the model does not have."""
    tokens = list(drafter.tokenizer(prompt.text)["input_ids"] if prompt.tokens is None else prompt.tokens)
    size = drafter.main.get_input_embeddings().weight.shape[0]
    if not tokens or max(tokens) >= size:
        raise UsageError(
            f"a prompt has {len(tokens)} tokens, the largest {max(tokens, default=0)}; the model has {size} tokens",
            where=str(drafter.path),
            next_step="the tokenizer or the ids are another model's",
        )
    return tokens


def _one(drafter: Drafter, prompt: Prompt, tokens: list[int], options: AcceptanceOptions, seed: int) -> PromptResult:
    greedy, sampled = forced(drafter, tokens, options.temperature)
    plain, _ = generate(drafter, tokens, options.new_tokens, speculative=False, temperature=None, seed=seed)
    output, steps = generate(drafter, tokens, options.new_tokens, speculative=True, temperature=None, seed=seed)
    _, throws = generate(
        drafter, tokens, options.new_tokens, speculative=True, temperature=options.temperature, seed=seed
    )
    tallies = {
        "forced_greedy": {"": greedy},
        "forced_sampled": {"": sampled},
        "free_greedy": _bucketed(steps, drafter.draft_length, lambda step: _prefix(step.agreed)),
        # the last draft of a sampled output may have been cut short by its end: whether it was accepted is not known
        "free_sampled": _bucketed(throws[:-1], drafter.draft_length, lambda step: step.kept),
    }
    return PromptResult(prompt.kind, tallies, len(plain), divergence(drafter, tokens, plain, output))


def _prefix(agreed: Iterable[bool]) -> int:
    """How many of ``agreed`` are true before the first that is not."""
    count = 0
    for one in agreed:
        if not one:
            break
        count += 1
    return count


def _bucketed(steps: Iterable[Step], length: int, accepted: Callable[[Step], int]) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    for step in steps:
        tallies.setdefault(length_bucket(step.at), Tally(length)).add(accepted(step))
    return tallies


def length_bucket(at: int) -> str:
    """The name of the stretch of output that token ``at`` (0 is the first) belongs to."""
    first = 0
    for bound in LENGTHS:
        if at < bound:
            return f"{first + 1}-{bound}"
        first = bound
    return f"{first + 1}+"


def length_buckets() -> list[str]:
    return [length_bucket(at) for at in (0, *LENGTHS)]


def changes(here: AcceptanceReport, base: AcceptanceReport) -> list[Change]:
    """The change of every mode in which both drafted something."""
    found = []
    for mode in MODES:
        ours, theirs = here.per_prompt(mode), base.per_prompt(mode)
        rates = total(ours, here.draft_length).rate, total(theirs, base.draft_length).rate
        bounds = change_interval(ours, theirs)
        if rates[0] is not None and rates[1] is not None and bounds is not None:
            found.append(Change(mode, rates[0], rates[1], bounds))
    return found


def dropped(found: Sequence[Change], max_drop: float) -> list[str]:
    """Sentences for the greedy modes in which a drop of more than ``max_drop`` cannot be ruled out.

    The test is one of non-inferiority: the whole interval has to lie above ``-max_drop``. Too few prompts fail, too.
    """
    sentences = []
    for change in found:
        low, high = change.interval
        if change.mode.endswith("greedy") and low < -max_drop:
            certain = "fell by more than" if high < -max_drop else "is not shown to have fallen by at most"
            sentences.append(
                f"{MODES[change.mode]}: acceptance {certain} {max_drop:.1%}: {change.base:.1%} -> {change.here:.1%},"
                f" change {low:+.1%} to {high:+.1%}"
            )
    return sentences
