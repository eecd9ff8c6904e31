"""Checkpoints as ``torch.save`` writes them: drafts by torch itself, and damaged or hostile files by hand."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.draft_kinds import KINDS, Checkpoint

FORMS = {  # kind -> (file, config's file): as they are published
    "eagle 1": ("pytorch_model.bin", "config.json"),
    "eagle 3": ("pytorch_model.bin", "config.json"),
    "medusa": ("medusa_lm_head.pt", "config.json"),
    "meta": ("consolidated.pth", "params.json"),
}
Change = Callable[[dict[str, Any]], object]


def state_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """Random bits under the checkpoint's names, the same at every call."""
    import torch

    kinds = {"BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(0, 2, shape, generator=draw).to(kinds[checkpoint.dtypes.get(name, "BF16")])
        for name, shape in checkpoint.shapes.items()
    }


def write_torch(folder: Path, kind: str, change: Change = lambda table: None, wrap: str = "") -> Path:
    """A draft in its published form; ``wrap``: the key of an outer dict that holds the state dict."""
    import torch

    file, config = FORMS[kind]
    folder.mkdir(parents=True)
    table = state_dict(KINDS[kind])
    change(table)
    torch.save({"epoch": 3, wrap: table} if wrap else table, folder / file)
    (folder / config).write_text(json.dumps(KINDS[kind].config))
    return folder


def write_shards(folder: Path, kind: str, count: int = 2) -> Path:
    """The draft in several pytorch_model files with an index, as transformers' save_pretrained wrote them."""
    import torch

    folder.mkdir(parents=True)
    table = state_dict(KINDS[kind])
    names = list(table)
    weight_map = {}
    for number in range(count):
        file = f"pytorch_model-{number + 1:05d}-of-{count:05d}.bin"
        part = {name: table[name] for name in names[number::count]}
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in table.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(KINDS[kind].config))
    return folder


def saved(value: object) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rezipped(blob: bytes, change: Callable[[dict[str, bytes]], object], method: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with its entries changed (path -> bytes), written again by zipfile."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    change(entries)
    return zipped(entries, method)


def zipped(entries: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()
