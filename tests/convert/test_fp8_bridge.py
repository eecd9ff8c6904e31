"""Block-scaled FP8 as MiniMax and Xiaomi publish it: other words in quantization_config than DeepSeek's, same blocks.

MiniMaxAI/MiniMax-M2 config.json: ``fmt`` is "float8_e4m3fn" and ``modules_to_not_convert`` has parts of names.
XiaomiMiMo/MiMo-V2-Flash: ``ignored_layers`` has o_proj of every layer, that of MTP under the name that SGLang gives
it. Neither changes a number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.bridge_tables import write_bridge_case
from tests.support.command_line import Run, run
from tests.support.sabotage import edit_json
from tests.support.scratch import memory
from tests.support.tiny import sha256_tree
from tests.support.tiny_fp8 import pack_fp8, read_all

__all__ = ["memory", "run"]

# case -> (what stays plain, its words, FP8 tensors)
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "MiniMax-M2": (
        "lm_head",
        {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        3 * (4 + 4 * 3),  # q, k, v, o and the experts of three layers
    ),
    "MiMo-V2-Flash": (
        "o_proj",
        {"ignored_layers": [f"model.{at}.self_attn.o_proj" for at in (*(f"layers.{n}" for n in range(4)), "decoder")]},
        4 * 3 + 3 + 3 * 4 * 3 + 3 * (3 + 3),  # q, k, v; a dense MLP; experts of three layers; three MTP layers
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_comes_back_byte_for_byte_and_passes_the_audit(name: str, run: Run, memory: Path) -> None:
    plain, words, count = PUBLISHED[name]
    source = pack_fp8(write_bridge_case(name, memory / "hf"), plain=plain)
    edit_json(source / "config.json", lambda table: table["quantization_config"].update(words))
    assert sum(key.endswith("_scale_inv") for key in read_all(source)) == count
    there = run("hf2mcore", source, memory / "mcore", "--dialect", "bridge", "--audit", "bits")
    assert there.code == 0, there.err
    assert f"{count} tensors are FP8 in blocks of 16 x 16" in there.err
    assert "excluded by quantization_config" not in there.err
    back = run("mcore2hf", memory / "mcore", memory / "back", "--audit", "bits")
    assert back.code == 0, back.err
    assert sha256_tree(memory / "back") == sha256_tree(source)
    audit = run("audit", source, memory / "mcore")
    assert audit.code == 0
    assert " error " not in audit.out and " warning " not in audit.out, audit.out
