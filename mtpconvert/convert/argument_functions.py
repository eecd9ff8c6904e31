"""Named functions of ``[arguments]`` tables: what is more than a rename between config.json and Megatron's arguments.

Each reads the config (transformers 5 ``rope_parameters`` and the older ``rope_theta`` / ``rope_scaling`` alike) and
returns Megatron arguments. What Megatron-Core cannot compute raises NotRepresentableError, what contradicts itself
ConfigError, both naming key and value. Sources: transformers 5.24 ``modeling_rope_utils.py``, ``configuration_*.py``;
megatron-core 0.16.1 and 0.19.2 ``models/common/embeddings``, ``transformer/multi_latent_attention.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mtpconvert.convert import argument_moe, argument_variants, argument_windows
from mtpconvert.convert.argument_refusal import refuse
from mtpconvert.errors import ConfigError
from mtpconvert.mapping.dims import Scope

DEFAULT_THETA = 10000.0  # transformers modeling_rope_utils.py:RotaryEmbeddingConfigMixin.default_theta
KINDS = ("full_attention", "sliding_attention")
LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def _rope_table(scope: Scope) -> dict[str, Any]:
    """The rope parameters as one table with ``rope_type`` and ``rope_theta``, wherever the config keeps them."""
    key = "rope_scaling" if scope.value("rope_scaling") else "rope_parameters"
    found = scope.value(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key} is {found!r}, not a table", where=f"config.json: {key}")
    if found and all(isinstance(value, Mapping) for value in found.values()):
        raise refuse(key, dict(found), "rotary parameters differ by layer type")
    table = dict(found)
    table["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    if table.get("rope_theta") is None:
        theta = scope.value("rope_theta")
        if theta is None:
            theta = scope.used_defaults["rope_theta"] = DEFAULT_THETA
        table["rope_theta"] = theta
    for name in ("partial_rotary_factor", "partial_rotary_factors"):
        if table.get(name) is None:
            table[name] = scope.value(name)
    return table


def _whole(key: str, value: Any) -> int:
    """Megatron's flag takes an integer (``--rotary-base``, ``--rotary-seq-len-interpolation-factor``)."""
    if not isinstance(value, int | float) or value != int(value):
        raise refuse(key, value, "Megatron takes an integer here")
    return int(value)


