"""Megatron arguments against the other side's: what changes the meaning of stored numbers, and what must agree."""

from __future__ import annotations

from typing import Any

from mtpconvert.audit.computed import Contradiction, contradictions, rotates_adjacent
from mtpconvert.audit.describe import Description
from mtpconvert.audit.facts import COMPARED, facts_from_config
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.readers.side import Side


def check_arguments(left: Side, right: Side, one: Description, two: Description) -> list[Finding]:
    """Findings about the arguments of each Megatron side; a side without arguments has none to check.

    ``one`` and ``two`` are the descriptions of ``left`` and ``right``.
    """
    if left.is_huggingface and right.is_huggingface:
        return []
    from mtpconvert.audit.less_one import ARGUMENT as LESS_ONE
    from mtpconvert.audit.roles.megatron import meaning_arguments
    from mtpconvert.audit.roles.megatron_facts import Facts

    found: list[Finding] = []
    for side, other, about in ((left, right, two), (right, left, one)):
        if side.is_huggingface or side.arguments is None:
            continue
        if other.is_huggingface:
            found += _disagreements(side, about.facts if about.known else facts_from_config(other.config or {}))
            found += [_computed(side, fault) for fault in contradictions(side.arguments, other.config or {})]
            found += [
                finding("argument-mismatch", f"{side.called(name)} = {value!r}: {why}", side=side.label, key=name)
                for name, value, why in meaning_arguments(side.arguments)
                if not _meant(name, value, other.config or {})
            ]
    if not left.is_huggingface and not right.is_huggingface and left.arguments and right.arguments:
        before, after = (
            {name: value for name, value, _ in meaning_arguments(said)} | {LESS_ONE: Facts(said).zero_centred}
            for said in (left.arguments, right.arguments)
        )
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                text = (
                    f"{name} was {before.get(name)!r} and is {after.get(name)!r}: the same numbers mean something else"
                )
                found.append(finding("argument-mismatch", text, key=name))
        found += _disagreements(right, {key: left.arguments[key] for key in COMPARED if key in left.arguments})
    return found


def _computed(side: Side, fault: Contradiction) -> Finding:
    text = f"{side.called(fault.argument)} is {fault.said!r}, config.json says {fault.wanted!r}: {fault.why}"
    return finding("argument-mismatch", text, side=side.label, key=fault.argument)


def _meant(name: str, value: Any, config: dict[str, Any]) -> bool:
    """Whether the model itself asks for the value: DeepSeek rotates pairs, gpt-oss multiplies by up + 1
    (modeling_gpt_oss.py: ``GptOssExperts._apply_gate``), and Megatron must be told so."""
    if name == "rotary_interleaved":
        return rotates_adjacent(config) == bool(value)
    return name == "glu_linear_offset" and config.get("model_type") == "gpt_oss" and float(value) == 1.0


def _disagreements(side: Side, wanted: dict[str, Any]) -> list[Finding]:
    have = side.arguments or {}
    found: list[Finding] = []

    def fault(name: str, why: str) -> None:
        text = f"{side.called(name)} is {have.get(name)!r}, it should be {wanted[name]!r}: {why}"
        mtp = name.startswith("mtp") or None
        found.append(finding("argument-mismatch", text, side=side.label, key=name, mtp=mtp))

    for name, why in COMPARED.items():
        silent = name not in have if name == "experimental_attention_variant" else have.get(name) is None
        if name not in wanted or silent or (name.startswith("moe_") and not have.get("num_experts")):
            continue
        if name == "num_query_groups" and have.get("group_query_attention") is False:
            continue
        if _expanded(name, have[name], have) != _expanded(name, wanted[name], have):
            fault(name, why)
    if wanted.get("mtp_num_layers") and not have.get("mtp_num_layers"):
        fault("mtp_num_layers", "no MTP layer is built, so none is loaded")
    return found


def _expanded(name: str, value: Any, have: dict[str, Any]) -> Any:
    """What is said of every layer as a list of zeros and ones, everything else as it stands."""
    if name.endswith("_layer_freq") or name == "linear_attention_freq":
        layers = range(have.get("num_layers") or 0)
        if name == "moe_layer_freq" and isinstance(value, int) and value > 0:
            return [int(layer % value == 0) for layer in layers]
        if isinstance(value, int) and value > 0:  # gpt/experimental_attention_variant_module_specs.py
            return [int((layer + 1) % value != 0) for layer in layers]
    return list(value) if isinstance(value, tuple) else value
