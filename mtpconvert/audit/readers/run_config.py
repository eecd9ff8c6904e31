"""What Megatron-Bridge's training says of its model, in ``run_config.yaml`` of an iteration, under Megatron-LM's names.

Only YAML's events are read: no object is made of what a tag names, and aliases stay references. Scalars are typed as
PyYAML writes them (YAML 1.1). Sources: Megatron-Bridge 0.7 training/checkpointing.py, models/gpt_provider.py,
models/mla_provider.py, models/gpt/model_config.py, utils/activation_map.py; megatron-core 0.19.2 training/arguments.py,
training/config/yaml_utils.py, core/transformer/transformer_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mtpconvert.errors import CheckpointError

NAME = "run_config.yaml"
_BYTES, _EVENTS = 4 * 1024 * 1024, 100_000
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,300})", re.A)
_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?", re.A)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}

# Megatron-LM's argument -> the field that says it; every other field has the name of its argument, or none there.
_FIELDS = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
# The same, of YaRN for ordinary attention. There the fields that are named like arguments are not read.
_YARN_FIELDS = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
# save_checkpoint puts gate and up together again, whatever these say.
_NOT_STORED = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")

# Where a provider has two rotary bases (Gemma 3: of sliding and of full layers), these say nothing: it scales itself.
_OF_ONE_BASE = (
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
    "position_embedding_type",
)


def bridge_arguments(folder: Path) -> dict[str, Any] | None:
    """The arguments that the model of ``folder`` amounts to; None where there is no such file, or no model in it.

    Raises CheckpointError where the file is no YAML, or out of all proportion.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    model = _model(path)
    return None if model is None else _arguments(model)


def called(argument: str) -> str:
    """The argument with what the file calls it, for people."""
    field = {**_FIELDS, "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights"}.get(argument)
    return f"{argument} ({NAME})" if field is None else f"{argument} ({NAME}: {field})"


def _arguments(model: dict[str, Any]) -> dict[str, Any]:
    latent = model.get("multi_latent_attention") is True
    known = {name: value for name, value in model.items() if _is_plain(value)}
    for field in _YARN_FIELDS.values() if latent else ("rope_type", "beta_fast", "beta_slow", *_YARN_FIELDS):
        known.pop(field, None)
    for argument, field in (_FIELDS if latent else _FIELDS | _YARN_FIELDS).items():
        if field in known:
            known[argument] = known.pop(field)
    unsaid = () if _number(known.get("rotary_base")) else _OF_ONE_BASE
    for name in (*_NOT_STORED, *unsaid):
        known.pop(name, None)
    if (share := known.pop("share_embeddings_and_output_weights", None)) is not None:
        known["untie_embeddings_and_output_weights"] = not share
    for name in ("num_query_groups", "kv_channels") if latent else ():  # filled in from defaults, and not used
        known.pop(name, None)
    if "num_query_groups" in known:  # arguments.py: without the flag each head is a group of its own
        known["group_query_attention"] = known["num_query_groups"] != known.get("num_attention_heads")
    if "full_attn_num_query_groups" in model:  # MiMo-V2-Flash: two kinds of layers, two numbers
        known.pop("num_query_groups", None)
        known.pop("group_query_attention", None)
    if isinstance(gated := model.get("gated_linear_unit"), bool) and (function := _function(model)):
        known["swiglu"] = gated and function == "silu"
    tokens, multiple = model.get("vocab_size"), 1
    if model.get("should_pad_vocab") is not False:  # models/gpt_provider.py: provide
        one, two = model.get("make_vocab_size_divisible_by"), model.get("tensor_model_parallel_size")
        multiple = one * two if isinstance(one, int) and isinstance(two, int) else 0
    if isinstance(tokens, int) and multiple > 0:
        known["padded_vocab_size"] = tokens + -tokens % multiple
    return known


def _function(model: dict[str, Any]) -> str:
    """The last part of the activation function's name; it stands as a name, or as what to import."""
    said = model.get("activation_func")
    said = said.get("_target_") if isinstance(said, dict) else said
    return said.rpartition(".")[2] if isinstance(said, str) else ""


def _model(path: Path) -> dict[str, Any] | None:
    """The model's fields; a model config keeps those of the transformer one level below."""
    import yaml

    try:
        if path.stat().st_size > _BYTES:
            raise _fault(path, f"it has more than {_BYTES >> 20} MiB, which no run's has")
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        stream = iter(yaml.parse(path.read_text(encoding="utf-8"), Loader=loader))
        whole = _Builder(path, islice(stream, _EVENTS)).document()
        if any(isinstance(event, yaml.DocumentStartEvent) for event in islice(stream, _EVENTS)):
            raise _fault(path, "it has more than one document")
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise _fault(path, f"it is no YAML ({' '.join(str(error).split())})") from error
    model = whole.get("model") if isinstance(whole, dict) else None
    if not isinstance(model, dict):
        return None
    transformer = model.get("transformer")
    return model | transformer if isinstance(transformer, dict) else model


class _Builder:
    """Plain values from the events of one document; a node with a tag of its own is None, a sequence its items."""

    def __init__(self, path: Path, events: Iterator[Any]) -> None:
        self._path, self._events = path, events
        self._anchored: dict[str, Any] = {}

    def _next(self) -> Any:
        event = next(self._events, None)
        if event is None:
            raise _fault(self._path, f"it has more than {_EVENTS:,} entries, or ends within one")
        return event

    def document(self) -> Any:
        """None for an empty stream."""
        from yaml import DocumentStartEvent, StreamEndEvent

        while not isinstance(event := self._next(), DocumentStartEvent):
            if isinstance(event, StreamEndEvent):
                return None
        whole = self._value(self._next())
        self._next()  # the document's end
        return whole

    def _value(self, event: Any) -> Any:
        from yaml import AliasEvent, MappingStartEvent, ScalarEvent

        if isinstance(event, AliasEvent):
            if event.anchor not in self._anchored:
                raise _fault(self._path, f"*{event.anchor} stands for nothing before it, or for what it stands in")
            return self._anchored[event.anchor]
        value: Any
        if isinstance(event, ScalarEvent):
            value = _scalar(event)
        elif isinstance(event, MappingStartEvent):
            value = self._mapping()
            value = value if event.implicit else None
        else:
            value = self._sequence()
        if event.anchor:
            self._anchored[event.anchor] = value
        return value

    def _mapping(self) -> dict[str, Any]:
        from yaml import MappingEndEvent

        fields: dict[str, Any] = {}
        while not isinstance(event := self._next(), MappingEndEvent):
            key = self._value(event)
            value = self._value(self._next())
            if isinstance(key, str):
                fields[key] = value
        return fields

    def _sequence(self) -> list[Any]:
        from yaml import SequenceEndEvent

        items = []
        while not isinstance(event := self._next(), SequenceEndEvent):
            items.append(self._value(event))
        return items


def _scalar(event: Any) -> Any:
    plain, quoted = event.implicit
    text = event.value
    if not plain:
        return text if quoted else None
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, bool | int | float | str) for item in value)
    return not isinstance(value, dict)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fault(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{NAME} cannot be read: {why}", where=str(path), next_step="copy it again from the training run's folder"
    )
