"""Every family that stock megatron-core holds: those of ``family_tables`` and the first ones, which have tests of their
own, all at the sizes of ``mappings/configs``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.family_tables import CASES, Case, appended, deepseek_extras
from tests.support.tiny import _values, write_safetensors

FIRST = {
    "DeepSeek-V3": Case("DeepseekV3ForCausalLM", mtp=appended(deepseek_extras), depths=1),
    "GLM-4.5": Case("Glm4MoeForCausalLM", mtp=appended(deepseek_extras), depths=2),
    "Qwen3": Case("Qwen3ForCausalLM"),
    "Qwen2": Case("Qwen2ForCausalLM"),
    "Llama": Case("LlamaForCausalLM"),
    "Mistral": Case("MistralForCausalLM"),
}
STOCK: dict[str, Case] = FIRST | {name: case for name, case in CASES.items() if case.dialect == "stock"}


def write_stock(name: str, out: Path) -> Path:
    """The case as a new Hugging Face folder ``out``: float32, every element a bit pattern of its own."""
    case = STOCK[name]
    shapes = case.shapes()
    dtypes = dict.fromkeys(shapes, "F32")
    values = _values(shapes, dtypes, "counter", seed=0)
    out.mkdir(parents=True)
    write_safetensors(out / "model.safetensors", {n: (dtypes[n], shapes[n], values[n]) for n in shapes})
    (out / "config.json").write_text(json.dumps(case.config(), indent=2) + "\n", encoding="utf-8")
    return out
