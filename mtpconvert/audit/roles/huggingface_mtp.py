"""What stands around the layers: embedding, head, final norm, and the block of a multi-token-prediction layer.

Sources (transformers 5.24.0): ``*ForCausalLM._tied_weights_keys``; modeling_layers.py, ``MtpLayer.forward`` (the joined
input is [enorm(embedding), hnorm(hidden)] unless ``mtp_hidden_states_first``), ``MtpModel.get_weight_conversions``
(MTP layer i is ``model.layers.{num_hidden_layers + i}``), ``MtpModel._keys_to_ignore_on_load_unexpected`` (embedding
and head are the main model's, repeated or not); conversion_mapping.py, "MtpModel" (``shared_head.norm`` is the norm
after the layer; ``fc``, ``pre_fc_norm_*``, ``norm`` stand one level up). Published DeepSeek-V3 files repeat both the
embedding and the head in the layer. Layouts that no class of transformers reads: vLLM 0.33.0 and SGLang 0.5.23, as the
layouts below say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface_site import Piece, Settings, Site
from mtpconvert.tensors import Inventory

_COPIES = ("embed_tokens.", "shared_head.")


@dataclass(frozen=True)
class MtpLayout:
    """Where files keep MTP layers.

    ``block`` and ``layer`` are prefixes, of the MTP block's own tensors and of the decoder layer in it: {layers} is
    what trunk layers are numbered under, {n} a number that counts on from the trunk's, {i} one that starts at 0.

    ``hidden_first``: the joined input is [hidden state, embedding], fixed or by a config key. ``count``: the config key
    that says how many layers there are, if any does. ``one_block``: all layers share the block of the first.
    """

    block: str
    layer: str
    embedding_norm: str = "enorm.weight"
    hidden_norm: str = "hnorm.weight"
    proj: str = "eh_proj.weight"
    final_norm: str = "shared_head.norm.weight"
    hidden_first: bool | str = False
    count: str | None = "num_nextn_predict_layers"
    one_block: bool = False

    def prefixes(self, layers: str, trunk: int, depth: int) -> tuple[str, str]:
        """The prefixes of the block and of the decoder layer of MTP layer ``depth`` after ``trunk`` trunk layers."""
        names = {"layers": layers, "n": trunk + depth, "i": depth}
        return self.block.format(**names), self.layer.format(**names)

    def own(self) -> tuple[str, ...]:
        """How names of the block's tensors begin, after its prefix; copies of the model's count too."""
        named = (self.embedding_norm, self.hidden_norm, self.proj, self.final_norm)
        return (*(name.removesuffix("weight") for name in named), *_COPIES)


APPENDED = MtpLayout("{layers}{n}.", "{layers}{n}.", hidden_first="mtp_hidden_states_first")
# vLLM hy_v3_mtp.py, bailing_moe_mtp.py: [enorm(embedding), hnorm(hidden)], final_layernorm after the layer
APPENDED_FINAL_LAYERNORM = MtpLayout("{layers}{n}.", "{layers}{n}.", final_norm="final_layernorm.weight")
# conversion_mapping.py, "MtpModel" (Mellum); vLLM qwen3_next_mtp.py, qwen3_5_mtp.py, exaone_moe_mtp.py:
# fc([pre_fc_norm_embedding(embedding), pre_fc_norm_hidden(hidden)]), one fc and one norm for all layers
TOP_LEVEL = MtpLayout(
    "mtp.",
    "mtp.layers.{i}.",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    proj="fc.weight",
    final_norm="norm.weight",
    one_block=True,
)
# modeling_mimo.py of XiaomiMiMo/MiMo-7B, MiMoMTPLayers.forward; vLLM and SGLang mimo_mtp.py
MIMO = MtpLayout(
    "model.mtp_layers.{i}.",
    "model.mtp_layers.{i}.",
    embedding_norm="token_layernorm.weight",
    hidden_norm="hidden_layernorm.weight",
    proj="input_proj.weight",
    final_norm="final_layernorm.weight",
    hidden_first=True,
)

# mimo_v2_flash/modeling_mimo_v2_flash.py drops them; SGLang mimo_v2_flash_nextn.py, MiMoV2ModelNextN and MiMoV2MTP:
# [enorm(embedding), hnorm(hidden)]; no key of published configs counts them
MIMO_V2 = MtpLayout("model.mtp.layers.{i}.", "model.mtp.layers.{i}.", final_norm="final_layernorm.weight", count=None)


def around_the_trunk(site: Site, embedding: str) -> Iterator[Placement]:
    """Embedding, head and final norm. With ``tie_word_embeddings`` a head on disk is a copy of the embedding.

    ``site`` has the prefix of the trunk; the head stands beside it, as ``lm_head.weight``, in older files of a model
    with vision inside its text model (transformers conversion_mapping.py: ``^language_model.lm_head``).
    """
    settings = site.settings
    vectors = ((settings.count("vocab_size"),), (settings.count("hidden_size"),))
    yield site.whole(embedding, "embedding", vectors)
    yield site.norm("norm.weight", "final_norm", settings.count("hidden_size"))
    top = replace(site, prefix="language_model." if site.prefix == "language_model.model." else "")
    if not settings.flag("tie_word_embeddings"):
        yield top.whole("lm_head.weight", "head", vectors)
    elif top.has("lm_head.weight"):
        yield top.whole("lm_head.weight", "embedding", vectors, copy=True)


def mtp_block(site: Site, layout: MtpLayout) -> Iterator[Placement]:
    """All of an MTP layer but the decoder layer in it; copies of the model's tensors only where they are on disk."""
    settings = site.settings
    hidden = settings.count("hidden_size")
    halves = [Piece("mtp.proj.embedding", hidden), Piece("mtp.proj.hidden", hidden)]
    if settings.on(layout.hidden_first):
        halves.reverse()
    yield site.norm(layout.embedding_norm, "mtp.embedding_norm", hidden)
    yield site.norm(layout.hidden_norm, "mtp.hidden_norm", hidden)
    yield from site.split(layout.proj, ((hidden,), (2 * hidden,)), 1, halves)
    yield site.norm(layout.final_norm, "mtp.final_norm", hidden)

    vectors = ((settings.count("vocab_size"),), (hidden,))
    head = "embedding" if settings.flag("tie_word_embeddings") else "head"
    for tensor, role in (("embed_tokens.weight", "embedding"), ("shared_head.head.weight", head)):
        if site.has(tensor):
            yield site.of_model().whole(tensor, role, vectors, copy=True)


