"""The Hugging Face half of the roles: which block of which tensor of an HF checkpoint holds which meaning.

Written from transformers 5.24.0 alone, with no mapping file and no Megatron code open. A family is a table of module
kinds (huggingface_families.py); the modules name the functions they were read from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface_attention import Module
from mtpconvert.audit.roles.huggingface_families import FAMILIES
from mtpconvert.audit.roles.huggingface_family import Family, LayerNorms
from mtpconvert.audit.roles.huggingface_mtp import around_the_trunk, mtp_block, mtp_depths
from mtpconvert.audit.roles.huggingface_site import Settings, Site
from mtpconvert.errors import ConfigError, NotRepresentableError
from mtpconvert.tensors import Inventory

__all__ = ["FAMILIES", "expected_dtype", "other_prefixes", "placements"]

_MOST_PLACES = 500_000  # ten times DeepSeek-V3's; a config with a slip in a count would fill the memory


def placements(config: Mapping[str, Any], inventory: Inventory) -> list[Placement]:
    """Where each role of the model stands in the HF checkpoint that ``config`` (a parsed config.json) describes.

    Names and shapes come from the config alone; ``inventory`` (what is there) decides only about tensors that may be
    absent (copies of the embedding and the head), stacked or single experts, spellings that a family has several of,
    and MTP layers that the config does not declare. A declared layer is placed whether or not it is there. Raises
    NotRepresentableError for an architecture, or a variant of one, that has no table here, and ConfigError for a config
    that contradicts itself.
    """
    family = _family(config)
    settings = Settings(_text(family, config), family.defaults, family.aliases)
    found = list(islice(_model(family, settings, inventory), _MOST_PLACES + 1))
    if len(found) > _MOST_PLACES:
        raise ConfigError(f"config.json describes a model of more than {_MOST_PLACES:,} tensors")
    return found


def other_prefixes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What names of tensors of a model beside the language model (vision) begin with; these have no roles. None in an
    architecture that has no table."""
    named = config.get("architectures") or [None]
    return FAMILIES[named[0]].beside if named[0] in FAMILIES else ()


def expected_dtype(name: str, config: Mapping[str, Any]) -> str | None:
    """The dtype (as safetensors spells it) that the tensor must have whatever the model's is; None: no such demand."""
    return "F32" if name.endswith(_family(config).float32) else None


def _family(config: Mapping[str, Any]) -> Family:
    named = config.get("architectures") or [None]
    if named[0] not in FAMILIES:
        raise NotRepresentableError(
            f"the auditor knows no roles for architecture {named[0] or '(none named)'}",
            where="config.json: architectures",
            next_step=f"known are {', '.join(FAMILIES)}",
        )
    return FAMILIES[named[0]]


def _text(family: Family, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model; whether its head is tied is said beside it (``_tied_weights_keys``)."""
    if family.text is None:
        return config
    inner = config.get(family.text)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"there is no {family.text}", where=f"config.json: {family.text}")
    return {**inner, **{key: config[key] for key in ("tie_word_embeddings",) if key in config}}


def _model(family: Family, settings: Settings, inventory: Inventory) -> Iterator[Placement]:
    trunk, layout = settings.count("num_hidden_layers"), family.mtp
    root = next((root for root in family.roots if root + family.embedding in inventory), family.roots[0])
    top = Site("", root, settings, inventory, family.zero_centred)
    yield from around_the_trunk(top, family.embedding)
    for n in range(trunk):
        site = top.at(f"trunk.{n}", f"{root}layers.{n}.")
        yield from _decoder_layer(site, family.attention(settings, n), family.feed_forward(settings, n), family.norms)
    for depth in mtp_depths(layout, f"{root}layers.", settings, inventory):
        block, layer = layout.prefixes(f"{root}layers.", trunk, depth)
        if depth == 0 or not layout.one_block:
            yield from mtp_block(top.at(f"mtp.{depth}", block), layout)
        attention = (family.mtp_attention or family.attention)(settings, depth)
        feed_forward, norms = family.mtp_feed_forward(settings, depth), family.mtp_norms or family.norms
        yield from _decoder_layer(top.at(f"mtp.{depth}", layer), attention, feed_forward, norms)


def _decoder_layer(site: Site, attention: Module, feed_forward: Module, norms: LayerNorms) -> Iterator[Placement]:
    """``*DecoderLayer.forward``."""
    hidden = site.settings.count("hidden_size")

    def norm(tensor: str | None, role: str) -> Iterator[Placement]:
        if tensor is not None:
            yield site.norm(tensor, role, hidden)

    yield from norm(norms.before_attention, "attn.input_norm")
    yield from attention(site)
    yield from norm(norms.after_attention, "attn.output_norm")
    yield from norm(norms.before_mlp, "mlp.norm")
    yield from feed_forward(site)
    yield from norm(norms.after_mlp, "mlp.output_norm")
