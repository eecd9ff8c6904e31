"""What the real megatron-core saves comes back as the same Hugging Face bytes, at world size 1 and 2.

The source is converted, loaded by megatron-core at these sizes, saved by it to a new directory, and converted back with
``--reference``: no byte may differ, whatever the sizes, the spec, and the way in which layers and experts are stored.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.family_tables import CASES as FAMILIES
from tests.support.frameworks_convert import Converted, Tiny, to_hf
from tests.support.mcore_ranks import run
from tests.support.tiny import sha256_tree

TWO = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}, "dp": {}}
# family, spec, what two processes share out; the stand-in for Transformer Engine is there for all of them
CASES: dict[str, tuple[str, str, str]] = {
    "deepseek_v3, te, TP2": ("deepseek_v3", "te", "tp"),
    "deepseek_v3, te, PP2 with MTP on the last stage": ("deepseek_v3", "te", "pp"),
    "deepseek_v3, te, EP2": ("deepseek_v3", "te", "ep"),
    "deepseek_v3, local, TP2": ("deepseek_v3", "local", "tp"),
    "deepseek_v3, local, PP2 with MTP on the last stage": ("deepseek_v3", "local", "pp"),
    "deepseek_v3, local, EP2": ("deepseek_v3", "local", "ep"),
    "qwen3, te, TP2": ("qwen3", "te", "tp"),
    "qwen2, te, PP2": ("qwen2", "te", "pp"),
    "qwen2, local, TP2": ("qwen2", "local", "tp"),
    "llama, te, DP2": ("llama", "te", "dp"),
    "mistral, local, PP2": ("mistral", "local", "pp"),
    # of tests/support/family_tables.py: biases and sinks that ranks share, a gated shared expert, two halves exchanged
    "gpt-oss, te, TP2": ("gpt-oss", "te", "tp"),
    "gpt-oss, te, EP2": ("gpt-oss", "te", "ep"),
    "Qwen2-MoE, te, TP2": ("Qwen2-MoE", "te", "tp"),
    "MiMo, te, PP2 with two MTP layers on the last stage": ("MiMo", "te", "pp"),
}


def source(tiny: Tiny, family: str) -> Path:
    """Four layers, so that two stages share them; bf16, as users have it. Families of the tables in float32."""
    if family in FAMILIES:
        return tiny(family, num_hidden_layers=4) if family == "MiMo" else tiny(family)
    mtp = {"mtp_layers": 2} if family == "deepseek_v3" else {}
    return tiny(family, dtype="BF16", config_overrides={"num_hidden_layers": 4}, **mtp)


@pytest.fixture(scope="module")
def saves(tiny: Tiny, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Directory of each case's save, and the names that each rank held."""
    root = tmp_path_factory.mktemp("saves")
    runs = []
    for number, (family, spec, share) in enumerate(CASES.values()):
        loaded_from = converted(source(tiny, family), spec=spec)
        dtype = "float32" if family in FAMILIES else "bfloat16"
        one = {"source": str(loaded_from), "target": str(root / str(number)), "spec": spec, "dtype": dtype}
        runs.append(one | TWO[share])
    names = run("tests.support.mcore_jobs:resave_each", 2, te=True, runs=runs)
    return {
        case: {"root": root / str(number), "names": [set(rank[number]) for rank in names]}
        for number, case in enumerate(CASES)
    }


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str, saves: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    original = source(tiny, CASES[case][0])
    to_hf(saves[case]["root"], tmp_path / "back", reference=original)
    assert sha256_tree(tmp_path / "back") == sha256_tree(original)


def test_the_work_was_shared(saves: dict[str, Any]) -> None:
    """Under PP2 the first stage has no MTP layer, the last one has both; EP2 gives each rank half of the experts."""
    first, last = saves["deepseek_v3, local, PP2 with MTP on the last stage"]["names"]
    assert "mtp.layers.1.eh_proj.weight" in last and not any(name.startswith("mtp.") for name in first)
    assert "decoder.layers.2.self_attention.linear_proj.weight" not in first | last  # stage-local numbers: 0 and 1
    experts = [name for name in saves["deepseek_v3, local, EP2"]["names"][0] if "decoder.layers.1.mlp.experts" in name]
    assert len(experts) == 2 * 2


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_one_process(family: str, tiny: Tiny, converted: Converted, tmp_path: Path) -> None:
    """World size 1, without the stand-in; optimizer and RNG state stand beside the weights and are left alone."""
    from tests.support.mcore_jobs import resave

    original = source(tiny, family)
    directory = converted(original, spec="local")
    resave(str(directory), str(tmp_path / "save"), spec="local", optimizer=True)
    to_hf(tmp_path / "save", tmp_path / "back", reference=original)
    assert sha256_tree(tmp_path / "back") == sha256_tree(original)


def test_without_args(tiny: Tiny, converted: Converted, tmp_path: Path) -> None:
    """A save without ``args``: shapes and the reference decide, and what was not checked is said."""
    from tests.support.mcore_jobs import resave

    original = source(tiny, "deepseek_v3")
    resave(str(converted(original, spec="local")), str(tmp_path / "save"), spec="local", with_args=False)
    conversion = to_hf(tmp_path / "save", tmp_path / "back", reference=original)
    assert sha256_tree(tmp_path / "back") == sha256_tree(original)
    assert any("carries no Megatron arguments" in note for note in conversion.notes)
