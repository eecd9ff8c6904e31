"""The plan of each stock family against recorded inventories of both sides; no framework has to be installed.

What is recorded is what transformers saves and what the real megatron-core asks for (``make inventories``). That these
are what the installed ones do is held by ``tests/evidence/test_families.py``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mtpconvert.convert.stacked import is_stacked
from mtpconvert.mapping.catalogue import file_of, load
from mtpconvert.mapping.expand import Expansion, expand
from mtpconvert.stores.torch_dist.layout import targets
from mtpconvert.stores.torch_dist.logical import assemble
from mtpconvert.stores.torch_dist.stored import Place, StoredChunk, StoredTensor
from mtpconvert.tensors import Shape, TensorSpec
from tests.support.inventories import FOLDER, Held, expanded, lines, sections
from tests.support.stock_families import STOCK

VERSIONS = ("0.16.1", "0.19.2")
MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by


@cache
def recorded(architecture: str, side: str) -> dict[str, Held]:
    return sections(FOLDER / f"{architecture}.{side}.txt")


def models(name: str) -> dict[str, Held]:
    """ "te 0.16.1" and the like -> what that model of the case asks for."""
    found = {}
    for title, held in recorded(STOCK[name].architecture, "mcore").items():
        case, _, whose = title.rpartition(": ")
        found |= dict.fromkeys(whose.split(", "), held) if case == name else {}
    return found


@cache
def planned(name: str) -> tuple[Any, Expansion]:
    case = STOCK[name]
    mapping = load(file_of(case.architecture))
    scope = mapping.scope(case.config(), {"mtp_layers": case.depths})
    padded = -(-scope.integer("vocab_size") // MULTIPLE) * MULTIPLE
    return mapping, expand(mapping, scope, padded, recorded(case.architecture, "hf")[name])


def test_every_family_is_recorded_and_nothing_else() -> None:
    architectures = {case.architecture for case in STOCK.values()}
    assert {file.name for file in FOLDER.iterdir()} == {
        f"{a}.{side}.txt" for a in architectures for side in ("hf", "mcore")
    }
    for architecture in architectures:
        names = {name for name, case in STOCK.items() if case.architecture == architecture}
        assert recorded(architecture, "hf").keys() == names
        assert {title.rpartition(": ")[0] for title in recorded(architecture, "mcore")} == names
    for name, case in STOCK.items():
        versions = [version for version in VERSIONS if version.rpartition(".")[0] not in case.unsupported]
        assert models(name).keys() == {f"{spec} {version}" for spec in case.specs for version in versions}


@pytest.mark.parametrize("name", STOCK)
def test_hugging_face_names_and_shapes(name: str) -> None:
    mapping, expansion = planned(name)
    held = recorded(STOCK[name].architecture, "hf")[name]
    aliases = {alias: entry for alias, (entry, _) in expansion.aliases.items() if alias in held}
    assert {entry.name: entry.shape for entry in [*expansion.hf.values(), *aliases.values()]} == {
        tensor: shape for tensor, (_, shape) in held.items() if not mapping.passes_through(tensor)
    }


@pytest.mark.parametrize("name", STOCK)
def test_megatron_keys_and_shapes(name: str) -> None:
    """The keys that the plan is written under, and what these are read as; float32 where a row says so."""
    _, expansion = planned(name)
    specs = [TensorSpec(entry.name, entry.shape, entry.dtype or "BF16") for entry in expansion.mcore.values()]
    for model, held in models(name).items():
        placed, layers = targets(specs, is_stacked(expansion.mcore), local=model.startswith("local"))
        shapes = {
            one.key: (one.spec.dtype, one.spec.shape if one.layer is None else (layers, *one.spec.shape))
            for one in placed
        }
        assert shapes == held, model
        read = assemble([stored(key, *what) for key, what in held.items()], {})
        assert {n: (t.spec.dtype, t.spec.shape) for n, t in read.tensors.items()} == {
            spec.name: (spec.dtype, spec.shape) for spec in specs
        }, model


def stored(key: str, dtype: str, shape: Shape) -> StoredTensor:
    return StoredTensor(key, dtype, shape, [StoredChunk((0,) * len(shape), shape, Place("__0_0.distcp", 0, 1))])


def test_lines_and_back() -> None:
    """By hand: layers and experts of one shape are one line; a layer that has another shape is not among them."""
    held: Held = {f"a.{layer}.e.{expert}.w": ("BF16", (2, 3)) for layer in (0, 1, 2, 4) for expert in range(12)}
    held |= {f"a.3.e.{expert}.w": ("BF16", (3, 2)) for expert in range(12)}
    held |= {"a.10.b": ("F32", ()), "a.9.b": ("F32", (1,)), "c": ("I64", (7,))}
    text = [
        "a.{0-2,4}.e.{0-11}.w BF16 [2, 3]",
        "a.3.e.{0-11}.w BF16 [3, 2]",
        "a.9.b F32 [1]",
        "a.10.b F32 []",
        "c I64 [7]",
    ]
    assert lines(held) == text
    assert expanded(text) == held
    with pytest.raises(ValueError, match=r"a\.9\.b is named twice"):
        expanded(["a.{9-10}.b F32 [1]", "a.9.b F32 [1]"])
