"""The Megatron half on inventories written by hand, of modules that only Megatron-Bridge has: what is seen in one layer
and not in another, and what does not divide."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.audit.cover import check_cover
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.megatron import placements
from mtpconvert.tensors import Inventory, TensorSpec, inventory_of
from tests.support.roles_cover import check_exact_cover

# By hand: the model "hybrid" of tests/support/mcore_bridge.py, whose sizes are 6 heads of 8, values of 5, hidden 24.
QKV, OUT = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
HYBRID = {
    "num_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 8, "ffn_hidden_size": 20, "vocab_size": 29, "untie_embeddings_and_output_weights": False,
    "v_head_dim": 5, "qk_layernorm": False, "add_bias_linear": False, "add_qkv_bias": False, "mtp_num_layers": None,
}  # fmt: skip


def hybrid(**changes: tuple[int, ...]) -> Inventory:
    """Layer 0: 2 key/value heads; layer 1: 3, and sinks. ``changes``: shapes of layer 1, by the end of the key."""
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (24,), OUT: (24, 30), "mlp.linear_fc1.layer_norm_weight": (24,),
        "mlp.linear_fc1.weight": (40, 24), "mlp.linear_fc2.weight": (24, 20),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (29, 24)}
    shapes |= {
        "decoder.final_layernorm.weight": (24,),
        "decoder.layers.1.self_attention.core_attention.softmax_offset": (6,),
    }
    shapes |= {f"decoder.layers.{n}.{key}": shape for n in (0, 1) for key, shape in layer.items()}
    shapes |= {f"decoder.layers.{n}.{QKV}": (6 * 8 + groups * (8 + 5), 24) for n, groups in ((0, 2), (1, 3))}
    for end, shape in changes.items():
        (key,) = (key for key in shapes if key.startswith("decoder.layers.1.") and key.endswith(f".{end}.weight"))
        shapes[key] = shape
    return inventory_of(TensorSpec(key, shape, "BF16") for key, shape in shapes.items())


def faults(facts: dict[str, Any], held: Inventory) -> Counter[tuple[str, str]]:
    """(code, tensor) of what the auditor says of a Megatron side's cover."""
    side = Side("right", Path(), "megatron", "torch_dist", held, [], lambda name: ())
    found = [p for p in placements(facts, held) if p.block.tensor in held]
    return Counter((fault.code, str(fault.tensor)) for fault in check_cover(side, found)[1])


def test_the_rows_of_a_group_are_its_queries_its_key_and_its_shorter_value() -> None:
    held = hybrid()
    check_exact_cover(placements(HYBRID, held), held)
    at = {(p.role.name, p.part[0][0]): p for p in placements(HYBRID, held) if p.block.tensor.endswith(f"1.{QKV}")}
    assert {p.block.grid for p in at.values()} == {(3, 2 * 8 + 8 + 5, 24)}
    assert at["attn.q", 3].block.box == ((1, 2), (8, 16), (0, 24))  # the second of group 1
    assert (at["attn.k", 0].block.box, at["attn.v", 0].block.box) == (
        ((0, 3), (16, 24), (0, 24)),
        ((0, 3), (24, 29), (0, 24)),
    )
    shapes = {p.role.name: p.role.shape for p in at.values()}
    assert shapes == {"attn.q": (6, 8, 24), "attn.k": (3, 8, 24), "attn.v": (3, 5, 24)}


@pytest.mark.parametrize("softmax", [None, "vanilla", "learnable"])
def test_sinks_of_a_hybrid_are_where_they_are_whatever_the_argument_for_all_layers_says(softmax: str | None) -> None:
    placed = [
        p.role.place for p in placements(HYBRID | {"softmax_type": softmax}, hybrid()) if p.role.name == "attn.sink"
    ]
    assert placed == ["trunk.1"]


def test_without_arguments_for_it_the_size_of_values_is_what_the_output_projection_reads() -> None:
    silent = {name: value for name, value in HYBRID.items() if name not in ("v_head_dim", "num_query_groups")}
    assert not faults(silent, hybrid())
    assert faults(HYBRID | {"v_head_dim": 6}, hybrid())  # told, and another one


@pytest.mark.parametrize("rows", [48 + 2 * 13 + 12, 48 + 4 * 13, 48, 40])
def test_rows_that_are_no_groups_of_whole_heads_are_a_finding(rows: int) -> None:
    """Not a multiple of what a key and a value take; 4 groups, of which 6 heads are no multiple; none; less."""
    key = f"decoder.layers.1.{QKV}"
    assert faults(HYBRID, hybrid(linear_qkv=(rows, 24))) == {("role-overlap", key): 1}


