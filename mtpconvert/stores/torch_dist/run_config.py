"""``run_config.yaml``: what Megatron-Bridge's training saves where Megatron-LM's has ``args``.

It lies in the iteration folder (Megatron-Bridge 0.7 training/checkpointing.py:save_checkpoint). Its section ``model``
has the fields of the provider or model config (training/utils/config_utils.py; megatron/training/config/container.py
and yaml_utils.py of megatron-core 0.19.2). The file can come from anywhere: nothing in it is run, no tag makes an
object of a class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtpconvert.errors import CheckpointError

RUN_CONFIG = "run_config.yaml"
_MOST_BYTES = 4 << 20  # a real one has some 25 KiB
_MOST_EVENTS = 100_000  # a real one has some 2,000


def is_bridge(folder: Path) -> bool:
    """Whether Megatron-Bridge saved the iteration ``folder``."""
    return (folder / RUN_CONFIG).is_file()


def read_model(folder: Path) -> dict[str, Any] | None:
    """The fields of the section ``model``, those of its ``transformer`` among them; None without file or section.

    A value whose tag PyYAML's safe loader does not know is None, or a list where it is written as one.

    Raises CheckpointError for a file that is no YAML, of more than 4 MiB, or that its aliases make as large.
    """
    path = folder / RUN_CONFIG
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _refused(path, f"has {path.stat().st_size:,} bytes, more than any run's")
        document = _parse(path, path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise _refused(path, f"cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise _refused(path, f"is no YAML: {problem}") from problem
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        return None
    inner = model.get("transformer")  # of a model config; a provider has all fields at one level
    return {**model, **inner, "_target_": model.get("_target_")} if isinstance(inner, dict) else model


def _parse(path: Path, text: str) -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader_class: Any = type("Inert", (base,), {})
    loader_class.add_constructor(None, _unknown)  # instead of the one that raises
    try:
        for number, _ in enumerate(yaml.parse(text, Loader=base)):
            if number > _MOST_EVENTS:
                raise _refused(path, f"has more than {_MOST_EVENTS:,} entries")
        loader = loader_class(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _extent(node, {}) > _MOST_BYTES:
            raise _refused(path, f"is more than {_MOST_BYTES:,} bytes with its aliases written out")
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as problem:
        raise _refused(path, f"is no YAML: {' '.join(str(problem).split())}") from problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:  # of constructors, for !!int x and its like
        raise _refused(path, f"has a value that is not of its type: {problem}") from problem


def _extent(node: Any, known: dict[int, int]) -> int:
    """Characters of all scalars below ``node``, one more for each node; a node inside itself is too large."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = _MOST_BYTES + 1
    below = node.value
    if isinstance(below, str):
        extent = len(below)
    else:
        extent = sum(_extent(one, known) for item in below for one in (item if isinstance(item, tuple) else (item,)))
    known[id(node)] = 1 + extent
    return known[id(node)]


def _unknown(loader: Any, node: Any) -> Any:
    """What a tag that nobody knows stands for: the items of a sequence (``!!python/tuple``), else None."""
    return loader.construct_sequence(node, deep=True) if node.id == "sequence" else None


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {why}",
        where=str(path),
        next_step="copy the file again from the run that saved it; taken away, names and shapes alone are checked",
    )
