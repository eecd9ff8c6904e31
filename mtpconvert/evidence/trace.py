"""The points at which two frameworks are compared, in the order of computation, under one name on both sides.

embedding           [b, s, h]     what the first layer gets
layer 0 ... N-1     [b, s, h]     after each decoder layer
final norm          [b, s, h]     after the trunk's last norm
trunk logits        [b, s, v]
MTP k: eh_proj      [b, s - k, h] enorm, hnorm and the projection of both, k = 1 ... D
MTP k: layer        [b, s - k, h] after the MTP module's own decoder layer
MTP k: final norm   [b, s - k, h]
MTP k: logits       [b, s - k, v]
"""

from __future__ import annotations

from typing import Any

Trace = dict[str, Any]  # point -> float32 tensor on the CPU, in the order above

TRUNK_LOGITS = "trunk logits"


def layer_point(number: int) -> str:
    return f"layer {number}"


def depth_point(depth: int, part: str) -> str:
    return f"MTP {depth}: {part}"


def depth_of(point: str) -> int:
    """The MTP depth of a point; 0 for the trunk's."""
    return int(point.removeprefix("MTP ").partition(":")[0]) if point.startswith("MTP ") else 0
