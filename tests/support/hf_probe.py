"""The real forward of transformers, watched: what numbers do once the HF roles named and a test changed them."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers.cache_utils import MtpCache

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface import placements
from tests.support.hf_roles import Tensors, edited, inventory, mtp_model, saved, trunk_model

IDS = torch.tensor([[3, 1, 4, 15, 9, 2]])
ALL = slice(None)


@dataclass
class Seen:
    """What one forward showed: inputs and outputs by module name, and per layer what the attention function got."""

    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    query: list[torch.Tensor] = field(default_factory=list)
    key: list[torch.Tensor] = field(default_factory=list)
    value: list[torch.Tensor] = field(default_factory=list)
    attended: list[torch.Tensor] = field(default_factory=list)  # [batch, position, head, dim]


@torch.no_grad()
def look(case: str, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> Seen:
    model, seen = trunk_model(case, tensors), Seen()
    code = sys.modules[type(model).__module__]
    real = code.eager_attention_forward

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(module, query, key, value, *args, **kwargs)
        for trace, tensor in zip(
            (seen.query, seen.key, seen.value, seen.attended), (query, key, value, result[0]), strict=True
        ):
            trace.append(tensor)
        return result

    def note(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            seen.inputs[name] = args[0] if args else kwargs.get("hidden_states")
            seen.outputs[name] = output

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name), with_kwargs=True)
    with monkeypatch.context() as patch:
        patch.setattr(code, "eager_attention_forward", attention)
        seen.logits = model(IDS, use_cache=False).logits
    return seen


class Probe:
    """One case's checkpoint, how it looks unharmed, and how with some of its numbers changed."""

    def __init__(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case, self.monkeypatch = case, monkeypatch
        self.config, self.tensors = saved(case)
        self.placed: list[Placement] = placements(self.config, inventory(self.tensors))

    @functools.cached_property
    def plain(self) -> Seen:
        return look(self.case, self.tensors, self.monkeypatch)

    def after(self, *edits: tuple[Any, ...]) -> Seen:
        """``edits``: (place, role, index[, change]); zeroed when no change is given."""
        tensors = self.tensors
        for edit in edits:
            tensors = self.edit(tensors, *edit)
        return look(self.case, tensors, self.monkeypatch)

    def edit(self, tensors: Tensors, *edit: Any) -> Tensors:
        return edited(tensors, self.placed, *edit)

    def has(self, role: str) -> bool:
        return any(p.role.name == role for p in self.placed)

    def zero(self, *roles: str, where: Any) -> Seen:
        """With those of ``roles`` that the case has (biases are optional) zeroed at ``where`` in layer 0."""
        return self.after(*(("trunk.0", role, where) for role in roles if self.has(role)))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-5)


def only(changed: torch.Tensor, plain: torch.Tensor, where: Any) -> bool:
    """``changed`` is zero at ``where``, where ``plain`` is not, and equal to ``plain`` everywhere else."""
    expected = plain.clone()
    expected[where] = 0
    return same(changed, expected) and not (plain[where] == 0).any()


def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


class MtpProbe:
    """The real ``MtpLayer`` at ``depth``, as a function of an embedding and an incoming hidden state."""

    def __init__(self, depth: int, case: str = "deepseek") -> None:
        self.depth, self.case = depth, case
        config, self.tensors = saved(case)
        self.placed = placements(config, inventory(self.tensors))
        torch.manual_seed(5)
        self.embeddings, self.hidden = torch.randn(2, 2, 1, 4, config["hidden_size"])

    @torch.no_grad()
    def out(self, role: str | None, embedding: int, hidden: int, where: Any = ALL, depth: int | None = None) -> Any:
        """The layer's output on one of two embeddings and hidden states, with ``role`` zeroed at ``where``."""
        tensors = self.tensors
        if role is not None:
            place = f"mtp.{self.depth if depth is None else depth}"
            tensors = edited(tensors, self.placed, place, role, where)
        model, _ = mtp_model(self.case, tensors)
        joined: list[torch.Tensor] = []
        model.layers[self.depth].eh_proj.register_forward_hook(lambda module, args, output: joined.append(output))
        result = model.forward_layer(
            self.depth,
            self.hidden[hidden],
            torch.arange(4)[None],
            MtpCache(config=model.config),
            inputs_embeds=self.embeddings[embedding],
        )
        return result, joined[0]
