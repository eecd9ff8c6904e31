"""What the real megatron-core computes in its TE spec with ``te_kernels``, as loaded and with one thing made wrong.

For the families that have no other spec. Run by ``mcore_ranks.run`` with ``kernels=True``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mtpconvert.evidence import megatron_forward
from mtpconvert.evidence.trace import Trace
from tests.support import mcore, te_kernels
from tests.support.mcore_kinds import torch_delta_rule


def traces(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each run ``directory`` (an iteration's), ``tokens`` [b][s], ``controls``: the outcome in the file ``out``.

    That is a dict of traces: "" of the model as loaded, and one for each control, made wrong as it says. Returned is of
    each run "nan": the tensors that the real load left unfilled.
    """
    te_kernels.torch_paths()
    results = []
    for run in runs:
        args = vars(mcore.common_state(Path(run["directory"]))["args"])
        if args["experimental_attention_variant"] == "gated_delta_net":
            torch_delta_rule()
            args["deterministic_mode"] = True  # megatron-core's own torch in place of flash-linear-attention
        model = mcore.model_from_args(args, spec="te")
        nan = mcore.load_into(model, Path(run["directory"]))
        tokens = torch.tensor(run["tokens"])
        found: dict[str, Trace] = {"": megatron_forward.trace(model, tokens)}
        kept = {name: tensor.clone() for name, tensor in mcore.stored_tensors(model).items()}
        settings = dict(vars(model.config))
        for control in run["controls"]:
            with torch.no_grad():
                CONTROLS[control](model)
                found[control] = megatron_forward.trace(model, tokens)
                for name, tensor in mcore.stored_tensors(model).items():
                    tensor.copy_(kept[name])
            vars(model.config).update(settings)
        torch.save(found, run["out"])
        results.append({"nan": nan})
    return results


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    before = one.clone()
    one.copy_(other)
    other.copy_(before)


def delta_rows(model: Any, layer: int = 0) -> dict[str, torch.Tensor]:
    """Views of the rows of a delta net's ``in_proj.weight``, by role (gated_delta_net.py: query, key, value, z, beta,
    alpha)."""
    c = model.config
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    sizes = [keys, keys, values, values, c.linear_num_value_heads, c.linear_num_value_heads]
    rows = model.decoder.layers[layer].self_attention.in_proj.weight.split(sizes)
    return dict(zip(("query", "key", "value", "z", "beta", "alpha"), rows, strict=True))


def two_value_heads(model: Any) -> None:
    heads = delta_rows(model)["value"].unflatten(0, (model.config.linear_num_value_heads, -1))
    exchange(heads[0], heads[1])


def alpha_and_beta(model: Any) -> None:
    rows = delta_rows(model)
    exchange(rows["alpha"], rows["beta"])


def values_and_gate(model: Any) -> None:
    rows = delta_rows(model)
    exchange(rows["value"], rows["z"])


def norm_not_less_one(model: Any) -> None:
    model.decoder.layers[0].self_attention.out_norm.weight += 1


def decay_and_bias(model: Any) -> None:
    attention = model.decoder.layers[0].self_attention
    exchange(attention.A_log, attention.dt_bias)


def convolution_reversed(model: Any) -> None:
    weight = model.decoder.layers[0].self_attention.conv1d.weight
    weight.copy_(weight.flip(-1))


def query_and_gate(model: Any) -> None:
    """Of the first query head of the first layer that attends.

    attention.py:get_query_key_value_tensors: per group its queries, their gates, its key, its value.
    """
    c = model.config
    attentions = [layer.self_attention for layer in model.decoder.layers]
    attends = next(attention for attention in attentions if hasattr(attention, "linear_qkv"))
    heads, size = c.num_attention_heads // c.num_query_groups, c.kv_channels
    rows = attends.linear_qkv.weight.unflatten(0, (c.num_query_groups, -1))[0]
    exchange(rows[:size], rows[heads * size : (heads + 1) * size])


def indexer_heads(model: Any) -> None:
    """Two heads of the first layer's indexer score each with the other's weight."""
    indexer = model.decoder.layers[0].self_attention.core_attention.indexer
    heads = indexer.linear_wq_b.weight.unflatten(0, (indexer.index_n_heads, -1))
    exchange(heads[0], heads[1])


def indexer_rotary_part(model: Any) -> None:
    """The rotated part of the first layer's index key after the rest, as attention itself has it."""
    indexer = model.decoder.layers[0].self_attention.core_attention.indexer
    for tensor in (indexer.linear_wk.weight, indexer.k_norm.weight, indexer.k_norm.bias):
        tensor.copy_(tensor.roll(-indexer.qk_pos_emb_head_dim, 0))


def indexer_other_pairs(model: Any) -> None:
    """The index's rotary dimensions paired by neighbours in place of by halves, or the other way round: an argument."""
    model.config.dsa_indexer_rope_interleaved = not model.config.dsa_indexer_rope_interleaved


def indexer_of_mtp(model: Any) -> None:
    indexer = model.mtp.layers[0].mtp_model_layer.self_attention.core_attention.indexer
    indexer.linear_weights_proj.weight.neg_()


def keys_and_values(model: Any) -> None:
    """Of the first head of ``linear_kv_up_proj``: its key's rows and as many of its value's."""
    size = model.config.qk_head_dim
    weight = model.decoder.layers[0].self_attention.linear_kv_up_proj.weight
    exchange(weight[:size], weight[size : 2 * size])


def halves_of_eh_proj(model: Any) -> None:
    weight = model.mtp.layers[0].eh_proj.weight
    exchange(*weight.split(weight.shape[1] // 2, dim=1))


def enorm_and_hnorm(model: Any) -> None:
    layer = model.mtp.layers[0]
    exchange(layer.enorm.weight, layer.hnorm.weight)


CONTROLS: dict[str, Callable[[Any], None]] = {
    control.__name__: control
    for control in (
        two_value_heads,
        alpha_and_beta,
        values_and_gate,
        norm_not_less_one,
        decay_and_bias,
        convolution_reversed,
        query_and_gate,
        indexer_heads,
        indexer_rotary_part,
        indexer_other_pairs,
        indexer_of_mtp,
        keys_and_values,
        halves_of_eh_proj,
        enorm_and_hnorm,
    )
}
