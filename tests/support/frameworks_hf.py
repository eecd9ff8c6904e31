"""Logits of the real transformers (5.24), float32 and eager: trunk, MTP through ``MtpModel``, greedy continuation."""

import warnings
from pathlib import Path
from typing import Any

import torch


def hf_model(directory: Path) -> Any:
    """The causal language model of ``directory``, in float32 with eager attention and eager experts.

    Raises AssertionError when transformers found a weight missing, newly initialised, or of another shape.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


@torch.no_grad()
def hf_trunk_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab]."""
    return hf_model(directory)(tokens).logits


def hf_mtp_model(model: Any) -> Any:
    """transformers' ``MtpModel`` of the MTP layers beside ``model`` on disk; it raises when one tensor is missing.

    It finds them by ``_keys_to_ignore_on_load_unexpected``, whose layer number is fixed per class (61 for DeepSeek-V3),
    so ``model`` itself is given this checkpoint's for as long as they load.
    """
    first, count = model.config.num_hidden_layers, model.config.num_mtp_layers
    before = model._keys_to_ignore_on_load_unexpected
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*" for layer in range(first, first + count)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers.modeling_layers import MtpModel

            mtp = MtpModel.from_pretrained(model)
    finally:
        model._keys_to_ignore_on_load_unexpected = before
    return mtp.float().eval()


@torch.no_grad()
def hf_mtp_logits(directory: Path, tokens: torch.Tensor, depth: int = 1) -> torch.Tensor:
    """[b, s - depth, vocab] of the ``depth``-th MTP layer (1 is the first).

    Layer k gets the hidden state of the layer before (k = 1: of the trunk, final and normed) at positions 0..s-k-1 and
    the embeddings of the tokens k later, as ``MtpModel.forward`` rolls them.
    """
    model = hf_model(directory)
    mtp = hf_mtp_model(model)
    hidden = model.model(tokens).last_hidden_state
    batch, length = tokens.shape
    for layer in range(depth):
        hidden = hidden[:, : length - layer - 1]
        positions = torch.arange(layer + 1, length).expand(batch, -1)
        hidden = mtp.forward_layer(layer, hidden, positions, None, input_ids=tokens[:, layer + 1 :])
    return mtp.shared_head(hidden)


@torch.no_grad()
def hf_greedy(model: Any, tokens: torch.Tensor, n: int) -> list[int]:
    """``n`` tokens after ``tokens`` [1, s], each the argmax of a full forward."""
    out: list[int] = []
    for _ in range(n):
        chosen = int(model(tokens).logits[0, -1].argmax())
        out.append(chosen)
        tokens = torch.cat([tokens, torch.tensor([[chosen]])], dim=1)
    return out