def test_an_output_projection_of_another_size_in_one_layer_is_a_finding() -> None:
    assert faults(HYBRID, hybrid(linear_proj=(24, 48))) == {("role-overlap", f"decoder.layers.1.{OUT}"): 1}


SANDWICHED = {name: value for name, value in HYBRID.items() if name != "v_head_dim"} | {
    "qk_layernorm": True, "mtp_num_layers": 1,
}  # fmt: skip


def sandwiched(*, joint: bool = False) -> dict[str, TensorSpec]:
    """Norms before and after both parts; norms of q and k per head, or (``joint``) of all together."""
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (24,), QKV: (80, 24), OUT: (24, 48),
        "self_attention.linear_proj.post_layernorm.weight": (24,), "self_attention.q_layernorm.weight": (8,),
        "self_attention.k_layernorm.weight": (8,), "mlp.linear_fc1.layer_norm_weight": (24,),
        "mlp.linear_fc1.weight": (40, 24), "mlp.linear_fc2.weight": (24, 20),
        "mlp.linear_fc2.post_layernorm.weight": (24,),
    }  # fmt: skip
    if joint:
        layer |= {"self_attention.q_layernorm.weight": (48,), "self_attention.k_layernorm.weight": (16,)}
    stems = ("decoder.layers.0.", "decoder.layers.1.", "mtp.layers.0.transformer_layer.")
    shapes: dict[str, tuple[int, ...]] = {stem + key: shape for stem in stems for key, shape in layer.items()}
    shapes |= {"embedding.word_embeddings.weight": (29, 24), "decoder.final_layernorm.weight": (24,)}
    mtp = {"enorm.weight": (24,), "hnorm.weight": (24,), "eh_proj.weight": (24, 48), "final_layernorm.weight": (24,)}
    shapes |= {f"mtp.layers.0.{key}": shape for key, shape in mtp.items()}
    return {key: TensorSpec(key, shape, "BF16") for key, shape in shapes.items()}


def test_norms_before_and_after_or_after_alone() -> None:
    """Where no layer has a norm of the input, none is asked for; where none has one of the output, all must."""
    held = sandwiched()
    check_exact_cover(placements(SANDWICHED, held), held)
    alone = {key: spec for key, spec in held.items() if not key.endswith(".layer_norm_weight")}
    check_exact_cover(placements(SANDWICHED, alone), alone)
    stock = {key: spec for key, spec in alone.items() if ".post_layernorm." not in key}
    lacking = {p.role.name for p in placements(SANDWICHED, stock) if p.block.tensor not in stock}
    assert lacking == {"attn.input_norm", "mlp.norm"}


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.1.self_attention.linear_proj.post_layernorm.weight",
        "decoder.layers.1.mlp.linear_fc2.post_layernorm.weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.post_layernorm.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight",
    ],
)
def test_a_norm_that_one_layer_lacks_is_a_tensor_that_is_not_there(key: str) -> None:
    held = sandwiched()
    del held[key]
    assert {p.block.tensor for p in placements(SANDWICHED, held)} - held.keys() == {key}


def test_a_norm_at_the_place_of_another_kind_of_layer_has_no_meaning_there() -> None:
    stray = "decoder.layers.1.post_mlp_layernorm.weight"  # experts' place, in a dense layer
    assert faults(SANDWICHED, sandwiched() | {stray: TensorSpec(stray, (24,), "BF16")}) == {("role-unknown", stray): 1}


@pytest.mark.parametrize("part", ["q", "k"])
def test_one_norm_of_a_single_head_among_joint_ones_is_a_finding(part: str) -> None:
    held = sandwiched(joint=True)
    check_exact_cover(placements(SANDWICHED, held), held)
    odd = f"decoder.layers.1.self_attention.{part}_layernorm.weight"
    assert faults(SANDWICHED, held | {odd: TensorSpec(odd, (8,), "BF16")}) == {("role-overlap", odd): 1}
    del held[odd]
    (lacking,) = (p for p in placements(SANDWICHED, held) if p.block.tensor not in held)
    assert (lacking.block.tensor, lacking.role.name) == (odd, f"attn.{part}_norm.joint")
