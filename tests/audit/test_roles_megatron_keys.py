"""The Megatron half on inventories written by hand: spellings, what is declared and what is there, padding, ties."""

from typing import Any

import pytest

from mtpconvert.audit.roles.megatron import meaning_arguments, placements
from mtpconvert.errors import ConfigError
from mtpconvert.tensors import Inventory, TensorSpec, inventory_of
from tests.support.roles_cover import check_exact_cover


def covered(facts: dict[str, Any], held: Inventory) -> None:
    check_exact_cover(placements(facts, held), held)


def dense() -> tuple[dict[str, Any], Inventory]:
    """A stacked dense model with one MTP layer, by hand: 2 layers, hidden 4, 2 heads of 3 in 1 group, ffn 5."""
    facts = {
        "num_layers": 2, "hidden_size": 4, "num_attention_heads": 2, "group_query_attention": True,
        "num_query_groups": 1, "kv_channels": 3, "ffn_hidden_size": 5, "qk_layernorm": False, "add_bias_linear": False,
        "add_qkv_bias": False, "untie_embeddings_and_output_weights": True, "mtp_num_layers": 1, "vocab_size": 7,
    }  # fmt: skip
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (4,), "self_attention.linear_qkv.weight": (12, 4),
        "self_attention.linear_proj.weight": (4, 6), "mlp.linear_fc1.layer_norm_weight": (4,),
        "mlp.linear_fc1.weight": (10, 4), "mlp.linear_fc2.weight": (4, 5),
    }  # fmt: skip
    shapes = {
        "embedding.word_embeddings.weight": (8, 4), "output_layer.weight": (8, 4),
        "decoder.final_layernorm.weight": (4,),
        "mtp.layers.0.enorm.weight": (4,), "mtp.layers.0.hnorm.weight": (4,), "mtp.layers.0.eh_proj.weight": (4, 8),
        "mtp.layers.0.final_layernorm.weight": (4,),
        **{f"decoder.layers.{key}": (2, *shape) for key, shape in layer.items()},
        **{f"mtp.layers.0.transformer_layer.{key}": shape for key, shape in layer.items()},
    }  # fmt: skip
    return facts, inventory_of(TensorSpec(key, shape, "BF16") for key, shape in shapes.items())


def renamed(held: Inventory, old: str, new: str) -> Inventory:
    return inventory_of(TensorSpec(key.replace(old, new), spec.shape, spec.dtype) for key, spec in held.items())


def test_the_attribute_name_of_the_mtp_layer_and_a_prefix_are_read_too() -> None:
    facts, held = dense()
    covered(facts, held)
    covered(facts, renamed(held, "transformer_layer", "mtp_model_layer"))
    covered(facts, inventory_of(TensorSpec(f"module.{s.name}", s.shape, s.dtype) for s in held.values()))


def test_the_second_query_head_of_a_group_stands_before_its_key() -> None:
    facts, held = dense()
    at = {p.role.name: p for p in placements(facts, held) if p.role.place == "mtp.0"}
    assert at["attn.q"].block.box == ((0, 1), (0, 2), (0, 3), (0, 4))
    assert (at["attn.k"].block.box[1], at["attn.v"].block.box[1]) == ((2, 3), (3, 4))


def test_vocabulary_padding_is_a_role_of_its_own() -> None:
    facts, held = dense()
    padding = [p for p in placements(facts, held) if p.role.name == "padding"]
    assert [(p.role.place, p.role.shape, p.block.tensor, p.block.box) for p in padding] == [
        ("embedding", (1, 4), "embedding.word_embeddings.weight", ((7, 8), (0, 4))),
        ("head", (1, 4), "output_layer.weight", ((7, 8), (0, 4))),
    ]
    assert not [p for p in placements(facts | {"vocab_size": 8}, held) if p.role.name == "padding"]
    unknown = {k: v for k, v in facts.items() if k != "vocab_size"}
    assert [p.role.shape for p in placements(unknown, held) if p.role.name in ("embedding", "head")] == [(8, 4)] * 2


def test_a_saved_head_of_a_tied_model_is_a_copy_of_the_embedding() -> None:
    facts, held = dense()
    tied = placements(facts | {"untie_embeddings_and_output_weights": False}, held)
    head = [p for p in tied if p.block.tensor == "output_layer.weight"]
    assert [(p.role.place, p.role.name, p.copy) for p in head] == [
        ("", "embedding", True),
        ("embedding", "padding", True),
    ]
    assert "head" not in {p.role.name for p in tied}


