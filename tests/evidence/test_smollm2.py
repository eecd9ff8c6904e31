"""A real published model goes to Megatron, speaks there as in transformers, and comes back byte for byte."""

from pathlib import Path

import pytest

from tests.support import mcore, mcore_forward
from tests.support.frameworks_convert import to_hf, to_mcore
from tests.support.frameworks_hf import hf_greedy, hf_model
from tests.support.frameworks_smol import tokenizer, write_smollm2
from tests.support.tiny import sha256_tree

PROMPT = "The capital of France is"
TOKENS = 12


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct")


def test_smollm2_speaks_the_same_and_returns(smollm2: Path, tmp_path: Path) -> None:
    words = tokenizer(smollm2)
    prompt = words(PROMPT, return_tensors="pt").input_ids
    wanted = hf_greedy(hf_model(smollm2), prompt, TOKENS)
    assert "Paris" in words.decode(wanted)

    directory = to_mcore(smollm2, tmp_path / "megatron", spec="local")
    model = mcore.model_from_args(mcore.common_state(directory)["args"], spec="local")
    assert mcore.load_into(model, directory) == []  # bf16 weights into a float32 model, as hf_model does it
    got = mcore_forward.greedy(model, prompt, TOKENS)
    assert got == wanted, (words.decode(got), words.decode(wanted))

    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert sha256_tree(tmp_path / "back") == sha256_tree(smollm2)
