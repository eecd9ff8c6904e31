"""Every element of random small models lands where Megatron looks for it, and comes back to where it was.

The real hf2mcore and mcore2hf on real files whose every element is a pattern of its own; torch reads what they wrote;
where each element belongs is said by ``tests/support/mcore_layout.py``.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_hf import ToHf, mcore2hf
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from tests.support.dist_read import read_torch_dist
from tests.support.mcore_layout import megatron_tensors
from tests.support.scratch import scratch
from tests.support.tiny import read_safetensors, sha256_tree, write_tiny
from tests.support.tiny_glm import write_glm

Case = dict[str, Any]


def check(
    family: str, overrides: dict[str, Any], options: dict[str, Any], left_out: Collection[str] = (), **tiny: Any
) -> None:
    """Write the checkpoint and compare both ways.

    ``left_out``: keys that config.json lacks although the tensors are those of their values in ``overrides``.
    """
    with scratch() as folder:
        source = write_tiny(family, folder / "hf", dtype="F32", config_overrides=overrides, **tiny)
        config = json.loads((source / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in left_out}
        (source / "config.json").write_text(json.dumps(config, indent=1))
        check_files(source, options, tiny.get("mtp_layers", 0))


def check_files(source: Path, options: dict[str, Any], mtp_layers: int) -> None:
    """Convert, compare with numpy what torch reads, convert back, compare the files."""
    folder = source.parent
    config = json.loads((source / "config.json").read_text())
    done = hf2mcore(source, folder / "mcore", ToMcore(**options), Callbacks())
    proof = done.plan.proof
    hf = {
        name: np.frombuffer(data, "<u4").reshape(shape) for name, (_, shape, data) in read_safetensors(source).items()
    }
    multiple = options["make_vocab_size_divisible_by"] * options["tp"]
    expected = megatron_tensors(config, hf, mtp_layers, multiple)
    got = read_torch_dist(folder / "mcore" / "release")
    assert set(got) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(got[name], values), name
    assert proof.elements + proof.filled == sum(values.size for values in expected.values())
    assert proof.mcore_tensors == len(expected)
    assert (done.plan.mtp.present, done.plan.mtp.written) == (mtp_layers, mtp_layers)
    mcore2hf(folder / "mcore", folder / "back", ToHf(), Callbacks())
    assert sha256_tree(folder / "back") == sha256_tree(source)


def some_of(draw: st.DrawFn, *keys: str) -> set[str]:
    """Some of these keys, to be left out of config.json; their values must be the class's defaults."""
    return draw(st.sets(st.sampled_from(keys)))


padding = st.fixed_dictionaries(
    {"make_vocab_size_divisible_by": st.integers(1, 6), "tp": st.sampled_from([1, 1, 2]), "spec": st.just("te")}
)


@st.composite
def deepseek(draw: st.DrawFn) -> Case:
    size = st.integers(1, 5)
    layers, mtp_layers, experts = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(2, 5))
    config = {
        "num_hidden_layers": layers,
        # an MTP layer is built as the last layer is, so with MTP that one has experts
        "first_k_dense_replace": draw(st.integers(0, min(3, layers - (mtp_layers > 0)))),
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": draw(st.integers(1, 9)),
        "moe_intermediate_size": draw(size),
        "n_routed_experts": experts,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": draw(st.integers(1, 3)),
        "num_attention_heads": draw(size),
        "q_lora_rank": draw(st.one_of(st.none(), size)),
        "kv_lora_rank": draw(size),
        "qk_nope_head_dim": draw(size),
        "qk_rope_head_dim": 2 * draw(size),
        "v_head_dim": draw(size),
        "vocab_size": draw(st.integers(1, 13)),
        "tie_word_embeddings": draw(st.sampled_from([False, False, True])),
    }
    left_out = some_of(draw, "attention_bias", "rope_interleave", "norm_topk_prob")
    if mtp_layers:  # without the key, readers look for an MTP layer
        left_out |= some_of(draw, "num_nextn_predict_layers")
    if not config["tie_word_embeddings"]:
        left_out |= some_of(draw, "tie_word_embeddings")
    return {
        "overrides": config,
        "options": draw(padding),
        "left_out": left_out,
        "mtp_layers": mtp_layers,
        "shards": draw(st.integers(1, min(3, layers + 1))),
        "copies": draw(st.booleans()),
    }


@settings(max_examples=20)
@given(deepseek())
def test_deepseek_v3(case: Case) -> None:
    check("deepseek_v3", **case)


@st.composite
def grouped_query(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(["qwen3", "qwen2", "llama", "mistral"]))
    groups, queries = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head = 2 * draw(st.integers(1, 4))
    layers = draw(st.integers(1, 3))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": groups * queries,
        "num_key_value_heads": groups,
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": draw(st.integers(1, 9)),
        "head_dim": head,
        "vocab_size": draw(st.integers(1, 13)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family == "qwen2":  # its heads are always hidden / heads wide
        del config["head_dim"]
        config["hidden_size"] = groups * queries * head
    left_out = some_of(draw, "attention_dropout", "rms_norm_eps", "attention_bias")
    if family in ("llama", "mistral") and draw(st.booleans()):
        config["hidden_size"] = groups * queries * head
        left_out.add("head_dim")
    if family == "llama" and queries == 1:
        left_out |= some_of(draw, "num_key_value_heads")
    if not config["tie_word_embeddings"]:
        left_out |= some_of(draw, "tie_word_embeddings")
    return {
        "family": family,
        "overrides": config,
        "options": draw(padding),
        "left_out": left_out,
        "shards": draw(st.integers(1, 2)),
    }


@settings(max_examples=20)
@given(grouped_query())
def test_grouped_query_families(case: Case) -> None:
    check(**case)


@settings(max_examples=12)
@given(st.data())
def test_glm4_moe(data: st.DataObject) -> None:
    draw = data.draw
    layers, mtp_layers = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    groups, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": mtp_layers,
        "first_k_dense_replace": draw(st.integers(0, layers - (mtp_layers > 0))),
        "num_attention_heads": groups * queries,
        "num_key_value_heads": groups,
        "head_dim": 4 * draw(st.integers(1, 2)),
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": draw(st.integers(1, 9)),
        "moe_intermediate_size": draw(st.integers(1, 5)),
        "n_routed_experts": draw(st.integers(2, 5)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "vocab_size": draw(st.integers(1, 13)),
        "attention_bias": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
    }
    with scratch() as folder:
        check_files(write_glm(folder / "hf", **config), draw(padding), mtp_layers)


def test_class_defaults_stand_in_for_sizes_that_the_config_leaves_out() -> None:
    """Qwen3Config: head_dim 128; MistralConfig: 8 key-value heads; the tensors are written with these sizes."""
    options = {"make_vocab_size_divisible_by": 4, "tp": 1}
    check("qwen3", {"head_dim": 128, "hidden_size": 4, "vocab_size": 7}, options, {"head_dim"})
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 2, "hidden_size": 4}
    check("mistral", heads, options, {"num_key_value_heads"})
