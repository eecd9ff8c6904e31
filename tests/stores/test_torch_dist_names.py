"""Dialects, stacking and extra state, against the keys that real models of either megatron-core print."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from mtpconvert.errors import CheckpointError, IncompleteError, NotRepresentableError
from mtpconvert.stores.torch_dist import dialects
from mtpconvert.stores.torch_dist.extra_state import extra_state_keys
from mtpconvert.stores.torch_dist.layout import targets
from mtpconvert.stores.torch_dist.logical import Piece, assemble
from mtpconvert.stores.torch_dist.stored import Place, StoredChunk, StoredTensor
from mtpconvert.tensors import Shape, TensorSpec

INVENTORIES = Path(__file__).parents[2] / "fixtures" / "inventories"
LAYERS, EXPERTS = 2, 4


def keys(inventory: str) -> tuple[list[str], list[str]]:
    """Tensor keys and object keys of a recorded model."""
    lines = (INVENTORIES / f"{inventory}.txt").read_text().splitlines()
    return [line[2:] for line in lines if line[0] == "T"], [line[2:] for line in lines if line[0] == "X"]


def stored(names: Iterable[str], shapes: dict[str, Shape] | None = None) -> list[StoredTensor]:
    """Tensors of those keys; stacked ones have two layers, experts four."""
    made = []
    for name in names:
        shape: Shape = (6,)
        if ".experts.experts." in name and not re.search(r"experts\.\d+\.", name):
            shape = (EXPERTS, *shape)
        if re.match(r"decoder\.layers\.[a-z]", name):
            shape = (LAYERS, *shape)
        shape = (shapes or {}).get(name, shape)
        chunk = StoredChunk((0,) * len(shape), shape, Place("__0_0.distcp", 0, 1))
        made.append(StoredTensor(name, "BF16", shape, [chunk]))
    return made


def logical(inventory: str) -> set[str]:
    return set(assemble(stored(keys(inventory)[0]), {}).tensors)


def unstacked(names: Iterable[str]) -> set[str]:
    """The recorded keys of a stacked model with the layer index written out, by hand."""
    out: set[str] = set()
    for name in names:
        rest = name.removeprefix("decoder.layers.")
        if rest == name or rest[0].isdigit():
            out.add(name)
        else:
            out |= {f"decoder.layers.{layer}.{rest}" for layer in range(LAYERS)}
    return out


@pytest.mark.parametrize("inventory", sorted(path.stem for path in INVENTORIES.glob("te-*.txt")))
def test_te_keys_are_canonical(inventory: str) -> None:
    tensors, _ = keys(inventory)
    assembly = assemble(stored(tensors), {})
    assert set(assembly.tensors) == unstacked(tensors)
    assert not [note for note in assembly.notes if "translated" in note]
    assert assembly.stacked == ("gqa" in inventory)


@pytest.mark.parametrize("kind", ["gqa-moe-mtp", "mla-moe-mtp"])
def test_local_keys_translate_to_te_keys_and_back(kind: str) -> None:
    local, _ = keys(f"local-{kind}.0.16.1")
    te, _ = keys(f"te-{kind}.0.16.1")
    canonical = unstacked(te)
    assembly = assemble(stored(local), {})
    assert set(assembly.tensors) - canonical <= {  # the two recorded models differ in nothing but the spec
        name for name in assembly.tensors if name.endswith("expert_bias")
    }
    assert {name for name in canonical if not name.endswith("expert_bias")} <= set(assembly.tensors)
    assert any("translated" in note for note in assembly.notes)
    back = dialects.local_names(assembly.tensors)
    assert set(back.values()) == unstacked(local)


def test_local_dense_gqa_has_the_te_keys() -> None:
    names = logical("te-gqa-dense-mtp.0.16.1")
    assert dialects.local_names(names) == {name: name for name in names}


def test_dense_mla_layer_of_the_local_spec() -> None:
    # gpt_layer_specs.py:get_gpt_layer_local_spec: MLA has no key map, so dense layers keep pre_mlp_layernorm
    te = {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.self_attention.linear_kv_up_proj.weight",
        "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_q_proj.weight",
        "decoder.layers.0.input_layernorm.weight",
    }
    local = dialects.local_names(te)
    changed = {old.split(".", 3)[3]: new.split(".", 3)[3] for old, new in local.items() if old != new}
    assert changed == {
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    }
    assert set(dialects.canonical_names(local.values()).values()) == te


def test_biases_of_norms_follow_their_weights() -> None:
    base = "decoder.layers.3."
    local = {
        base + name: "x"
        for name in ("mlp.router.weight", "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias")
    }
    renamed = dialects.canonical_names(local)
    assert renamed[base + "mlp.linear_fc1.layer_norm_bias"] == base + "pre_mlp_layernorm.bias"


def test_a_norm_between_a_router_and_a_dense_mlp_is_left_alone() -> None:
    siblings = ("mlp.router.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight")
    names = [f"decoder.layers.0.{name}" for name in siblings]
    assert dialects.canonical_names(names) == {name: name for name in names}


def test_shared_indexer_layers_of_dsa_keep_their_norms() -> None:
    names, _ = keys("te-dsa-shared-indexer.0.19.2")
    assert "decoder.layers.2.self_attention.kv_layernorm.weight" in names  # a layer without an indexer of its own
    assert dialects.canonical_names(names) == {name: name for name in names}
    with pytest.raises(NotRepresentableError, match="no local layer spec"):
        dialects.local_names(names)
    with pytest.raises(NotRepresentableError, match=r"in_proj|A_log"):
        dialects.local_names(keys("te-gdn.0.19.2")[0])


def test_mtp_of_the_newer_attribute_name() -> None:
    te = logical("te-gqa-dense-mtp.0.19.2")
    newer = [name.replace(".transformer_layer.", ".mtp_model_layer.") for name in te]
    assert set(assemble(stored(newer), {}).tensors) == te
    mixed = [*newer, "mtp.layers.1.transformer_layer.mlp.linear_fc2.weight"]
    with pytest.raises(CheckpointError, match="both as transformer_layer and as mtp_model_layer"):
        assemble(stored(mixed), {})


@pytest.mark.parametrize("prefix", ["module.", "model.", "module.module."])
def test_wrapper_prefixes(prefix: str) -> None:
    te = keys("te-mla-moe-mtp.0.16.1")[0]
    assembly = assemble(stored(prefix + name for name in te), {})
    assert set(assembly.tensors) == set(te)
    assert assembly.notes == (f"prefix {prefix!r} taken off every name",)
    some = [prefix + name for name in te[:-1]] + te[-1:]  # not on every name: no wrapper
    assert prefix + te[0] in assemble(stored(some), {}).tensors


@pytest.mark.parametrize(
    "name",
    [
        "decoder.final_norm.weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.mixer.A_log",
        "mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc2.weight",
    ],
)
def test_hybrid_models_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotRepresentableError, match="hybrid") as caught:
        assemble(stored(["embedding.word_embeddings.weight", name]), {})
    assert caught.value.where == name and caught.value.exit_code == 10


def test_hybrid_arguments_are_refused() -> None:
    names = keys("te-gqa-dense-mtp.0.19.2")[0]
    with pytest.raises(NotRepresentableError, match=r"hybrid_layer_pattern = 'M\*M'"):
        assemble(stored(names), {"hybrid_layer_pattern": "M*M"})
    assemble(stored(names), {"hybrid_layer_pattern": None, "is_hybrid_model": False})


def test_singleton_local_shards_are_joined() -> None:
    # megatron/core/transformer/moe/experts.py with singleton_local_shards: experts.experts.{e}., halves _w and _v
    base = "decoder.layers.0.mlp.experts.experts."
    names = [f"{base}{e}.linear_fc1.weight_{half}" for e in range(3) for half in "wv"]
    names += [f"{base}{e}.linear_fc2.weight" for e in range(3)]
    names += [f"decoder.layers.0.mlp.shared_experts.linear_fc1.weight_{half}" for half in "wv"]
    shapes = dict.fromkeys(names, (5, 2))
    assembly = assemble(stored(names, shapes), {})
    fc1 = assembly.tensors[f"{base}linear_fc1.weight"]
    assert fc1.spec.shape == (3, 10, 2)
    assert fc1.pieces[3] == Piece(f"{base}1.linear_fc1.weight_v", None, 1, 5)
    assert fc1.pieces[3].box(((1, 4), (0, 2))) == ((1, 2), (6, 9), (0, 2))
    assert assembly.tensors[f"{base}linear_fc2.weight"].spec.shape == (3, 5, 2)
    assert assembly.tensors["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"].spec.shape == (10, 2)
    with pytest.raises(IncompleteError, match=r"expert 1, its up half \(_v\) is missing") as caught:
        assemble(stored([name for name in names if "1.linear_fc1.weight_v" not in name], shapes), {})
    assert caught.value.exit_code == 7
    with pytest.raises(IncompleteError, match="expert 1 is missing"):
        assemble(stored([name for name in names if "1.linear_fc2" not in name], shapes), {})
    with pytest.raises(CheckpointError, match="differ in shape"):
        assemble(stored(names, {**shapes, f"{base}2.linear_fc2.weight": (6, 2)}), {})
    with pytest.raises(CheckpointError, match="differ in shape"):
        assemble(stored([*names, f"{base}linear_fc2.weight"], {**shapes, f"{base}linear_fc2.weight": (3, 5, 2)}), {})


@pytest.mark.parametrize(
    ("names", "where"),
    [
        (
            ["decoder.layers.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"],
            "decoder.layers.1.mlp.linear_fc2.weight",
        ),
        (
            [
                "decoder.layers.0.mlp.router.weight",
                "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
                "decoder.layers.0.pre_mlp_layernorm.weight",
            ],
            "decoder.layers.0.pre_mlp_layernorm.weight",
        ),
    ],
)
def test_two_tensors_of_one_name_are_refused(names: list[str], where: str) -> None:
    with pytest.raises(CheckpointError, match="both") as caught:
        assemble(stored(names), {})
    assert caught.value.where == where
    assert all(name in str(caught.value) for name in names if "router" not in name)


def test_layer_counts_must_agree() -> None:
    names = ["decoder.layers.a.weight", "decoder.layers.b.weight"]
    with pytest.raises(CheckpointError, match=r"stacks 2 layers, decoder\.layers\.b\.weight 3"):
        assemble(stored(names, {names[1]: (3, 6)}), {})
    with pytest.raises(CheckpointError, match="stacks layers, but has shape"):
        assemble(stored(names, {names[1]: ()}), {})


# What megatron-core asks for beside the recorded models, and we write for older Transformer Engines
SURPLUS = re.compile(r".*self_attention\.core_attention\._extra_state/.*")


RECORDED = sorted(path.stem for path in INVENTORIES.glob("*.txt") if "\nX " in path.read_text())


@pytest.mark.parametrize("inventory", RECORDED)
def test_extra_state_is_the_union(inventory: str) -> None:
    names, wanted = keys(inventory)
    kind = inventory.split("-", 1)[1].split(".")[0]
    tensors = assemble(stored(names), {}).tensors
    specs = [tensor.spec for tensor in tensors.values()]
    stacked = frozenset(tensors if "gqa" in kind else ())
    stacked = frozenset(name for name in stacked if name.startswith("decoder.layers."))
    written = extra_state_keys(specs, stacked, LAYERS if stacked else 0)
    assert len(written) == len(set(written))
    assert set(wanted) <= set(written)
    te_wanted = set(keys(f"te-{kind}.0.16.1")[1])
    assert all(SURPLUS.fullmatch(key) for key in set(written) - te_wanted)


def test_extra_state_of_other_attentions() -> None:
    specs = [TensorSpec(name, (8,), "BF16") for name in keys("te-gdn.0.19.2")[0]]
    written = {key.split("._extra_state")[0].split(".", 3)[-1] for key in extra_state_keys(specs, frozenset(), 0)}
    assert {"self_attention.in_proj", "self_attention.out_norm", "self_attention.out_proj"} <= written
    assert not {"self_attention", "self_attention.conv1d", "mlp.router"} & written


def test_stacking_needs_equal_layers() -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(3)]
    specs = [TensorSpec(name, (4, 4), "BF16") for name in names]
    found, layers = targets(specs, True, local=False)
    assert layers == 3 and [(t.key, t.layer) for t in found] == [
        ("decoder.layers.mlp.linear_fc2.weight", layer) for layer in range(3)
    ]
    uneven = [*specs[:2], TensorSpec(names[2], (4, 5), "BF16")]
    missing = [specs[0], specs[2]]
    for bad in (uneven, missing):
        with pytest.raises(NotRepresentableError, match="cannot be stored under the one key"):
            targets(bad, True, local=False)
    assert [t.layer for t in targets(uneven, False, local=False)[0]] == [None] * 3
    assert [t.layer for t in targets(uneven, [], local=False)[0]] == [None] * 3
