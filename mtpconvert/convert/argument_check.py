"""The ``args`` of a Megatron checkpoint against what the reference's config.json stands for.

Two kinds of argument matter on the way back. Those that the config decides too must agree, or the config.json that is
written would describe another model. Those that no config.json knows, but that change what a stored number means
without changing a name or a shape, must have the value that the mapping stands for. Everything else (optimizer, data,
parallel sizes, sequence length, dropout) says nothing about the weights and is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mtpconvert.convert.argument_names import DECIDED, MEANING, ONLY_WITH, SAME
from mtpconvert.convert.argument_rules import megatron_arguments
from mtpconvert.errors import ConfigError
from mtpconvert.mapping.dims import Scope

# What an integer says of each layer, from 0: 0.16.1 transformer_config.py:__post_init__,
# transformer/utils.py:is_layer_window_attention, gpt_layer_specs.py:get_gpt_decoder_layer_specs; 0.19.2
# experimental_attention_variant_module_specs.py:get_linear_attention_pattern
_EVERY: dict[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda layer, every: layer % every == 0,
    "no_rope_freq": lambda layer, every: (layer + 1) % every == 0,
    "window_attn_skip_freq": lambda layer, every: (layer + 1) % every != 0,
    "linear_attention_freq": lambda layer, every: (layer + 1) % every != 0,
}
_BY_NAMES = (("mtp_num_layers",),)  # known whatever a mapping says
_NO_RULES = (
    "the mapping has no [arguments]: of the checkpoint's, only those that change what stored numbers mean were checked,"
    " and the number of MTP layers"
)


@dataclass(frozen=True, slots=True)
class _Said:
    """``problems`` found so far, ``spelled`` as for ``check_arguments``, the reference's number of ``layers``."""

    problems: list[str]
    spelled: Mapping[str, str]
    layers: int


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """``problems``: one sentence each. ``unchecked``: arguments that the checkpoint does not carry."""

    problems: list[str]
    unchecked: list[str]

    def require(self, where: str) -> None:
        """Raise ConfigError with every problem unless there is none."""
        if self.problems:
            raise ConfigError(
                "the checkpoint's Megatron arguments contradict the reference:\n    " + "\n    ".join(self.problems),
                where=where,
                next_step="give the --reference whose config.json describes this model; weights stored in another "
                "arrangement cannot be converted by this mapping",
            )


def check_arguments(
    checkpoint: Mapping[str, Any] | None,
    rules: Mapping[str, Any],
    scope: Scope,
    *,
    where: str,
    spelled: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Check the ``args`` of the checkpoint ``where``; notes on what could not be checked.

    ``rules`` and ``scope`` as for ``megatron_arguments``, of the reference. ``spelled``: what the file calls an
    argument, where that is another name. Raises ConfigError naming every argument
    that contradicts it, and what ``megatron_arguments`` raises.
    """
    expected = megatron_arguments(rules, scope)
    if checkpoint is None:
        return [
            "the checkpoint carries no Megatron arguments: only names and shapes were checked against the reference"
        ]
    check = compare_arguments(checkpoint, expected, spelled, decided=DECIDED if rules else _BY_NAMES)
    check.require(where)
    notes = [] if rules else [_NO_RULES]
    if check.unchecked:
        notes.append(
            f"Megatron arguments that the checkpoint does not carry, so unchecked: {', '.join(check.unchecked)}"
        )
    return notes


def compare_arguments(
    checkpoint: Mapping[str, Any],
    expected: Mapping[str, Any],
    spelled: Mapping[str, str] = MappingProxyType({}),
    *,
    decided: Sequence[tuple[str, ...]] = DECIDED,
) -> ArgumentCheck:
    """Compare the checkpoint's ``args`` with ``megatron_arguments`` of the reference's config.

    ``checkpoint`` may hold anything that training put there, unreadable placeholders included; only the arguments
    above are looked at, those of the first kind as far as ``decided`` goes. ``expected`` as ``megatron_arguments``
    gives it, with ``mtp_num_layers`` of the reference.
    """
    layers = expected.get("num_layers")
    said = _Said([], spelled, layers if isinstance(layers, int) else 0)
    unchecked: list[str] = []
    for names in decided:
        if not _matters(names[0], expected):
            continue
        present = [name for name in names if name in checkpoint]
        if not present and names[0] in expected:  # two rotary bases are no argument of either side
            unchecked.append(names[0])
        for name in present:
            _compare(name, checkpoint[name], expected.get(names[0]), said)
    for name, stands_for in MEANING.items():
        if name in checkpoint:
            _compare(name, checkpoint[name], expected.get(name, stands_for), said)
        elif SAME.get(name) not in checkpoint:
            unchecked.append(name)
    _vocabulary(checkpoint, expected, said.problems)
    return ArgumentCheck(said.problems, unchecked)


def _matters(name: str, expected: Mapping[str, Any]) -> bool:
    if name == "ffn_hidden_size":  # of dense layers, where there are any
        pattern = _normal("moe_layer_freq", expected.get("moe_layer_freq"), expected["num_layers"])
        return expected.get("num_experts") is None or not pattern or not all(pattern)
    if name in ONLY_WITH:
        other, value = ONLY_WITH[name]
        if expected.get(other, False) != value:
            return False
    if name.startswith(("rotary_scaling_factor", "mscale")):
        return expected.get("rope_type") == "yarn" or expected.get("position_embedding_type") == "yarn"
    if name.startswith("moe_"):
        return expected.get("num_experts") is not None
    return True


def _compare(name: str, found: Any, wanted: Any, said: _Said) -> None:
    called = f"{name} (from {said.spelled[name]})" if name in said.spelled else name
    if not _is_plain(found):
        said.problems.append(f"{called} is {found!r}, which cannot be read; the reference stands for {wanted!r}")
    elif _normal(name, found, said.layers) != _normal(name, wanted, said.layers):
        said.problems.append(f"{called} is {found!r}; the reference stands for {wanted!r}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(type(item) in (int, bool) for item in value)
    return value is None or type(value) in (str, int, float, bool)


def _normal(name: str, value: Any, layers: int) -> Any:
    """One spelling per meaning: None is off or none (False == 0), sequences are lists, one number for all of ``layers``
    is a list, and experts without a factor have the factor one.
    """
    if name == "moe_router_topk_scaling_factor" and value is None:
        return 1.0
    if name in _EVERY and type(value) is int and value > 0:
        return [int(_EVERY[name](layer, value)) for layer in range(layers)]
    if isinstance(value, list | tuple):
        return [int(item) for item in value]
    return False if value is None else value


def _vocabulary(checkpoint: Mapping[str, Any], expected: Mapping[str, Any], problems: list[str]) -> None:
    rows, needed = checkpoint.get("padded_vocab_size"), expected.get("vocab_size")
    if type(rows) is int and type(needed) is int and rows < needed:
        problems.append(f"padded_vocab_size is {rows}; the reference's vocabulary has {needed} tokens")
