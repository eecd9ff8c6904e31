"""Names of the tensors in files of ``torch.save``: enough to say why a checkpoint of pickles is refused.

Nothing in a pickle is run (``torch_dist.unpickle``), no number is read (``torch_dist.container``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mtpconvert.stores.torch_dist.inert import TensorRef
from mtpconvert.stores.torch_dist.record import read_object

PICKLED = re.compile(r"(pytorch_model.*|consolidated.*|model.*|medusa_lm_head.*)\.(bin|pt|pth)")


def names_in(folder: Path) -> list[str]:
    """Names of the tensors in every pickle of weights in ``folder``, on their own or under "state_dict" or "model".

    Raises CheckpointError, IncompleteError or OSError for a file that is none of ``torch.save``.
    """
    return [
        name
        for path in sorted(folder.iterdir())
        if PICKLED.fullmatch(path.name) and path.is_file()
        for name in _names(path)
    ]


def _names(path: Path) -> list[str]:
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        found = read_object(fd, 0, os.fstat(fd).st_size, str(path))
    finally:
        os.close(fd)
    tables = [found, *(found.get(key) for key in ("state_dict", "model"))] if isinstance(found, dict) else []
    for table in tables:
        pairs = table.items() if isinstance(table, dict) else ()
        names = [name for name, value in pairs if isinstance(name, str) and isinstance(value, TensorRef)]
        if names:
            return names
    return []
