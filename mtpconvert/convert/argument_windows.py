"""Named functions of ``[arguments]`` tables about windows: how far a layer attends, and which layers do not see all.

Sources: transformers 5.24 ``masking_utils.py``, ``configuration_*.py`` (``layer_types``); megatron-core 0.16.1 and
0.19.2 ``transformer/utils.py:is_layer_window_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpconvert.convert.argument_refusal import refuse
from mtpconvert.errors import ConfigError
from mtpconvert.mapping.dims import Scope


def sliding_window(scope: Scope) -> dict[str, Any]:
    """``window_size`` (left, right) and which layers have it, 1 for a sliding layer.

    transformers attends to the last W keys, itself included (``masking_utils.py:sliding_window_overlay``); Megatron and
    Transformer Engine to ``left`` keys before it and itself. Mistral slides in every layer; Qwen where ``layer_types``
    says so, by default from layer ``max_window_layers`` on, and only with ``use_sliding_window``.
    """
    none = {"window_size": None, "window_attn_skip_freq": None}
    window = scope.value("sliding_window")
    by_layer = scope.value("use_sliding_window")
    if window is None or by_layer is False:
        return none
    if by_layer is None:
        return {"window_size": (int(window) - 1, 0), "window_attn_skip_freq": None}
    kinds = scope.value("layer_types")
    if kinds is None:
        first = scope.integer("max_window_layers")
        layers = range(scope.integer("num_hidden_layers"))
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    return _windows(window, kinds, scope)


def windows_by_layer(scope: Scope) -> dict[str, Any]:
    """``sliding_window`` for families whose ``layer_types`` alone says which layers slide."""
    return _windows(scope.value("sliding_window"), _layer_types(scope), scope)


def _layer_types(scope: Scope) -> list[str]:
    kinds: list[str] | None = scope.value("layer_types")
    if kinds is None:
        raise ConfigError(
            "config.json has no layer_types, which says what layers attend to a window only",
            where="config.json: layer_types",
            next_step="add the list, as the publisher's config.json has it",
        )
    return kinds


def rotating_windows(scope: Scope) -> dict[str, Any]:
    """``windows_by_layer`` where sliding layers alone rotate: every n-th layer is a full one and skips the embedding.

    transformers modeling_exaone4.py:Exaone4Attention.forward. Megatron counts MTP layers on after the trunk (0.16) or
    anew (0.19), so only a number n, and no list, tells it what they are: layers L + 1 and 1 both slide and rotate.
    """
    arguments = windows_by_layer(scope)
    slides = arguments["window_attn_skip_freq"]
    if slides is None:
        return arguments | {"no_rope_freq": None}
    step = slides.index(0) + 1 if 0 in slides else 0
    if not step or slides != [int((layer + 1) % step != 0) for layer in range(len(slides))] or len(slides) % step:
        raise refuse("layer_types", scope.value("layer_types"), "Megatron needs a full layer at every n-th place")
    kinds = scope.value("mtp_layer_types")
    if scope.symbols.get("mtp_layers") and kinds is not None and set(kinds) != {"sliding_attention"}:
        raise refuse("mtp_layer_types", kinds, "Megatron's MTP layers slide where its first layer does")
    return arguments | {"window_attn_skip_freq": step, "no_rope_freq": step}


def _windows(window: Any, kinds: list[str], scope: Scope) -> dict[str, Any]:
    layers = scope.integer("num_hidden_layers")
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"layer_types lists {len(kinds)} layers, of kinds {sorted(set(kinds))}, for {layers} layers",
            where="config.json: layer_types",
        )
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if window is None or not any(slides):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": (int(window) - 1, 0), "window_attn_skip_freq": slides}


def windows_but_every_nth(scope: Scope) -> dict[str, Any]:
    """``windows_by_layer`` where, in a config without ``layer_types``, every n-th layer is a full one.

    ``sliding_window_pattern`` is that n, in the config or by its class. transformers configuration_gemma2.py,
    configuration_gemma3.py, configuration_olmo3.py: __post_init__.
    """
    kinds = scope.value("layer_types")
    if kinds is None:
        step = scope.integer("sliding_window_pattern")
        layers = range(1, scope.integer("num_hidden_layers") + 1)
        kinds = ["sliding_attention" if layer % step else "full_attention" for layer in layers]
    return _windows(scope.value("sliding_window"), kinds, scope)


def windows_by_pattern(scope: Scope) -> dict[str, Any]:
    """``windows_by_layer`` where, in a config without ``layer_types``, ``hybrid_layer_pattern`` has a 1 for each layer
    that slides; ``sliding_window_size`` counts the keys before the query's own.

    transformers configuration_mimo_v2_flash.py:MiMoV2FlashConfig.__post_init__. vLLM's mimo_v2_flash.py and
    Megatron-Bridge's MiMoV2FlashTEDotProductAttention count the query's own key in, and see one key less.
    """
    size = scope.value("sliding_window_size")
    window = scope.value("sliding_window") if size is None else int(size) + 1
    pattern = scope.value("hybrid_layer_pattern")
    if scope.value("layer_types") is not None or not isinstance(pattern, list):
        return _windows(window, _layer_types(scope), scope)
    kinds = {0: "full_attention", 1: "sliding_attention"}
    return _windows(window, [kinds.get(kind, repr(kind)) for kind in pattern], scope)


FUNCTIONS: tuple[Callable[[Scope], dict[str, Any]], ...] = (
    sliding_window,
    windows_by_layer,
    windows_but_every_nth,
    windows_by_pattern,
    rotating_windows,
)