def _original_length(table: Mapping[str, Any], scope: Scope) -> int:
    """transformers ``standardize_rope_params``: the top-level key wins, then the table's, then the model's length."""
    for value in (scope.value("original_max_position_embeddings"), table.get("original_max_position_embeddings")):
        if value is not None:
            return int(value)
    return scope.integer("max_position_embeddings")


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(table: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    """factor, original length, betas and the two mscales of YaRN, checked to give transformers' attention factor.

    transformers scales cos and sin by ``attention_factor``, else by mscale(factor, m) / mscale(factor, m_all) when
    both are given and not zero, else by mscale(factor, 1). Megatron always divides the two, with defaults 1 and 0.
    """
    original = _original_length(table, scope)
    factor = table.get("factor")
    factor = scope.integer("max_position_embeddings") / original if factor is None else float(factor)
    mscale, all_dim = table.get("mscale"), table.get("mscale_all_dim")
    if not (mscale and all_dim):
        mscale, all_dim = 1.0, all_dim or 0.0
    inferred = _mscale(factor, mscale) / _mscale(factor, all_dim)
    wanted = table.get("attention_factor")
    if wanted is None:
        wanted = inferred if table.get("mscale") and all_dim else _mscale(factor)
    if not math.isclose(wanted, inferred, rel_tol=1e-9):
        raise refuse("rope attention factor", wanted, f"Megatron would scale by {inferred!r} from factor and mscales")
    return {
        "factor": factor,
        "original": original,
        "beta_fast": float(table.get("beta_fast") or 32.0),
        "beta_slow": float(table.get("beta_slow") or 1.0),
        "mscale": float(mscale),
        "mscale_all_dim": float(all_dim),
        "truncate": bool(table.get("truncate", True)),
    }


def _whole_heads(table: Mapping[str, Any]) -> None:
    """Raise NotRepresentableError unless every dim of a head is rotated."""
    for name in ("partial_rotary_factor", "partial_rotary_factors"):
        if table[name] not in (None, 1, 1.0):
            raise refuse(name, table[name], "this architecture rotates whole heads")


def rope(scope: Scope) -> dict[str, Any]:
    """Rotary embedding of ordinary attention: default, linear, llama3 and yarn."""
    table = _rope_table(scope)
    _whole_heads(table)
    return _rope(table, scope)


def partial_rope(scope: Scope) -> dict[str, Any]:
    """``rope`` where only the first ``partial_rotary_factor`` of a head's dims are rotated, 0.5 by default.

    transformers configuration_glm4_moe.py:Glm4MoeConfig; megatron-core rotary_pos_embedding.py:RotaryEmbedding.
    """
    table = _rope_table(scope)
    factor = table["partial_rotary_factor"]
    if factor is None:
        factor = scope.used_defaults["partial_rotary_factor"] = 0.5
    return _rope(table, scope) | {"rotary_percent": float(factor)}


def _rope(table: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    kind = table["rope_type"]
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": _whole("rope_theta", table["rope_theta"]),
        "rotary_percent": 1.0,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": None,
    }
    if kind == "linear":
        arguments["rotary_seq_len_interpolation_factor"] = _whole("rope factor", table["factor"])
    elif kind == "llama3":
        for key, fixed in LLAMA3.items():
            if table.get(key) != fixed:
                raise refuse(key, table.get(key), f"Megatron's llama3 scaling has {fixed} built in")
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": float(table["factor"])}
    elif kind == "yarn":
        yarn = _yarn(table, scope)
        arguments |= {
            "position_embedding_type": "yarn",
            "use_rotary_position_embeddings": False,  # the old flag would turn the type back into "rope"
            "rotary_scaling_factor": yarn["factor"],
            "yarn_original_max_position_embeddings": yarn["original"],
            "yarn_beta_fast": yarn["beta_fast"],
            "yarn_beta_slow": yarn["beta_slow"],
            "mscale": yarn["mscale"],
            "mscale_all_dim": yarn["mscale_all_dim"],
            "yarn_correction_range_round_to_int": yarn["truncate"],
        }
    elif kind != "default":
        raise refuse("rope_type", kind, "Megatron-Core knows default, linear, llama3 and yarn")
    return arguments


def rope_of_rotary_dim(scope: Scope) -> dict[str, Any]:
    """``partial_rope`` where a config may give the number of rotated dims, ``rotary_dim``; without either whole heads.

    transformers configuration_minimax_m2.py:MiniMaxM2Config.convert_rope_params_to_dict.
    """
    table = _rope_table(scope)
    factor, dims = table["partial_rotary_factor"], scope.value("rotary_dim")
    if factor is None and dims is not None:
        factor = int(dims) / scope.integer("head_dim")
    return _rope(table, scope) | {"rotary_percent": 1.0 if factor is None else float(factor)}


def rope_by_kind(scope: Scope) -> dict[str, Any]:
    """``rope`` where full and sliding layers have parameters of their own; no ``rotary_base`` where these differ.

    A config has both under ``rope_parameters``, or the older keys: ``rope_theta`` and ``rope_scaling`` of full layers,
    ``rope_local_base_freq`` or ``swa_rope_theta`` of sliding ones, which never scale. transformers
    configuration_gemma3.py and configuration_olmo3.py: convert_rope_params_to_dict; configuration_mimo_v2_flash.py.
    """
    found = scope.value("rope_parameters") or {}
    if found and not all(isinstance(found.get(kind) or {}, Mapping) for kind in KINDS):
        raise ConfigError(f"rope_parameters is {found!r}", where="config.json: rope_parameters")
    full, sliding = (dict(found.get(kind) or {}) for kind in KINDS)
    if not found:
        full = dict(scope.value("rope_scaling") or {})
    for table, keys in ((full, ("rope_theta",)), (sliding, ("rope_local_base_freq", "swa_rope_theta"))):
        table["rope_type"] = table.get("rope_type") or table.pop("type", None) or "default"
        if table.get("rope_theta") is None:
            table["rope_theta"] = next((found for key in keys if (found := scope.value(key)) is not None), None)
        table.setdefault("partial_rotary_factor", scope.value("partial_rotary_factor"))
    if sliding["rope_theta"] is None:
        sliding["rope_theta"] = full["rope_theta"]
    share = full["partial_rotary_factor"]
    if share != sliding["partial_rotary_factor"]:
        raise refuse("partial_rotary_factor", share, "Megatron rotates the same share of a head in every layer")
    percent = {"rotary_percent": 1.0 if share is None else float(share)}
    if full == sliding:
        return _rope(full, scope) | percent
    return {"position_embedding_type": "rope"} | percent


def mla_rope(scope: Scope) -> dict[str, Any]:
    """Rotary embedding of multi-latent attention: default and yarn (MLATransformerConfig's own fields)."""
    table = _rope_table(scope)
    _whole_heads(table)
    kind = table["rope_type"]
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": _whole("rope_theta", table["rope_theta"]),
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "original_max_position_embeddings": None,
        "beta_fast": None,
        "beta_slow": None,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if kind == "yarn":
        yarn = _yarn(table, scope)
        if not yarn["truncate"]:
            raise refuse("truncate", False, "Megatron's MLA rounds YaRN's correction range")
        arguments |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn["factor"],
            "original_max_position_embeddings": yarn["original"],
            "beta_fast": yarn["beta_fast"],
            "beta_slow": yarn["beta_slow"],
            "mscale": yarn["mscale"],
            "mscale_all_dim": yarn["mscale_all_dim"],
        }
    elif kind != "default":
        raise refuse("rope_type", kind, "Megatron-Core's MLA knows default and yarn")
    return arguments


FUNCTIONS: dict[str, Callable[[Scope], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        rope,
        partial_rope,
        rope_of_rotary_dim,
        mla_rope,
        rope_by_kind,
        *argument_moe.FUNCTIONS,
        *argument_variants.FUNCTIONS,
        *argument_windows.FUNCTIONS,
    )
}
