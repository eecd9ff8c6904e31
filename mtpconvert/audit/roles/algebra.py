"""What a number means, apart from where any framework keeps it.

A Role is a virtual tensor ("the query weights of trunk layer 3, by head, dim and column"). A half (``huggingface``,
``megatron``) is a list of Placements: which block of which real tensor holds which part of which role. Neither
half knows the other; comparing two checkpoints composes two lists through their roles. A role may have several
holders on one side (copies, ties, replicas), which must then all be equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtpconvert.tensors import Block, Box, Shape


@dataclass(frozen=True, slots=True)
class Role:
    """``place`` is "" for the model as a whole, "trunk.3" for decoder layer 3, "mtp.0" for the first MTP layer.

    ``name`` is a key of ``vocabulary.ROLES``; ``shape`` has one extent per axis named there.
    """

    place: str
    name: str
    shape: Shape

    @property
    def is_mtp(self) -> bool:
        return self.place.startswith("mtp.")


@dataclass(frozen=True, slots=True)
class Placement:
    """``block`` of a real tensor holds ``part`` of ``role``, element for element.

    The extents of ``block.box`` and of ``part`` are equal once unit axes are dropped, after the block's extents are
    taken in the order ``perm`` (None: as they stand). ``copy``: the tensor may be absent, since the role is held
    elsewhere too; when present it must equal the other holder.
    """

    role: Role
    part: Box
    block: Block
    perm: tuple[int, ...] | None = None
    copy: bool = False
