"""Megatron's arguments as a checkpoint carries them, read with the defaults and fallbacks of megatron-core itself.

Sources (0.16.1 and 0.19.2): ``transformer/transformer_config.py: TransformerConfig.__post_init__``,
``training/argument_utils.py: core_transformer_config_from_args``, ``models/gpt/gpt_layer_specs.py:
get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec_for_backend``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.errors import ConfigError

_HINT = "look at the args in common.pt (or common_state) of the checkpoint"


@dataclass(frozen=True, slots=True)
class Seen:
    """What no argument of Megatron-LM says of a model: read off keys and shapes by ``megatron_seen``.

    The defaults are what stock megatron-core builds. ``value_dim``: of a value head, where a query head has another.
    ``mixed``: attention layers are of several kinds, and some may have sinks where others have none. ``groups``: of
    key/value heads, in the one layer at hand, where its own shape says so. ``*_before``, ``*_after``: whether every
    layer must have the norm of what attention (or the feed-forward part) reads, and of what it gives.
    """

    value_dim: int | None = None
    joint_norms: bool = False
    mixed: bool = False
    attention_before: bool = True
    attention_after: bool = False
    mlp_before: bool = True
    mlp_after: bool = False
    groups: int | None = None


class Facts:
    """Typed access to Megatron arguments; an argument that is absent and one that is None are the same."""

    def __init__(self, arguments: Mapping[str, Any], seen: Seen | None = None) -> None:
        self._arguments = arguments
        self.seen = Seen() if seen is None else seen

    def given(self, seen: Seen) -> Facts:
        """The same arguments, for a model or a layer of which this was seen."""
        return Facts(self._arguments, seen)

    def flag(self, name: str) -> bool | None:
        """True or False as the arguments say; None when they say nothing."""
        value = self._arguments.get(name)
        return None if value is None else bool(value)

    def maybe(self, name: str) -> int | None:
        """A positive integer, or None where absent, None or 0. Raises ConfigError for anything else."""
        value = self._arguments.get(name)
        if value is None or value == 0:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{name} is {value!r}, not a whole number", where=f"Megatron arguments: {name}",
                              next_step=_HINT)  # fmt: skip
        return value

    def need(self, name: str) -> int:
        """A positive integer. Raises ConfigError where it is absent."""
        value = self.maybe(name)
        if value is None:
            raise ConfigError(f"the Megatron arguments do not say {name}", where=f"Megatron arguments: {name}",
                              next_step=_HINT)  # fmt: skip
        return value

    @property
    def layers(self) -> int:
        return self.need("num_layers")

    @property
    def hidden(self) -> int:
        return self.need("hidden_size")

    @property
    def heads(self) -> int:
        return self.need("num_attention_heads")

    @property
    def groups(self) -> int:
        """``num_query_groups`` counts only with ``group_query_attention``; else it may be a stale default of 1."""
        if self.seen.groups is not None:
            return self.seen.groups
        groups = self.maybe("num_query_groups")
        if self.flag("group_query_attention") is False or groups is None:
            return self.heads
        if self.heads % groups:
            raise ConfigError(
                f"{self.heads} attention heads do not divide into {groups} query groups",
                where="Megatron arguments: num_attention_heads, num_query_groups",
                next_step=_HINT,
            )
        return groups

    @property
    def head_dim(self) -> int:
        return self.maybe("kv_channels") or self.hidden // self.heads

    @property
    def value_dim(self) -> int:
        """Of grouped-query attention; ``v_head_dim`` alone says nothing there: its default of 128 is always given."""
        return self.seen.value_dim or self.head_dim

    @property
    def learnt_sinks(self) -> bool | None:
        """Whether a softmax has a logit per head of its own: ``softmax_type``, which is said for all layers alike."""
        if self.seen.mixed:
            return None
        kind = self._arguments.get("softmax_type")
        return None if kind is None else kind == "learnable"

    @property
    def zero_centred(self) -> bool:
        """Whether every norm keeps its scale less one; an argument of the launch, or of the config."""
        return bool(self.flag("apply_layernorm_1p") or self.flag("layernorm_zero_centered_gamma"))

    @property
    def sparse(self) -> bool:
        return self._variant == "dsa"

    @property
    def _variant(self) -> str | None:
        """Raises ConfigError for an ``experimental_attention_variant`` that no table knows."""
        variant = self._arguments.get("experimental_attention_variant")
        if variant in (None, "gated_delta_net", "dsa"):
            return variant
        raise ConfigError(f"experimental_attention_variant is {variant!r}, whose tensors nobody here knows",
                          where="Megatron arguments: experimental_attention_variant", next_step=_HINT)  # fmt: skip

    @property
    def attention_pattern(self) -> list[str]:
        """The kind of attention of each decoder layer: a key of ``megatron.ATTENTION``.

        Raises ConfigError for a ``linear_attention_freq`` that is no integer or list.
        """
        if self._variant != "gated_delta_net":
            return [self._attention(layer + 1) for layer in range(self.layers)]
        # experimental_attention_variant_module_specs.py: get_linear_attention_pattern; every n-th is an ordinary one
        linear = self._pattern("linear_attention_freq", lambda layer, every: (layer + 1) % every != 0)
        return ["gdn" if one else self._attention(layer + 1) for layer, one in enumerate(linear)]

    def mtp_attention(self, k: int) -> str:
        """Of the MTP layer ``k``, which counts its own layers from 1. Stock builders give it no delta net."""
        return self._attention(k + 1)

    def _attention(self, number: int) -> str:
        """The ordinary attention of the layer ``number``, from 1; sparse attention may share an earlier index.

        Source: experimental_attention_variant/dsa.py: is_dsa_skip_topk_layer.
        """
        if not self.flag("multi_latent_attention"):
            return "gqa"
        every, first = self.maybe("dsa_indexer_topk_freq") or 1, self.maybe("dsa_indexer_skip_topk_offset") or 1
        if not self.sparse:
            return "mla"
        return "dsa" if max(number - first, 0) % every == 0 else "dsa, shared index"

    @property
    def moe_pattern(self) -> list[bool]:
        """Which decoder layers are MoE. Raises ConfigError for a ``moe_layer_freq`` that is no integer or list."""
        if self.maybe("num_experts") is None:
            return [False] * self.layers
        return self._pattern("moe_layer_freq", lambda layer, every: layer % every == 0, default=1)

    def _pattern(self, name: str, rule: Callable[[int, int], bool], default: int | None = None) -> list[bool]:
        """One flag per decoder layer, from a list of zeros and ones or by ``rule`` (layer from 0, frequency)."""
        frequency = self._arguments.get(name)
        if frequency is None:
            frequency = default
        if isinstance(frequency, int) and frequency > 0:
            return [rule(layer, frequency) for layer in range(self.layers)]
        if isinstance(frequency, list | tuple) and len(frequency) == self.layers and set(frequency) <= {0, 1}:
            return [one == 1 for one in frequency]
        raise ConfigError(
            f"{name} is {frequency!r}: neither a whole number nor a list of {self.layers} zeros and ones",
            where=f"Megatron arguments: {name}",
            next_step=_HINT,
        )

    @property
    def expert_blocks(self) -> int:
        """Rows in a block where experts keep gate and up in turn, else 0; SequentialMLP never does (moe/experts.py)."""
        grouped = self.flag("moe_grouped_gemm") is not False
        return (self.maybe("moe_mlp_glu_interleave_size") or 0) if grouped else 0

    @property
    def expert_ranks(self) -> int:
        """Ranks over which each expert was split when it was saved (training/arguments.py: validate_args)."""
        return self.maybe("expert_tensor_parallel_size") or self.maybe("tensor_model_parallel_size") or 1

    @property
    def mtp_layers(self) -> int:
        """Physical MTP layers: one if ``mtp_use_repeated_layer``, which applies it ``mtp_num_layers`` times."""
        depth = self.maybe("mtp_num_layers") or 0
        return min(depth, 1) if self.flag("mtp_use_repeated_layer") else depth


# Under any other value, a number at the same place under the same name means something else than this half says.
_STANDS_FOR: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("moe_shared_expert_glu_interleave_size", (None,),
     "rows of the shared expert's linear_fc1 alternate in blocks of gate and up (moe/shared_experts.py)"),
    ("rotary_interleaved", (None, False),
     "query and key dims rotate as pairs (2i, 2i+1), not (i, i + dim/2) (rope_utils.py: _rotate_half)"),
    ("mtp_use_repeated_layer", (None, False),
     "mtp.layers.0 serves every depth, whatever mtp_num_layers says (MultiTokenPredictionBlock.forward)"),
    ("softmax_type", (None, "vanilla", "learnable"),
     "every softmax has a sink that is not stored (dot_product_attention.py: DotProductAttention.__init__)"),
    ("qk_l2_norm", (None, False),
     "queries and keys are normed without a weight (attention.py: SelfAttention.__init__)"),
    ("dsa_indexer_scoring_relu", (None, True),
     "index scores are summed as they are, not their positive parts (dsa.py: _compute_index_scores)"),
    ("glu_linear_offset", (None, 0, 0.0),
     "a gated MLP multiplies by up + offset, so up is stored less the offset (mlp.py: MLP.forward)"),
    ("use_mup", (None, False),
     "embeddings, logits and attention are multiplied by width factors outside the weights (use_mup of 0.19.2)"),
)  # fmt: skip


def meaning_arguments(facts: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(argument, its value, why it matters) for each argument set to what the tables of this half do not stand for.

    Only arguments that change neither a name nor (always) a shape are listed: the others show as uncovered tensors.
    """
    return [(name, facts[name], why) for name, fine, why in _STANDS_FOR if name in facts and facts[name] not in fine]
