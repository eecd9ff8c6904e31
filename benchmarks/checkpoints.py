"""Large checkpoints for the benchmarks: real headers and configs, cheap contents. No torch."""

from __future__ import annotations

import json
import os
from array import array
from math import prod
from pathlib import Path

Shape = tuple[int, ...]
Stored = tuple[str, Shape, str]  # name, shape, dtype
BLOCK = 128

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


def stored(name: str, shape: Shape, fp8: bool) -> list[Stored]:
    """What a tensor is stored as: itself, or for a matrix of a layer of an FP8 checkpoint codes and scales."""
    if not fp8 or len(shape) == 1 or not name.startswith("model.layers."):
        return [(name, shape, "BF16")]
    scales = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    return [(name, shape, "F8_E4M3"), (name + "_scale_inv", scales, "F32")]


def write_llama(folder: Path, layers: int, shard_bytes: int = 2 << 30, *, fp8: bool = False) -> int:
    """Write the checkpoint, random bytes, in shards of about ``shard_bytes``. Returns the bytes of its tensors.

    ``fp8``: the layers' matrices are F8_E4M3 with F32 scales of blocks, as DeepSeek publishes them.
    """
    folder.mkdir(parents=True)
    shards: list[list[Stored]] = [[]]
    filled = 0
    for name, shape in llama_tensors(layers):
        for one in stored(name, shape, fp8):
            if filled + _nbytes(one) > shard_bytes and shards[-1]:
                shards.append([])
                filled = 0
            shards[-1].append(one)
            filled += _nbytes(one)
    noise = os.urandom(1 << 20)
    if fp8:
        noise = noise.replace(b"\x7f", b"\x7e").replace(b"\xff", b"\xfe")  # no NaN codes
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for one in tensors:
            name, shape, dtype = one
            end = at + _nbytes(one)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            weight_map[name], at = file, end
        total += at
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            window = 0
            for one in tensors:
                if one[2] == "F32":
                    scales = (0.001 * (1 + number / 7 % 1) for number in range(_nbytes(one) // 4))
                    stream.write(array("f", scales).tobytes())
                    continue
                for start in range(0, _nbytes(one), len(noise)):
                    shift = window % 251  # no two windows alike, so that a wrong offset would show
                    stream.write((noise[shift:] + noise[:shift])[: min(len(noise), _nbytes(one) - start)])
                    window += 1
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = {**LLAMA, "num_hidden_layers": layers}
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return total


def _nbytes(one: Stored) -> int:
    return prod(one[1]) * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[one[2]]