def mtp_depths(layout: MtpLayout, layers: str, settings: Settings, inventory: Inventory) -> list[int]:
    """Every MTP layer that the config declares, and every other one of which a tensor is on disk.

    A count that is null declares none, as does a layout without one. Where MTP layers are numbered on from the trunk's,
    one counts as on disk only by a tensor of its block: without any it is a surplus trunk layer, which is not placed
    and so stays unexpected.
    """
    trunk = settings.count("num_hidden_layers")
    depths = set(range((layout.count and settings.optional(layout.count)) or 0))
    appended = "{n}" in layout.block
    numbered = layout.block if appended else layout.layer
    pattern = re.compile(
        re.escape(numbered.format(layers=layers, n="#", i="#")).replace(r"\#", r"(\d+)") + "(.*)", re.A
    )
    shared = layout.block if layout.one_block else None
    # of a large model nearly all names are the trunk's, whose numbers need no pattern to be passed over
    start = len(numbered.format(layers=layers, n="#", i="#").partition("#")[0])
    below = {str(layer) for layer in range(trunk)} if appended else set()
    for name in inventory:
        if below and name[start : name.find(".", start)] in below:
            continue
        found = pattern.fullmatch(name)
        if found and not appended:
            depths.add(int(found[1]))
        elif found and int(found[1]) >= trunk and found[2].startswith(layout.own()):
            depths.add(int(found[1]) - trunk)
        elif shared is not None and name.startswith(shared):
            depths.add(0)
    return sorted(depths)
