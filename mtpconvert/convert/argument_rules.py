"""config.json -> the Megatron arguments that a checkpoint carries (``args`` of common.pt), by a mapping's [arguments].

A rule is one of

    num_layers    = "num_hidden_layers"                       a config key, a symbol of [dims], or an integer expression
    norm_epsilon  = { key = "rms_norm_eps", default = 1e-6 }  a config key of any type, or several in
                                                              order of preference; the default is reported
    q_lora_rank   = { expr = "q_lora_rank", when = "q_lora_rank" }   None where the key is missing, null, false or 0
    normalization = { value = "RMSNorm" }                     what the architecture is, whatever the config says
    swiglu        = { value = true, requires = { hidden_act = ["silu"] } }   and refused where the config says otherwise
    untie_...     = { not = "tie_word_embeddings" }
    functions     = ["rope", "sliding_window"]                named functions, each giving several arguments

In ``requires`` a missing or null key stands for its class's default, which the list must contain.
What no config decides (parallel sizes, padding, the rest that ``load_args_from_checkpoint`` reads) is added here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.convert.argument_functions import FUNCTIONS
from mtpconvert.convert.argument_names import GPT_MODEL, Plain
from mtpconvert.convert.argument_refusal import refuse
from mtpconvert.errors import ConfigError, MappingError
from mtpconvert.mapping.dims import Scope, check_expression, evaluate

SEQ_LENGTH = 4096  # seq_length is a choice of the run, not of the model; it may not exceed max_position_embeddings


@dataclass(frozen=True, slots=True)
class Facts:
    """What the conversion itself decides.

    ``moe_layer_freq`` exactly as the checkpoint is laid out: the integer 1 for MoE layers stacked under one key, a list
    of 0 and 1 for layers written one by one, None where no layer has experts. A list, even of ones, makes Megatron ask
    for the layers one by one (``transformer_block.py:sharded_state_dict``). ``mtp_layers``: as
    written, where the scope has no symbol ``mtp_layers``.
    """

    vocab_size: int
    padded_vocab_size: int
    make_vocab_size_divisible_by: int = 128
    mtp_layers: int = 0
    moe_layer_freq: int | list[int] | None = None
    spec: str = "te"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1


def megatron_arguments(rules: Mapping[str, Any], scope: Scope, facts: Facts | None = None) -> dict[str, Plain]:
    """Every argument for ``args``, by name, in plain types; without ``facts`` those that the config decides.

    ``scope`` has the symbol ``mtp_layers``, the number of MTP layers in the checkpoint. Defaults that were needed
    are noted in ``scope.used_defaults``.

    Raises ConfigError for a config key that is missing or contradicts itself, NotRepresentableError for what Megatron's
    model cannot compute, MappingError for a rule that does not follow the grammar.
    """
    check_rules(rules)
    arguments: dict[str, Plain] = dict(GPT_MODEL)
    for name in rules.get("functions", ()):
        arguments |= FUNCTIONS[name](scope)
    for argument, rule in rules.items():
        if argument != "functions":
            arguments[argument] = _value(argument, rule, scope)
    if "norm_epsilon" in arguments:
        arguments["layernorm_epsilon"] = arguments["norm_epsilon"]  # 0.19.2's name
    arguments["mtp_num_layers"] = scope.symbols.get("mtp_layers") or None  # 0.16 takes 0 for "there is an MTP block"
    length = arguments.get("max_position_embeddings")
    arguments["seq_length"] = min(length, SEQ_LENGTH) if isinstance(length, int) else SEQ_LENGTH
    arguments["vocab_size"] = scope.integer("vocab_size")
    return arguments if facts is None else arguments | _conversion_arguments(arguments, facts)


def _conversion_arguments(arguments: Mapping[str, Plain], facts: Facts) -> dict[str, Plain]:
    experts = arguments["num_experts"] is not None and facts.moe_layer_freq is not None
    planned, configured = facts.moe_layer_freq, arguments["moe_layer_freq"]
    if experts and isinstance(configured, list) and configured != _pattern(planned, len(configured)):
        raise ConfigError(
            f"by config.json the layers with experts are {configured}, by the tensors {planned}",
            where="config.json and [layers] of the mapping file",
        )
    return {
        "expert_model_parallel_size": facts.ep,
        "expert_tensor_parallel_size": facts.etp,
        "make_vocab_size_divisible_by": facts.make_vocab_size_divisible_by,
        "moe_grouped_gemm": experts and facts.spec == "te",
        "moe_layer_freq": planned if experts else configured,
        "mtp_num_layers": facts.mtp_layers or arguments["mtp_num_layers"],
        "padded_vocab_size": facts.padded_vocab_size,
        "pipeline_model_parallel_size": facts.pp,
        "tensor_model_parallel_size": facts.tp,
        "transformer_impl": "transformer_engine" if facts.spec == "te" else "local",
        "virtual_pipeline_model_parallel_size": facts.vpp,
        "vocab_size": facts.vocab_size,
    }


def _pattern(frequency: int | list[int] | None, layers: int) -> list[int]:
    """gpt_layer_specs.py:get_gpt_decoder_layer_specs: an integer N makes layers 0, N, 2N ... MoE."""
    if isinstance(frequency, list):
        return frequency
    return [int(frequency is not None and layer % frequency == 0) for layer in range(layers)]


def moe_layers(names: Iterable[str], num_layers: int) -> list[int] | None:
    """``moe_layer_freq`` as a list, 1 where a decoder layer has a router among the canonical Megatron ``names``."""
    found = {name.removesuffix(".mlp.router.weight") for name in names if name.endswith(".mlp.router.weight")}
    pattern = [int(f"decoder.layers.{layer}" in found) for layer in range(num_layers)]
    return pattern if any(pattern) else None


def mtp_spec_layer(names: Iterable[str]) -> int:
    """The decoder layer whose spec the MTP layers of a checkpoint with these canonical names have.

    -1, the last, is what Megatron's stock MTP block takes; where that one has experts and the MTP layers have none, or
    the other way round, a model needs a spec of its own: that of the first decoder layer that is like them.
    """
    names = set(names)
    layers = 1 + max((int(n.split(".")[2]) for n in names if n.startswith("decoder.layers.")), default=-1)
    experts = [f"decoder.layers.{layer}.mlp.router.weight" in names for layer in range(layers)]
    wanted = "mtp.layers.0.transformer_layer.mlp.router.weight" in names
    has_mtp = any(name.startswith("mtp.layers.0.") for name in names)
    return experts.index(wanted) if has_mtp and wanted in experts and experts[-1] != wanted else -1


def check_rules(rules: Mapping[str, Any]) -> None:
    """Raise MappingError unless every rule of an [arguments] table follows the grammar; needs no config."""
    for argument, rule in rules.items():
        if argument == "functions":
            unknown = sorted(set(rule) - set(FUNCTIONS)) if isinstance(rule, list) else [repr(rule)]
            if unknown:
                raise MappingError(f"[arguments] functions: no such function: {', '.join(unknown)}")
        elif isinstance(rule, str):
            check_expression(rule)
        elif not isinstance(rule, Mapping) or set(rule) not in _SHAPES:
            raise MappingError(f"[arguments] {argument}: {rule!r} is no rule")


_SHAPES = ({"value"}, {"value", "requires"}, {"key"}, {"key", "default"}, {"expr", "when"}, {"not"})


def _value(argument: str, rule: str | Mapping[str, Any], scope: Scope) -> Plain:
    if isinstance(rule, str):
        if rule.replace("_", "").replace(".", "").isalnum() and not rule.isdigit():
            return _config(argument, rule, scope)
        return evaluate(rule, scope)
    if "key" in rule:
        keys = [rule["key"]] if isinstance(rule["key"], str) else rule["key"]
        key = next((key for key in keys if scope.value(key) is not None), keys[0])
        found = scope.value(key)
        if found is None and "default" in rule:
            found = scope.used_defaults[key] = rule["default"]
        return _config(argument, key, scope) if found is None else _plain(key, found)
    if "expr" in rule:
        return evaluate(rule["expr"], scope) if scope.truth(rule["when"]) else None
    if "not" in rule:
        return not scope.truth(rule["not"])
    for key, allowed in rule.get("requires", {}).items():
        found = scope.value(key)
        if found is not None and found not in allowed:
            raise refuse(key, found, f"the mapping stands for {' or '.join(map(repr, allowed))} ({argument})")
    value: Plain = rule["value"]
    return value


def _config(argument: str, key: str, scope: Scope) -> Plain:
    found = scope.symbols[key] if key in scope.symbols else scope.value(key)
    if found is None:
        raise ConfigError(
            f"config.json has no '{key}', from which Megatron's {argument} is taken",
            where=f"config.json: {key}",
            next_step="add the key to config.json, or give it under [defaults] of the mapping file",
        )
    return _plain(key, found)


def _plain(key: str, value: Any) -> Plain:
    if isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(f"'{key}' is {value!r} where one value is needed", where=f"config.json: {key}")
