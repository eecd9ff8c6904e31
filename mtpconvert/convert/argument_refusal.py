"""How a config that the mapping's Megatron model cannot have is refused."""

from __future__ import annotations

from typing import Any

from mtpconvert.errors import NotRepresentableError


def refuse(key: str, value: Any, why: str) -> NotRepresentableError:
    """The error for a config value that the mapping's Megatron model cannot have."""
    return NotRepresentableError(
        f"config.json says {key} = {value!r}: {why}",
        where=f"config.json: {key}",
        next_step="this model cannot run in stock Megatron-Core; converting its weights alone would hide that",
    )
