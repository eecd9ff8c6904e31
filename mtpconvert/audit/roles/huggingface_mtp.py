"""What stands around the layers: embedding, head, final norm, and the block of a multi-token-prediction layer.

Sources (transformers 5.24.0): ``*ForCausalLM._tied_weights_keys``; modeling_layers.py, ``MtpLayer.forward`` (the joined
input is [enorm(embedding), hnorm(hidden)] unless ``mtp_hidden_states_first``), ``MtpModel.get_weight_conversions``
(MTP layer i is ``model.layers.{num_hidden_layers + i}``), ``MtpModel._keys_to_ignore_on_load_unexpected`` (embedding
and head are the main model's, repeated or not); conversion_mapping.py, "MtpModel" (``shared_head.norm`` is the norm
after the layer). Published DeepSeek-V3 files repeat both the embedding and the head in the layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface_site import Piece, Settings, Site
from mtpconvert.tensors import Inventory

BLOCK_TENSORS = ("enorm.", "hnorm.", "eh_proj.", "embed_tokens.", "shared_head.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)", re.ASCII)


def around_the_trunk(site: Site) -> Iterator[Placement]:
    """Embedding, head and final norm. With ``tie_word_embeddings`` a head on disk is a copy of the embedding."""
    settings = site.settings
    vectors = ((settings.count("vocab_size"),), (settings.count("hidden_size"),))
    yield site.whole("model.embed_tokens.weight", "embedding", vectors)
    yield site.whole("model.norm.weight", "final_norm", ((settings.count("hidden_size"),),))
    if not settings.flag("tie_word_embeddings"):
        yield site.whole("lm_head.weight", "head", vectors)
    elif site.has("lm_head.weight"):
        yield site.whole("lm_head.weight", "embedding", vectors, copy=True)


def mtp_block(site: Site) -> Iterator[Placement]:
    """All of an MTP layer but the decoder layer in it; copies of the model's tensors only where they are on disk."""
    settings = site.settings
    hidden = settings.count("hidden_size")
    halves = [Piece("mtp.proj.embedding", hidden), Piece("mtp.proj.hidden", hidden)]
    if settings.flag("mtp_hidden_states_first"):
        halves.reverse()
    yield site.whole("enorm.weight", "mtp.embedding_norm", ((hidden,),))
    yield site.whole("hnorm.weight", "mtp.hidden_norm", ((hidden,),))
    yield from site.split("eh_proj.weight", ((hidden,), (2 * hidden,)), 1, halves)
    yield site.whole("shared_head.norm.weight", "mtp.final_norm", ((hidden,),))

    vectors = ((settings.count("vocab_size"),), (hidden,))
    head = "embedding" if settings.flag("tie_word_embeddings") else "head"
    for tensor, role in (("embed_tokens.weight", "embedding"), ("shared_head.head.weight", head)):
        if site.has(tensor):
            yield site.of_model().whole(tensor, role, vectors, copy=True)


def mtp_depths(settings: Settings, inventory: Inventory) -> list[int]:
    """Every MTP layer that the config declares, and every other one of which a tensor of the MTP block is on disk.

    A count that is null declares none. A layer past the trunk without any such tensor is a surplus trunk layer: it is
    not placed, so it stays unexpected.
    """
    trunk = settings.count("num_hidden_layers")
    depths = set(range(settings.optional("num_nextn_predict_layers") or 0))
    for name in inventory:
        found = _LAYER.fullmatch(name)
        if found and int(found[1]) >= trunk and found[2].startswith(BLOCK_TENSORS):
            depths.add(int(found[1]) - trunk)
    return sorted(depths)
