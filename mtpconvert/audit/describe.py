"""A side with its meanings: what its framework's half of the description says about each tensor, checked as a cover."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtpconvert.audit.cover import check_cover
from mtpconvert.audit.facts import facts_of
from mtpconvert.audit.findings import Finding
from mtpconvert.audit.mtp import published_without, side_kind
from mtpconvert.audit.packed import BLOCKS
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.errors import ConfigError, MtpConvertError


@dataclass(slots=True)
class Description:
    """``usable``: placements on tensors that are there, an exact cover of each of them. ``absent``: placements on
    tensors that are not there (copies left out). ``why_not``: why there is no description at all; ``contradiction``:
    because the config, or the arguments, of a known architecture make no sense. ``dialect``: "bridge" where a
    Megatron checkpoint has what only Megatron-Bridge's modules have, else ""."""

    usable: list[Placement] = field(default_factory=list)
    absent: list[Placement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    why_not: str = ""
    contradiction: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    dialect: str = ""

    @property
    def known(self) -> bool:
        return not self.why_not

    def places_of(self) -> dict[str, str]:
        """Tensor name -> place ("mtp.0") for every placement, absent ones too."""
        return {p.block.tensor: p.role.place for p in (*self.usable, *self.absent)}


def describe(side: Side, other: Side, told: dict[str, Any] | None = None) -> Description:
    """The description of ``side``; what the other side says fills in what a Megatron checkpoint does not.

    ``told``: the facts of the other side's own description, where that is a Hugging Face checkpoint.
    """
    if (kind := side_kind(side)).whole:  # its config may name the architecture that its layers are taken from
        return Description(why_not=f"a draft model of {kind.many}, which belongs to a target")
    if side.kind == "gguf":
        return Description(why_not="a GGUF file, which can be compared with another one only")
    dialect = ""
    try:
        if side.is_huggingface:
            from mtpconvert.audit.roles import huggingface

            placements = huggingface.placements(side.config or {}, side.inventory)
            facts = {} if other.is_huggingface else facts_of(side.config or {}, placements)
            if published_without(side) and not any(p.role.is_mtp for p in placements):
                facts.pop("mtp_num_layers", None)
        else:
            from mtpconvert.audit.roles import megatron

            facts = megatron_facts(side, other, told or {})
            placements = megatron.placements(facts, side.inventory)
            dialect = megatron.dialect(facts, side.inventory)
    except MtpConvertError as error:
        return Description(why_not=str(error), contradiction=isinstance(error, ConfigError) and _has_said(side))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        text = f"the config does not describe a model of this architecture ({error!r})"
        return Description(why_not=text, contradiction=_has_said(side))
    inventory = side.inventory
    there = [placement for placement in placements if placement.block.tensor in inventory]
    absent = [] if len(there) == len(placements) else [p for p in placements if p.block.tensor not in inventory]
    absent = [p for p in absent if not p.copy]
    absent = [p for p in absent if p.block.tensor + BLOCKS not in inventory]  # there, as codes and scales
    usable, findings = check_cover(side, there)
    return Description(usable, absent, findings, facts=facts, dialect=dialect)


def _has_said(side: Side) -> bool:
    """Whether the side itself says what model it is; a Megatron checkpoint without arguments cannot contradict them."""
    if not side.is_huggingface:
        return bool(side.arguments)
    from mtpconvert.audit.roles.huggingface import FAMILIES

    named = (side.config or {}).get("architectures")
    return isinstance(named, list) and bool(named) and named[0] in FAMILIES


def megatron_facts(side: Side, other: Side, told: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's own arguments first; what they leave open as the other side says, in roles or arguments."""
    own = side.arguments or (other.arguments if not other.is_huggingface else None)
    if own is None:
        return {**told, **_flags(side)}
    facts = dict(own)
    if told.get("vocab_size") is not None:
        facts["vocab_size"] = told["vocab_size"]
    if not facts.get("mtp_num_layers") and told.get("mtp_num_layers"):
        facts["mtp_num_layers"] = told["mtp_num_layers"]  # what should be there, so that its absence has names
    return facts


def _flags(side: Side) -> dict[str, Any]:
    """Flags that say only whether a module is there: read off the names, where one layer has it all must."""
    endings = {
        "add_qkv_bias": (".linear_qkv.bias",),
        "qk_layernorm": (".q_layernorm.weight", ".linear_q_up_proj.layer_norm_weight"),
        "moe_router_enable_expert_bias": (".router.expert_bias",),
    }
    return {flag: True for flag, ends in endings.items() if any(name.endswith(ends) for name in side.inventory)}
