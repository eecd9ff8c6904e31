"""Drafting: over a given text in one pass, and in generation as transformers runs it (``generate(use_mtp=True)``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mtpconvert.evidence.acceptance_model import Drafter
from mtpconvert.evidence.acceptance_tally import Tally


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where speculative output leaves plain greedy output. ``gap``: between the trunk's two best logits there."""

    at: int
    plain: int | None
    speculative: int | None
    gap: float


@dataclass(frozen=True, slots=True)
class Step:
    """One draft in generation. ``at``: tokens generated before it. ``agreed``: by position, whether the trunk's own
    greedy choice is the drafted token. ``kept``: drafted tokens that entered the output."""

    at: int
    agreed: tuple[bool, ...]
    kept: int


def forced(drafter: Drafter, tokens: list[int], temperature: float) -> tuple[Tally, Tally]:
    """(greedy, sampled) over a text: at each position t, depth k drafts the token after t + k from the text itself.

    Greedy: the draft is the trunk's argmax there. Sampled: the probability sum(min(p, q)) with which speculative
    sampling (arXiv:2211.17192, corollary 3.6) accepts a draft from q where the trunk says p; no dice are thrown.
    """
    import torch

    length = drafter.draft_length
    count = len(tokens) - length
    greedy, sampled = Tally(length), Tally(length)
    if count < 1:
        return greedy, sampled
    ids = torch.tensor([tokens], device=drafter.device)
    with torch.no_grad():
        output = drafter.main(ids, output_hidden_states=True, use_cache=False)
        logits, hidden = output.logits[0].float(), output.hidden_states[-1]
        alive = torch.ones(count, dtype=torch.bool, device=ids.device)
        chance = torch.ones(count, dtype=torch.float64, device=ids.device)
        greedy.steps = sampled.steps = float(count)
        for depth in range(1, length + 1):
            hidden = hidden[:, : len(tokens) - depth]
            positions = torch.arange(depth, len(tokens), device=ids.device)[None]
            hidden = drafter.mtp.forward_layer(depth - 1, hidden, positions, None, input_ids=ids[:, depth:])
            draft = drafter.mtp._project_to_logits(hidden)[0, :count].float()
            trunk = logits[depth : depth + count]
            alive &= draft.argmax(-1) == trunk.argmax(-1)
            p, q = ((one / temperature).double().softmax(-1) for one in (trunk, draft))
            chance = chance * torch.minimum(p, q).sum(-1)
            greedy.reached[depth - 1] = float(alive.sum())
            sampled.reached[depth - 1] = float(chance.sum())
    return greedy, sampled


def generate(
    drafter: Drafter, tokens: list[int], new_tokens: int, *, speculative: bool, temperature: float | None, seed: int
) -> tuple[list[int], list[Step]]:
    """(generated tokens, the drafts on the way). ``temperature`` None: greedy."""
    import torch
    import transformers

    generation_config: Any = transformers.GenerationConfig
    ids = torch.tensor([tokens], device=drafter.device)
    ends = drafter.main.generation_config
    options = generation_config(
        max_new_tokens=new_tokens,
        do_sample=temperature is not None,
        temperature=temperature,
        top_k=0 if temperature is not None else None,
        eos_token_id=ends.eos_token_id,
        pad_token_id=ends.pad_token_id,
        use_mtp=speculative or None,
    )
    torch.manual_seed(seed)
    with torch.no_grad(), _recording(drafter, len(tokens)) as steps:
        output = drafter.main.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return output[0, len(tokens) :].tolist(), steps


@contextmanager
def _recording(drafter: Drafter, prompt: int) -> Iterator[list[Step]]:
    """Have ``generate`` draft with the layers that are loaded already, and note each draft and what became of it."""
    import transformers

    utils: Any = transformers.generation.utils
    mtp_model: Any = transformers.modeling_layers.MtpModel
    steps: list[Step] = []
    theirs: Any = utils.MTPCandidateGenerator
    loader = mtp_model.__dict__["from_pretrained"]

    class Recording(theirs):  # type: ignore[misc]
        def get_candidates(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            candidates, logits = super().get_candidates(input_ids, *args, **kwargs)
            self._start, self._drafted = input_ids.shape[1], candidates[0, input_ids.shape[1] :]
            return candidates, logits

        def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
            if count := len(self._drafted):
                agreed = scores[0, :count].argmax(-1) == self._drafted.to(scores.device)
                steps.append(Step(self._start - prompt, tuple(agreed.tolist()), int(num_matches)))
            super().update_candidate_strategy(input_ids, scores, num_matches)

    utils.MTPCandidateGenerator = Recording
    mtp_model.from_pretrained = classmethod(lambda _cls, *_args, **_kwargs: drafter.mtp)
    try:
        yield steps
    finally:
        utils.MTPCandidateGenerator = theirs
        mtp_model.from_pretrained = loader


def divergence(drafter: Drafter, prompt: list[int], plain: list[int], speculative: list[int]) -> Divergence | None:
    """The first token at which two outputs differ (one may end before the other), or None."""
    if plain == speculative:
        return None
    import torch

    pairs = enumerate(zip(plain, speculative, strict=False))
    at = next((n for n, (one, other) in pairs if one != other), min(len(plain), len(speculative)))
    ids = torch.tensor([[*prompt, *plain[:at]]], device=drafter.device)
    with torch.no_grad():
        first, second = drafter.main(ids, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
    tokens = [output[at] if at < len(output) else None for output in (plain, speculative)]
    return Divergence(at, tokens[0], tokens[1], first - second)
