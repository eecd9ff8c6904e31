"""Trunk and MTP as transformers' classes compute them, where its ``MtpModel`` has no MTP for the family that runs.

An MTP layer and what follows it are transformers' model of one layer with that layer's weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtpconvert.evidence import transformers_forward
from mtpconvert.evidence.trace import Trace, depth_point
from mtpconvert.evidence.transformers_model import TransformersModel, load_trunk, quiet_transformers
from tests.support.tiny import read_safetensors, write_safetensors

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


@dataclass(frozen=True)
class Layout:
    """``prefix`` of the MTP layer's decoder layer, "{}" being the number of trunk layers; full names of what joins
    embedding and hidden state, and of the last norm; ``config``: what makes the model one of a single such layer."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    config: Mapping[str, Any]


# vLLM's qwen3_next_mtp.py and qwen3_5_mtp.py, ``...MultiTokenPredictor``; transformers 5.24 drops ``mtp.*``
QWEN = Layout(
    "mtp.layers.0.",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    {"layer_types": ["full_attention"], "full_attention_interval": 1, "mlp_only_layers": []},
)
# vLLM's deepseek_mtp.py; transformers' MtpModel makes masks by layer type, and has none for theirs, indexed_attention
SPARSE = Layout(
    "model.layers.{}.",
    "model.layers.{}.enorm.weight",
    "model.layers.{}.hnorm.weight",
    "model.layers.{}.eh_proj.weight",
    "model.layers.{}.shared_head.norm.weight",
    {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
)


def written(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """``folder``, new, with a checkpoint of these."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@torch.no_grad()
def trunk_and_mtp(source: Path, scratch: Path, tokens: torch.Tensor) -> Trace:
    """Every point of trunk and of the one MTP layer of the HF directory ``source``; ``scratch``: a folder to write in.

    The projection reads [normed embedding ; normed hidden state], the latter after the trunk's final norm.
    """
    config, tensors = json.loads((source / "config.json").read_text()), read_safetensors(source)
    if "text_config" in config:  # what is left beside vision, under the names of the model of text alone
        text = config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
        config = config["text_config"] | {"architectures": [text]}
        tensors = {n.replace("language_model.", ""): of for n, of in tensors.items() if ".visual." not in n}
        source = written(scratch / "text", config, tensors)
    layout = QWEN if any(name.startswith("mtp.") for name in tensors) else SPARSE
    number = config["num_hidden_layers"]
    main = load_trunk(source, list(tensors), dtype="float32")
    out = transformers_forward.trace(TransformersModel(main, None, "done below", True, None), tokens)
    prefix, final_norm = layout.prefix.format(number), layout.final_norm.format(number)
    layer = {
        name.replace(prefix, "model.layers.0."): of
        for name, of in tensors.items()
        if name.startswith(prefix) and name != final_norm
    }
    shared = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    single = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    every = layer | shared | {"model.norm.weight": tensors[final_norm]}
    body = load_trunk(written(scratch / "mtp", config | single | layout.config, every), list(every), dtype="float32")

    def weight(name: str) -> torch.Tensor:
        _, shape, data = tensors[name.format(number)]
        return torch.tensor(np.frombuffer(data, "<f4")).view(shape)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module: Any = type(main.model.norm)(x.shape[-1], main.config.rms_norm_eps)
        module.weight.copy_(weight(name))
        return module(x)

    embedding = norm(layout.embedding_norm, main.get_input_embeddings()(tokens[:, 1:]))
    before = norm(layout.hidden_norm, out["final norm"][:, :-1])
    joined = torch.cat([embedding, before], dim=-1) @ weight(layout.projection).T
    layers: list[Any] = []
    handle = body.model.layers[0].register_forward_hook(lambda _module, _inputs, output: layers.append(output))
    with quiet_transformers():
        hidden = body.model(inputs_embeds=joined, use_cache=False).last_hidden_state
    handle.remove()
    after = layers[0][0] if isinstance(layers[0], tuple) else layers[0]
    points = {"eh_proj": joined, "layer": after, "final norm": hidden, "logits": main.lm_head(hidden)}
    return out | {depth_point(1, part): value for part, value in points.items()}
