"""Where megatron-core (0.16.1, 0.19.2) keeps each meaning: the Megatron half of the auditor.

Written from megatron-core's source and nothing else; the tables name the functions. It speaks of the physical keys
of a torch_dist checkpoint, in every spelling that megatron-core writes, so that no translation stands between the
auditor and the file. A key that no table names is not placed; the caller reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.audit.roles.megatron_attention import gqa_attention
from mtpconvert.audit.roles.megatron_delta_net import delta_net
from mtpconvert.audit.roles.megatron_facts import Facts, Seen, meaning_arguments
from mtpconvert.audit.roles.megatron_feed_forward import gated_mlp, moe
from mtpconvert.audit.roles.megatron_latent import dsa_attention, dsa_shared_attention, mla_attention
from mtpconvert.audit.roles.megatron_layout import Entry, Home, Param, cut, place_all, spelled
from mtpconvert.audit.roles.megatron_seen import in_layer, in_model
from mtpconvert.audit.roles.vocabulary import ROLES, minus_one
from mtpconvert.tensors import Block, Inventory

__all__ = ["expected_dtype", "meaning_arguments", "placements"]

# A layer is what attention and what feed-forward part it has: a new kind of module is one more table here.
ATTENTION: dict[str, Callable[[Facts], list[Entry]]] = {
    "gqa": gqa_attention,
    "mla": mla_attention,
    "dsa": dsa_attention,
    "dsa, shared index": dsa_shared_attention,
    "gdn": delta_net,
}
FEED_FORWARD: dict[bool, Callable[[Facts], list[Entry]]] = {False: gated_mlp, True: moe}

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_PREFIXES = ("", "module.", "model.")  # Megatron-LM and Bridge; NeMo 2; some RL stacks


def placements(facts: Mapping[str, Any], inventory: Inventory) -> list[Placement]:
    """What each element of the tensors in ``inventory`` means, under the Megatron arguments ``facts``.

    Shapes come from ``facts`` (the number of vocabulary rows on disk excepted, and what no fact says:
    ``megatron_seen``), so that a tensor of another shape than its role's is found. What the facts declare is placed
    even if it is not there; MTP layers also if they are there and not declared. Raises ConfigError where the facts
    lack a size that is needed, or contradict.
    """
    f, prefix = Facts(facts), _prefix(inventory)
    trunk, mtp = _trunk_homes(f, prefix, inventory), _mtp_homes(f, prefix, inventory)
    f = f.given(in_model(f, [*trunk, *mtp.values()], inventory))
    return [
        *_model(f, prefix, inventory),
        *(p for layer, homes in enumerate(trunk) for p in _trunk_layer(f, layer, homes, inventory)),
        *(p for k, homes in mtp.items() for p in _mtp_layer(f, k, f"{prefix}mtp.layers.{k}.", homes, inventory)),
    ]


def dialect(facts: Mapping[str, Any], inventory: Inventory) -> str:
    """ "bridge" where only Megatron-Bridge's modules have what is there, "" where stock megatron-core has it all.

    Raises ConfigError as ``placements`` does.
    """
    f, prefix = Facts(facts), _prefix(inventory)
    homes = [*_trunk_homes(f, prefix, inventory), *_mtp_homes(f, prefix, inventory).values()]
    return "" if in_model(f, homes, inventory) == Seen() else "bridge"


def _prefix(inventory: Inventory) -> str:
    return next((p for p in _PREFIXES if p + _EMBEDDING in inventory), "")


def expected_dtype(name: str) -> str | None:
    """The dtype in which megatron-core always saves this tensor (or role), None if it follows the model's.

    Source: moe/router.py: TopKRouter._maintain_float32_expert_bias, called before state is saved and loaded.
    """
    return "F32" if name == "router.correction" or name.endswith(".mlp.router.expert_bias") else None


def _layer(f: Facts, attention: str, is_moe: bool) -> list[Entry]:
    return [*ATTENTION[attention](f), *FEED_FORWARD[is_moe](f)]


def _place(
    f: Facts, place: str, entries: list[Entry], homes: tuple[Home, ...], inventory: Inventory
) -> Iterator[Placement]:
    """``place_all``; with zero-centred norms, what a norm keeps is its scale less one.

    All norms at once: extensions/transformer_engine.py: TENorm, TELayerNormColumnParallelLinear hand Transformer
    Engine ``config.layernorm_zero_centered_gamma``, whatever they norm; fusions/fused_layer_norm.py does the same.
    """
    for p in place_all(place, entries, homes, inventory):
        if f.zero_centred and f"{p.role.name}.minus_one" in ROLES:
            p = replace(p, role=replace(p.role, name=minus_one(p.role.name)))
        yield p


def _trunk_homes(f: Facts, prefix: str, inventory: Inventory) -> list[tuple[Home, ...]]:
    """Source: transformer/transformer_block.py: TransformerBlock.sharded_state_dict."""
    stem = f"{prefix}decoder.layers."
    stacked = any(key.startswith(stem) and not key.removeprefix(stem)[:1].isdigit() for key in inventory)
    homes = [(Home(f"{stem}{layer}."), Home(stem, layer, f.layers)) for layer in range(f.layers)]
    return [pair[::-1] for pair in homes] if stacked else list(homes)


def _trunk_layer(f: Facts, layer: int, homes: tuple[Home, ...], inventory: Inventory) -> Iterator[Placement]:
    f = f.given(in_layer(f, homes, inventory))
    entries = _layer(f, f.attention_pattern[layer], f.moe_pattern[layer])
    return _place(f, f"trunk.{layer}", entries, homes, inventory)


def _mtp_homes(f: Facts, prefix: str, inventory: Inventory) -> dict[int, tuple[Home, ...]]:
    """Of the decoder layer of each MTP layer declared or present, by number.

    Source: transformer/multi_token_prediction.py: MultiTokenPredictionLayer.sharded_state_dict (0.19.2 saves
    ``mtp_model_layer`` as ``transformer_layer``; as an attribute name it may still be met).
    """
    stem = f"{prefix}mtp.layers."
    keys = [key for key in inventory if key.startswith(stem)]
    heads = {key.removeprefix(stem).split(".")[0] for key in keys}
    found: dict[int, tuple[Home, ...]] = {}
    for k in sorted({*range(f.mtp_layers), *(int(head) for head in heads if head.isdecimal())}):
        homes = Home(f"{stem}{k}.transformer_layer."), Home(f"{stem}{k}.mtp_model_layer.")
        found[k] = homes[::-1] if any(key.startswith(homes[1].prefix) for key in keys) else homes
    return found


def _mtp_layer(f: Facts, k: int, stem: str, homes: tuple[Home, ...], inventory: Inventory) -> Iterator[Placement]:
    """One MTP layer: a joining projection of [embedding, hidden state], a decoder layer, a norm.

    Source: transformer/multi_token_prediction.py: MultiTokenPredictionLayer.__init__, ._concat_embeddings,
    ._postprocess.
    """
    h = f.hidden
    row, first, second, column = slice(0, h), slice(0, 1), slice(1, 2), slice(0, h)
    joined = Param("eh_proj.weight", ((h,), (2, h)), (
        cut("mtp.proj.embedding", (h, h), row, first, column),
        cut("mtp.proj.hidden", (h, h), row, second, column),
    ))  # fmt: skip
    block = [
        spelled("mtp.embedding_norm", (h,), "enorm.weight"),
        spelled("mtp.hidden_norm", (h,), "hnorm.weight"),
        Entry(((joined,),)),
        spelled("mtp.final_norm", (h,), "final_layernorm.weight"),
    ]
    place = f"mtp.{k}"
    f = f.given(in_layer(f, homes, inventory))
    yield from _place(f, place, block, (Home(stem),), inventory)
    attention, is_moe = _mtp_kinds(f, k, homes, inventory)
    yield from _place(f, place, _layer(f, attention, is_moe), homes, inventory)


def _mtp_kinds(f: Facts, k: int, homes: tuple[Home, ...], inventory: Inventory) -> tuple[str, bool]:
    """Attention and MoE or not of an MTP layer: as its tensors say, else like the trunk's last layer.

    The stock builders take the spec of the last decoder layer (models/gpt/gpt_layer_specs.py:
    get_gpt_mtp_block_spec_for_backend), but ``mtp_block_spec`` of GPTModel takes any, and no argument tells.
    """

    def there(*keys: str) -> bool:
        return any(home.prefix + key in inventory for home in homes for key in keys)

    attention = "gdn" if there("self_attention.in_proj.weight.query") else f.mtp_attention(k)
    if f.maybe("num_experts") is None:
        return attention, False
    routed = there("mlp.router.weight")
    dense = there("mlp.linear_fc1.weight", "mlp.linear_fc1.weight_w")
    return attention, f.moe_pattern[-1] if routed == dense else routed


def _model(f: Facts, prefix: str, inventory: Inventory) -> Iterator[Placement]:
    """Embedding, head and last norm; a tied model saves one matrix, of which a saved head is a copy.

    Source: models/gpt/gpt_model.py: GPTModel.__init__, .shared_embedding_or_output_weight;
    models/common/language_module/language_module.py: tie_embeddings_and_output_weights_state_dict.
    """
    yield from _vocabulary(f, "embedding", prefix + _EMBEDDING, inventory)
    untied = f.flag("untie_embeddings_and_output_weights")
    present = prefix + _HEAD in inventory
    if untied or (untied is None and present):
        yield from _vocabulary(f, "head", prefix + _HEAD, inventory)
    elif present:
        yield from _vocabulary(f, "embedding", prefix + _HEAD, inventory, copy=True)
    norm = spelled("final_norm", (f.hidden,), "decoder.final_layernorm.weight")
    yield from _place(f, "", [norm], (Home(prefix),), inventory)


def _vocabulary(f: Facts, name: str, key: str, inventory: Inventory, copy: bool = False) -> Iterator[Placement]:
    """Rows below ``vocab_size`` are tokens; the rest is padding, whose role stands at a place called ``name``."""
    spec = inventory.get(key)
    on_disk = spec.shape[0] if spec is not None and spec.shape else f.maybe("padded_vocab_size")
    tokens = f.maybe("vocab_size") or on_disk or f.need("padded_vocab_size")
    rows = max(tokens, on_disk or 0)
    shape = (rows, f.hidden)

    def part(role: Role, start: int, stop: int) -> Placement:
        block = Block(key, shape, shape, ((start, stop), (0, f.hidden)))
        return Placement(role, ((0, stop - start), (0, f.hidden)), block, copy=copy)

    yield part(Role("", name, (tokens, f.hidden)), 0, tokens)
    if rows > tokens:
        yield part(Role(name, "padding", (rows - tokens, f.hidden)), tokens, rows)
