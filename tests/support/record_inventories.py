"""Record what each stock family's model holds on either side, into ``fixtures/inventories/families``.

``make inventories`` runs it: transformers saves its model, and the megatron-core of either environment is asked what
its model's sharded state dict wants. Needs MTPCONVERT_NEXT_PYTHON, the interpreter that has megatron-core 0.19.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.family_tables import FLOAT32, Case, Config, Shapes, beside_vision, transformers_shapes
from tests.support.inventories import FOLDER, Held, lines
from tests.support.scratch import scratch
from tests.support.stock_families import STOCK, write_stock
from tests.support.tiny import read_safetensors

DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}


def saved_by_transformers(case: Case, folder: Path) -> Held:
    """Header of the file that ``save_pretrained`` writes for a new bfloat16 model of the case's config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from mtpconvert.evidence.transformers_model import quiet_transformers

    auto: Any = AutoModelForImageTextToText if case.trunk is beside_vision else AutoModelForCausalLM
    with quiet_transformers():
        model = auto.from_config(AutoConfig.for_model(**case.config()), dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return {name: (dtype, shape) for name, (dtype, shape, _) in read_safetensors(folder).items()}


def published(shapes: Shapes) -> Held:
    """Tensors that are in no file of transformers: bfloat16, but for what publishers keep in float32."""
    return {name: ("F32" if name.endswith(FLOAT32) else "BF16", shape) for name, shape in shapes.items()}


def source_of(function: Callable[..., Shapes]) -> str:
    """What the docstring of a function of ``family_tables`` says; of those that it is made of, where it has none."""
    inside = inspect.getclosurevars(function)
    functions = [function, *inside.nonlocals.values(), *inside.globals.values()]
    words = [inspect.cleandoc(one.__doc__) for one in functions if inspect.isfunction(one) and one.__doc__]
    return " ".join(words[0].split())


def hugging_face(case: Case, folder: Path) -> list[str]:
    """The lines of one case: what transformers saves, or the publisher's trunk, then MTP."""
    config: Config = case.config()
    trunk = case.trunk(config)
    if case.trunk in (transformers_shapes, beside_vision):
        held = saved_by_transformers(case, folder)
        text = [f"# the file that transformers saves of its {config['architectures'][0]}", *lines(held)]
    else:
        text = [f"# the publisher's, in no file of transformers: {source_of(case.trunk)}", *lines(published(trunk))]
    more = {name: shape for name, shape in case.shapes().items() if name not in trunk}
    if more:
        assert case.mtp is not None
        text += [f"# MTP, the publisher's, in no file of transformers: {source_of(case.mtp)}", *lines(published(more))]
    return text


def asked(directories: dict[str, list[str]]) -> dict[str, Any]:
    """In a process with megatron-core: label -> key -> [dtype, global shape] that the bfloat16 model asks for.

    ``directories``: label -> layer spec and the iteration directory whose ``args`` say which model.
    """
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from mtpconvert.convert.arguments import mtp_spec_layer
    from mtpconvert.stores.torch_dist.reader import TorchDistReader
    from tests.support import mcore, mcore_cpu
    from tests.support.mcore_jobs import leaves
    from tests.support.mcore_kinds import torch_delta_rule

    torch_delta_rule()
    found: dict[str, Any] = {"version": mcore_cpu.version()}
    for label, (spec, folder) in directories.items():
        args = mcore.common_state(Path(folder))["args"]
        like = mtp_spec_layer(TorchDistReader(Path(folder)).inventory())
        model = mcore.model_from_args(args, spec=spec, mtp_like=like, dtype=torch.bfloat16)
        with mcore_cpu.quiet():
            metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
            state = dict(model.sharded_state_dict(metadata=mcore.content_metadata(metadata)))
            apply_factories(state)
        tensors = [leaf for leaf in leaves(state) if isinstance(leaf, ShardedTensor)]
        found[label] = {one.key: [DTYPES[str(one.dtype)], list(one.global_shape)] for one in tensors}
    return found


def megatron(root: Path) -> dict[str, dict[str, list[str]]]:
    """Case -> "te 0.16.1" and the like -> lines."""
    from tests.support.frameworks_convert import to_mcore
    from tests.support.mcore_ranks import run

    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for near, python in (("0.16", sys.executable), ("0.19", os.environ["MTPCONVERT_NEXT_PYTHON"])):
        directories = {}
        for number, (name, case) in enumerate(STOCK.items()):
            for spec in case.specs if near not in case.unsupported else ():
                target = root / f"{number} {spec} {near}"
                path = to_mcore(root / str(number), target, spec=spec, mcore_version=near)
                directories[f"{spec} {name}"] = [spec, str(path)]
        (results,) = run("tests.support.record_inventories:asked", te=True, python=python, directories=directories)
        exact = results.pop("version")
        for label, keys in results.items():
            spec, _, name = label.partition(" ")
            found[name][f"{spec} {exact}"] = lines({key: (dtype, tuple(shape)) for key, (dtype, shape) in keys.items()})
    return found


def merged(models: dict[str, list[str]]) -> dict[str, list[str]]:
    """Models that ask for the same are one section: "te 0.16.1, te 0.19.2"."""
    titles: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for title, text in models.items():
        titles[tuple(text)].append(title)
    return {", ".join(own): list(text) for text, own in titles.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    made_by = "Recorded by `make inventories`, not edited. Tiny sizes: mappings/configs."
    texts: dict[str, list[str]] = {}
    with scratch() as root:
        for number, (name, case) in enumerate(STOCK.items()):
            write_stock(name, root / str(number))
            head = f"# {case.architecture}, Hugging Face side; transformers {version('transformers')}, torch.bfloat16."
            text = texts.setdefault(f"{case.architecture}.hf.txt", [head, f"# {made_by}"])
            text += ["", f"## {name}", *hugging_face(case, root / f"saved {number}")]
        for name, models in megatron(root).items():
            head = f"# {STOCK[name].architecture}, Megatron side: tensor keys and global shapes, torch.bfloat16."
            text = texts.setdefault(f"{STOCK[name].architecture}.mcore.txt", [head, f"# {made_by}"])
            for title, own in merged(models).items():
                text += ["", f"## {name}: {title}", *own]
    for file, text in texts.items():
        (FOLDER / file).write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
