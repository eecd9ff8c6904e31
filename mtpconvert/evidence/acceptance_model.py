"""The checkpoint that drafts: trunk and MTP as transformers runs them, set to the length of a draft."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtpconvert.errors import UsageError
from mtpconvert.evidence.transformers_model import load, load_tokenizer
from mtpconvert.stores.detect import detect


@dataclass
class Drafter:
    """``main``: the causal LM. ``mtp``: an ``MtpModel`` with as many layers as tokens are drafted at once; ``layers``
    of them are the checkpoint's, the rest is the last one again."""

    path: Path
    main: Any
    mtp: Any
    layers: int
    dtype: str
    device: str

    @property
    def draft_length(self) -> int:
        return len(self.mtp.layers)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's own. Raises UsageError where there is none that works without remote code."""
        return load_tokenizer(self.path, "add one, or give prompts as token ids: --prompts FILE.jsonl with 'tokens'")


def load_drafter(path: Path, *, dtype: str, device: str, draft_length: int | None) -> Drafter:
    """Load trunk and MTP. ``draft_length`` None: one token for each MTP layer. ``dtype``: float32 or bfloat16.

    Raises NotRunError with the reason where transformers cannot run this MTP, MtpLostError where MTP tensors are
    missing, CheckpointError where trunk tensors are.
    """
    import transformers

    found = detect(path)
    if found.kind != "hf":
        raise UsageError(
            f"{path} is {found.kind}; transformers runs Hugging Face checkpoints only",
            next_step="convert it first: mtpconvert mcore2hf",
        )
    model = load(path, dtype=dtype, device=device, evidence="draft acceptance", needs_mtp=True)
    given = model.main.generation_config
    generation_config: Any = transformers.GenerationConfig
    model.main.generation_config = generation_config(
        eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id or 0
    )
    drafter = Drafter(path, model.main, model.mtp, model.layers, dtype, device)
    _set_length(drafter, draft_length or model.layers)
    return drafter


def _set_length(drafter: Drafter, length: int) -> None:
    """Draft ``length`` tokens at once: the first layers of the checkpoint, or its last layer again and again, with the
    same parameters and a cache slot of its own each time."""
    mtp = drafter.mtp
    layers = list(mtp.layers)[:length]
    while len(layers) < length:
        memo = {id(parameter): parameter for parameter in layers[-1].parameters()}
        again = copy.deepcopy(layers[-1], memo)
        for module in again.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = len(layers)
        layers.append(again)
    mtp.layers = type(mtp.layers)(layers)
    mtp.num_mtp_layers = length
    text = drafter.main.config.get_text_config()
    for key in ("mtp_layer_types", "mtp_mlp_layer_types"):
        kinds = getattr(text, key, None)
        if kinds is not None:
            setattr(text, key, [*kinds[:length], *kinds[-1:] * (length - len(kinds))])
    text.num_mtp_layers = length
    mtp.config = drafter.main.config.get_mtp_config()
