"""The real ``dist_checkpointing.load`` at its default strictness fills a model whose every weight was NaN."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import mcore
from tests.support.frameworks_convert import FAMILIES, Converted, Tiny
from tests.support.mcore_ranks import run

MTP_LAYERS = {"deepseek_v3": 2}


def source(tiny: Tiny, family: str, dtype: str = "F32") -> Path:
    return tiny(family, dtype=dtype, **({"mtp_layers": 2} if family in MTP_LAYERS else {}))


@pytest.mark.parametrize("mcore_version", ["0.16", "0.19"])
@pytest.mark.parametrize("family", FAMILIES)
def test_local_spec(family: str, mcore_version: str, tiny: Tiny, converted: Converted) -> None:
    """Either layout loads in either version: this runs with 0.16.1 here and with 0.19.2 in tests/mcore_next."""
    directory = converted(source(tiny, family), spec="local", mcore_version=mcore_version)
    model = mcore.model_from_args(mcore.common_state(directory)["args"], spec="local")
    assert mcore.load_into(model, directory) == []


@pytest.fixture(scope="module")
def te_results(tiny: Tiny, converted: Converted) -> dict[str, Any]:
    """One process with the Transformer Engine stand-in loads every family, in the default spec and dtype of users."""
    names = {family: converted(source(tiny, family, "BF16")) for family in FAMILIES}
    names["0.19"] = converted(source(tiny, "deepseek_v3", "BF16"), mcore_version="0.19")
    names["laid out for the local spec"] = converted(source(tiny, "deepseek_v3", "BF16"), spec="local")
    directories = list(names.values())
    (results,) = run("tests.support.mcore_jobs:load", te=True, directories=directories, spec="te", dtype="bfloat16")
    return dict(zip(names, results, strict=True))


# layers x tensors of a layer + embedding, final norm and head (Qwen2 is tied), by hand from the TE spec's modules:
# GQA 6 (two fused norms, qkv, proj, fc1, fc2); Qwen3 and its q and k norm 8; Qwen2 and its qkv bias 7.
# DeepSeek-V3: 8 of MLA, of a dense MLP 3 (fused norm, fc1, fc2), of a MoE 5 (norm, router, bias, two of the shared
# expert) + 2 x 4 experts; two MTP layers with 4 more.
TENSORS = {
    "deepseek_v3": (8 + 3) + 2 * (8 + 13) + 2 * (8 + 13 + 4) + 3,
    "qwen3": 3 * 8 + 3,
    "qwen2": 3 * 7 + 2,
    "llama": 3 * 6 + 3,
    "mistral": 3 * 6 + 3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_te_spec(family: str, te_results: dict[str, Any]) -> None:
    assert te_results[family] == {"tensors": TENSORS[family], "nan": []}


def test_te_spec_of_the_newer_layout(te_results: dict[str, Any]) -> None:
    assert te_results["0.19"] == {"tensors": TENSORS["deepseek_v3"], "nan": []}


def test_te_model_refuses_a_local_layout(te_results: dict[str, Any]) -> None:
    """The check can fail: MLA norms stand under other keys in a checkpoint for the local spec."""
    assert "linear_q_up_proj.layer_norm_weight" in te_results["laid out for the local spec"]["error"]


def test_a_model_with_more_layers_is_not_filled(tiny: Tiny, converted: Converted) -> None:
    """The check can fail: a model with one MTP layer more than the checkpoint does not load."""
    directory = converted(source(tiny, "deepseek_v3"), spec="local")
    args = mcore.as_mapping(mcore.common_state(directory)["args"])
    model = mcore.model_from_args(args | {"mtp_num_layers": 3}, spec="local")
    with pytest.raises(BaseException, match=r"mtp\.layers\.2"):
        mcore.load_into(model, directory)
