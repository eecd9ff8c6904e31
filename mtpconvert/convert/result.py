"""What a conversion did, as values for the command line to print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpconvert.convert.execute import Moved, Progress
from mtpconvert.mapping.plan import Plan

# Gets the source and the finished directory, which still has its temporary name; raises or returns what it found.
Gate = Callable[[Path, Path], Any]


@dataclass
class Conversion:
    source: Path
    target: Path
    plan: Plan
    moved: Moved
    launch_flags: list[str] = field(default_factory=list)  # hf2mcore: flags that checkpoint args do not restore
    config_changes: dict[str, Any] = field(default_factory=dict)  # dotted key -> its new value, None: removed
    notes: list[str] = field(default_factory=list)
    dialect: str = "stock"  # hf2mcore: in whose names the target is
    audit: Any = None  # what the gate returned


@dataclass
class Callbacks:
    """``start`` gets the bytes to move and gives the function to report progress to; ``gate`` may stop publication."""

    start: Callable[[int], Progress] = lambda _total: lambda _count, _name: None
    gate: Gate | None = None