def test_mtp_layers_declared_or_present_are_placed() -> None:
    facts, held = dense()
    undeclared = placements(facts | {"mtp_num_layers": None}, held)
    assert {p.role.place for p in undeclared if p.role.is_mtp} == {"mtp.0"}
    declared = placements(facts | {"mtp_num_layers": 2}, held)
    assert {p.role.place for p in declared if p.role.is_mtp} == {"mtp.0", "mtp.1"}
    absent = {p.block.tensor for p in declared} - held.keys()
    assert absent == {key.replace("layers.0", "layers.1") for key in held if key.startswith("mtp.")}
    repeated = placements(facts | {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, held)
    assert {p.role.place for p in repeated if p.role.is_mtp} == {"mtp.0"}


@pytest.mark.parametrize("flag, key, shape", [
    ("qk_layernorm", "decoder.layers.self_attention.q_layernorm.weight", (2, 3)),
    ("add_qkv_bias", "decoder.layers.self_attention.linear_qkv.bias", (2, 12)),
    ("add_bias_linear", "decoder.layers.mlp.linear_fc1.bias", (2, 10)),
])  # fmt: skip
def test_what_the_arguments_deny_is_not_placed_and_what_they_omit_is_where_found(
    flag: str, key: str, shape: tuple[int, ...]
) -> None:
    facts, held = dense()
    silent = {name: value for name, value in facts.items() if name != flag}
    more = held | {key: TensorSpec(key, shape, "BF16")}
    names = lambda f, inv: {p.block.tensor for p in placements(f, inv)}  # noqa: E731
    assert key not in names(facts, more)
    assert key in names(silent, more) and key not in names(silent, held)
    assert key in names(facts | {flag: True}, held)


def test_a_key_that_no_table_names_is_not_placed() -> None:
    facts, held = dense()
    stray = "decoder.layers.self_attention.linear_qkv.layer_norm_bias"
    assert stray not in {p.block.tensor for p in placements(facts, held | {stray: TensorSpec(stray, (2, 2), "F32")})}


def test_the_second_norm_of_megatron_0_19_before_queries_without_a_latent_has_no_role() -> None:
    """There ``qk_layernorm`` without ``q_lora_rank`` norms the normed input again; nothing else has such a weight."""
    mla = {
        "multi_latent_attention": True,
        "kv_lora_rank": 3,
        "qk_head_dim": 2,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 2,
    }
    facts = dense()[0] | mla | {"qk_layernorm": True}
    stray = TensorSpec("decoder.layers.self_attention.linear_q_proj.layer_norm_weight", (2, 4), "BF16")
    placed = {p.block.tensor for p in placements(facts, {stray.name: stray})}
    assert stray.name not in placed
    assert "decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight" in placed


def test_every_fourth_layer_has_ordinary_attention_and_absent_delta_nets_have_names() -> None:
    facts = dense()[0] | {"num_layers": 5, "experimental_attention_variant": "gated_delta_net"}
    for frequency in (4, [1, 1, 1, 0, 1]):
        placed = placements(facts | {"linear_attention_freq": frequency}, {})
        linear = {p.role.place for p in placed if p.role.name == "gdn.a_log"}
        assert linear == {"trunk.0", "trunk.1", "trunk.2", "trunk.4"}
        assert {p.role.place for p in placed if p.role.name == "attn.q"} == {"trunk.3", "mtp.0"}
    (taps,) = (p for p in placed if (p.role.place, p.role.name) == ("trunk.4", "gdn.conv.v"))
    assert taps.block.tensor == "decoder.layers.4.self_attention.conv1d.weight.value"
    assert (taps.block.shape, taps.role.shape) == (
        (4096, 1, 4),
        (32, 128, 4),
    )  # sizes that the config class defaults to


@pytest.mark.parametrize("frequency, offset, computing", [
    (None, None, {1, 2, 3, 4, 5, 6, 7}), (4, 0, {1, 5}), (4, 3, {1, 2, 3, 7}), (1, 3, {1, 2, 3, 4, 5, 6, 7}),
])  # fmt: skip
def test_layers_that_share_an_index_have_no_indexer(frequency: Any, offset: Any, computing: set[int]) -> None:
    """Layers count from 1 up to the offset, each with its own; then every n-th. MTP counts from 1 again."""
    facts = dense()[0] | {
        "num_layers": 7, "multi_latent_attention": True, "q_lora_rank": 3, "kv_lora_rank": 3, "qk_head_dim": 2,
        "qk_pos_emb_head_dim": 2, "v_head_dim": 2, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 2,
        "dsa_indexer_head_dim": 5, "dsa_indexer_topk_freq": frequency, "dsa_indexer_skip_topk_offset": offset,
        "mtp_num_layers": 3, "qk_layernorm": True,
    }  # fmt: skip
    placed = placements(facts, {})
    have = {p.role.place for p in placed if p.role.name == "dsa.weights"}
    trunk = {f"trunk.{number - 1}" for number in computing}
    assert have == trunk | {f"mtp.{number - 1}" for number in computing & {1, 2, 3}}
    # the spec of sparse attention leaves the norms of the latents apart
    assert {p.block.tensor.split(".", 3)[3] for p in placed if p.role.name == "mla.kv_norm"} >= {
        "self_attention.kv_layernorm.weight"
    }


@pytest.mark.parametrize("trunk, mtp", [(1, "dense"), (0, "moe"), (1, None), (0, None)])
def test_an_mtp_layer_is_dense_or_moe_as_its_tensors_say(trunk: int, mtp: str | None) -> None:
    facts, held = dense()
    facts |= {"num_experts": 3, "moe_ffn_hidden_size": 2, "moe_layer_freq": [trunk] * 2}
    at = "mtp.layers.0.transformer_layer.mlp."
    held = {key: spec for key, spec in held.items() if not key.startswith(at)}
    key = {"dense": f"{at}linear_fc1.weight", "moe": f"{at}router.weight", None: "other"}[mtp]
    placed = placements(facts, held | {key: TensorSpec(key, (1, 1), "BF16")})
    names = {p.role.name for p in placed if p.role.place == "mtp.0"}
    moe = trunk == 1 if mtp is None else mtp == "moe"
    assert ("router" in names, "mlp.gate" in names) == (moe, not moe)


def test_two_spellings_in_one_checkpoint_are_two_holders() -> None:
    facts, held = dense()
    both = held | renamed(
        {k: v for k, v in held.items() if "transformer_layer" in k}, "transformer_layer", "mtp_model_layer"
    )
    gates = [p.block.tensor for p in placements(facts, both) if (p.role.place, p.role.name) == ("mtp.0", "mlp.gate")]
    assert len(gates) == len(set(gates)) == 2


@pytest.mark.parametrize("wrong, said", [
    ({"hidden_size": None}, "hidden_size"), ({"ffn_hidden_size": "5"}, "ffn_hidden_size"),
    ({"num_attention_heads": 3, "num_query_groups": 2}, "query groups"),
    ({"num_experts": 4, "moe_layer_freq": "([0]*1+[1]*1)"}, "moe_layer_freq"),
    ({"num_experts": 4, "moe_layer_freq": [1]}, "moe_layer_freq"),
    ({"num_experts": 4, "moe_latent_size": 3}, "moe_latent_size"),
    ({"num_experts": 4, "moe_mlp_glu_interleave_size": 2}, "blocks of 2"),
    ({"experimental_attention_variant": "kimi_delta"}, "kimi_delta"),
    ({"experimental_attention_variant": "gated_delta_net"}, "linear_attention_freq"),
    ({"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1]}, "linear_attention_freq"),
])  # fmt: skip
def test_arguments_that_cannot_be_read_stop_the_audit(wrong: dict[str, Any], said: str) -> None:
    facts, held = dense()
    with pytest.raises(ConfigError, match=said):
        placements(facts | wrong, held)


def test_arguments_that_change_what_numbers_mean() -> None:
    facts, _ = dense()
    assert meaning_arguments(facts) == []
    fine = {"moe_shared_expert_glu_interleave_size": None, "rotary_interleaved": False, "glu_linear_offset": 0.0}
    assert meaning_arguments(fine) == []
    other = {
        "moe_shared_expert_glu_interleave_size": 32, "rotary_interleaved": True,
        "mtp_use_repeated_layer": True, "softmax_type": "off-by-one", "qk_l2_norm": True,
        "dsa_indexer_scoring_relu": False, "glu_linear_offset": 1.0, "use_mup": True,
    }  # fmt: skip
    assert [(name, value) for name, value, _ in meaning_arguments(other)] == list(other.items())


def test_the_size_of_deepseek_v3() -> None:
    """925 tensors, 682,636,487,424 elements: the published model and its MTP layer without the two shared matrices."""
    facts = {
        "num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "ffn_hidden_size": 18432,
        "num_experts": 256, "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
        "moe_layer_freq": [0] * 3 + [1] * 58, "moe_router_enable_expert_bias": True, "multi_latent_attention": True,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
        "qk_layernorm": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
        "mtp_num_layers": 1, "vocab_size": 129280, "padded_vocab_size": 129280,
    }  # fmt: skip
    found = placements(facts, {})
    assert len({p.block.tensor for p in found}) == 925
    assert sum(p.block.volume for p in found) == 682_636_487_424
