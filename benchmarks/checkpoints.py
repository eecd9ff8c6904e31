"""Large checkpoints for the benchmarks: real headers and configs, cheap contents. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
    "torch_dtype": "bfloat16",
}


def llama_tensors(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama of ``layers`` layers, about 0.44 GB each in bf16, and 0.54 GB of vocabulary."""
    h, f, v, kv = 4096, 14336, 32768, 1024
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (v, h))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors += [
            (prefix + "input_layernorm.weight", (h,)),
            (prefix + "self_attn.q_proj.weight", (h, h)),
            (prefix + "self_attn.k_proj.weight", (kv, h)),
            (prefix + "self_attn.v_proj.weight", (kv, h)),
            (prefix + "self_attn.o_proj.weight", (h, h)),
            (prefix + "post_attention_layernorm.weight", (h,)),
            (prefix + "mlp.gate_proj.weight", (f, h)),
            (prefix + "mlp.up_proj.weight", (f, h)),
            (prefix + "mlp.down_proj.weight", (h, f)),
        ]
    return [*tensors, ("model.norm.weight", (h,)), ("lm_head.weight", (v, h))]


def write_llama(folder: Path, layers: int, shard_bytes: int = 2 << 30) -> int:
    """Write the checkpoint, random bytes, in shards of about ``shard_bytes``. Returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in llama_tensors(layers):
        nbytes = 2 * _product(shape)
        if filled + nbytes > shard_bytes and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += nbytes
    noise = os.urandom(1 << 20)
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for name, shape in tensors:
            end = at + 2 * _product(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            weight_map[name], at = file, end
        total += at
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            for start in range(0, at, len(noise)):
                shift = start // len(noise) % 251  # no two windows alike, so that a wrong offset would show
                stream.write((noise[shift:] + noise[:shift])[: min(len(noise), at - start)])
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}, indent=2) + "\n")
    return total


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
