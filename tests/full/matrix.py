"""The heavy matrix: every stock family x megatron-core version x layer spec x parallel layout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tests.support.stock_families import STOCK

VERSIONS = ("0.16", "0.19")


@dataclass(frozen=True)
class Layout:
    """How many ranks share out heads and widths (TP), layers (PP) and experts (EP)."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Experts are cut by TP too (``expert_tensor_parallel_size`` is left at TP), so the sizes multiply."""
        return self.tp * self.pp * self.ep

    def __str__(self) -> str:
        cut = [f"{name.upper()}{size}" for name, size in vars(self).items() if size > 1]
        return " ".join(cut) or "one process"


LAYOUTS = sorted((Layout(*sizes) for sizes in product((1, 2), repeat=3)), key=lambda layout: layout.world)
FIRST = {case.architecture: family for family, case in reversed(STOCK.items())}  # of each architecture


@dataclass(frozen=True)
class Cell:
    family: str
    version: str
    spec: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.family}, {self.version} {self.spec}, {self.layout}"


def has_experts(family: str) -> bool:
    config = STOCK[family].config()
    config = config.get("text_config", config)
    return any(config.get(key) for key in ("n_routed_experts", "num_experts", "num_local_experts"))


def layouts(family: str) -> list[Layout]:
    """EP where there are experts. Four and more processes for one case of each architecture: the others have the same
    modules, and differ in how many of their layers have experts, in ties, in a query latent."""
    first = FIRST[STOCK[family].architecture] == family
    return [one for one in LAYOUTS if (one.ep == 1 or has_experts(family)) and (one.world <= 2 or first)]


CELLS = [
    Cell(family, version, spec, layout)
    for version, layout, (family, case) in product(VERSIONS, LAYOUTS, STOCK.items())
    for spec in case.specs
    if version not in case.unsupported and layout in layouts(family)
]
