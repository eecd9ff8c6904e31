"""Checkpoints as Megatron-Bridge's training saves them: no ``args``, and what the model is in ``run_config.yaml``.

The tensors are saved by the real megatron-core out of the model without vocabulary padding, which is what the providers
of ``fixtures/run_config`` build; ``train_state.pt`` lies where training/checkpointing.py:save_checkpoint puts it.
"""

import shutil
from pathlib import Path

import pytest
import torch

from mtpconvert.audit.api import audit
from tests.support.command_line import Run
from tests.support.frameworks_convert import Converted, Tiny
from tests.support.mcore_jobs import resave
from tests.support.run_configs import NAME, write
from tests.support.tiny import sha256_tree

FAMILIES = ("qwen3", "deepseek_v3", "llama")


def original(tiny: Tiny, family: str) -> Path:
    return tiny(family, dtype="BF16")


@pytest.fixture(scope="module")
def bridged(tiny: Tiny, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Root of each family's checkpoint."""
    roots = {family: tmp_path_factory.mktemp("bridged") / family for family in FAMILIES}
    for family, root in roots.items():
        source = converted(original(tiny, family), spec="local")
        resave(str(source), str(root), vocab_rows=98, with_args=False, optimizer=family == "qwen3")
        write(root / "iter_0000007", family)
        for path in (root / "iter_0000007" / "train_state.pt", root / "latest_train_state.pt"):
            torch.save({"step": torch.tensor(7, dtype=torch.int32)}, path)
    return roots


def changed(root: Path, target: Path, family: str, **fields: str) -> Path:
    """The checkpoint with other fields in its file."""
    shutil.copytree(root, target)
    write(target / "iter_0000007", family, **fields)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_agreement_passes_without_a_word(
    family: str, bridged: dict[str, Path], tiny: Tiny, tmp_path: Path, run: Run
) -> None:
    source = original(tiny, family)
    result = run("mcore2hf", bridged[family], tmp_path / "back", "--reference", source, "--audit", "bits")
    assert result.code == 0, result.err
    assert "arguments" not in result.err  # neither missing nor unchecked
    assert sha256_tree(tmp_path / "back") == sha256_tree(source)
    findings = audit(source, bridged[family], level="bits").findings
    assert {finding.code for finding in findings} <= {"objects-ignored"}, findings


def test_inspect_says_whose_it_is(bridged: dict[str, Path], run: Run) -> None:
    for path in (bridged["deepseek_v3"], bridged["deepseek_v3"] / "iter_0000007"):
        said = run("inspect", path, "--json").json
        assert said["kind"] == "Megatron-Bridge torch_dist" and said["arguments_from"] == NAME
        assert (said["iteration"], said["mtp"]["declared"], said["mtp"]["key"]) == (7, 1, "model.mtp_num_layers")
    assert "declared 1 (model.mtp_num_layers), present 1" in run("inspect", bridged["deepseek_v3"]).out


@pytest.mark.parametrize(
    ("family", "field", "value", "argument", "word"),
    [
        ("qwen3", "num_query_groups", "3", "num_query_groups", "num_query_groups (run_config.yaml) is 3"),
        ("qwen3", "rotary_base", "500000.0", "rotary_base", "rotary_base (run_config.yaml) is 500000.0"),
        (
            "qwen3",
            "layernorm_zero_centered_gamma",
            "true",
            "apply_layernorm_1p",
            "(layernorm_zero_centered_gamma) is set",
        ),
        ("qwen3", "layernorm_epsilon", "1.0e-05", "norm_epsilon", "(run_config.yaml: layernorm_epsilon) is 1e-05"),
        (
            "qwen3",
            "share_embeddings_and_output_weights",
            "true",
            "untie_embeddings_and_output_weights",
            "share_embeddings",
        ),
        ("qwen3", "rope_scaling", "true", "use_rope_scaling", "llama3 scaling"),
        ("qwen3", "softmax_type", "learnable", "softmax_type", "softmax_offset"),
        ("qwen3", "gated_linear_unit", "false", "swiglu", ""),  # a gate shows in shapes
        ("llama", "num_attention_heads", "4", "num_attention_heads", "num_attention_heads (run_config.yaml) is 4"),
        ("llama", "rotary_interleaved", "true", "rotary_interleaved", "rotary_interleaved (run_config.yaml) = True"),
        ("deepseek_v3", "num_moe_experts", "8", "num_experts", "num_experts (run_config.yaml: num_moe_experts) is 8"),
        ("deepseek_v3", "mtp_num_layers", "null", "mtp_num_layers", "no MTP layer is built"),
        (
            "deepseek_v3",
            "moe_router_topk_scaling_factor",
            "1.0",
            "moe_router_topk_scaling_factor",
            "outputs are scaled",
        ),
        ("deepseek_v3", "rotary_scaling_factor", "40.0", "rope_type", "YaRN"),
        ("deepseek_v3", "moe_router_num_groups", "null", "moe_router_num_groups", "other groups"),
        ("deepseek_v3", "kv_lora_rank", "20", "kv_lora_rank", "kv_lora_rank (run_config.yaml) is 20"),
    ],
)
def test_a_contradicting_field_is_refused_and_the_auditor_finds_it(
    family: str,
    field: str,
    value: str,
    argument: str,
    word: str,
    bridged: dict[str, Path],
    tiny: Tiny,
    tmp_path: Path,
    run: Run,
) -> None:
    source, other = original(tiny, family), changed(bridged[family], tmp_path / "other", family, **{field: value})
    result = run("mcore2hf", other, tmp_path / "back", "--reference", source)
    assert result.code == 5 and argument in result.err and field in result.err
    assert str(other / "iter_0000007" / NAME) in result.err
    assert not (tmp_path / "back").exists()
    report = audit(source, other, level="bits")
    messages = [finding.message for finding in report.failing()]
    assert bool(messages) is bool(word) and any(word in message for message in messages or [""]), messages


def test_training_knobs_are_not_looked_at(bridged: dict[str, Path], tiny: Tiny, tmp_path: Path, run: Run) -> None:
    knobs = {"moe_router_pre_softmax": "false", "num_query_groups": "1", "kv_channels": "64", "seq_length": "8"}
    other = changed(bridged["deepseek_v3"], tmp_path / "other", "deepseek_v3", **knobs)
    source = original(tiny, "deepseek_v3")
    assert run("mcore2hf", other, tmp_path / "back", "--reference", source, "--audit", "bits").code == 0


def test_a_broken_file_stops_both(bridged: dict[str, Path], tiny: Tiny, tmp_path: Path, run: Run) -> None:
    other, source = changed(bridged["qwen3"], tmp_path / "other", "qwen3"), original(tiny, "qwen3")
    (other / "iter_0000007" / NAME).write_text("model: [1, 2\n")
    for words in (("mcore2hf", other, tmp_path / "back", "--reference", source), ("audit", source, other)):
        result = run(*words)
        assert result.code == 6 and str(other / "iter_0000007" / NAME) in result.err + result.out, result
    assert "next:" in result.err + result.out
    (other / "iter_0000007" / NAME).unlink()
    result = run("mcore2hf", other, tmp_path / "back", "--reference", source)
    assert result.code == 0 and "carries no Megatron arguments" in result.err


def test_arguments_of_the_checkpoint_come_first(converted: Converted, tiny: Tiny, tmp_path: Path, run: Run) -> None:
    """A checkpoint with ``args`` is read by these, whatever lies beside them."""
    source = original(tiny, "qwen3")
    shutil.copytree(converted(source, spec="local").parent, tmp_path / "both")
    write(tmp_path / "both" / "release", "qwen3", num_query_groups="3")
    assert run("mcore2hf", tmp_path / "both", tmp_path / "back", "--audit", "bits").code == 0
    assert audit(source, tmp_path / "both", level="headers").verdict() == "pass"


def test_parity_builds_the_model_that_it_says(bridged: dict[str, Path], tiny: Tiny, run: Run) -> None:
    """Logits of the real model made of run_config.yaml alone, MTP among them, and of transformers'."""
    result = run("parity", original(tiny, "deepseek_v3"), bridged["deepseek_v3"])
    assert result.code == 0 and "compared 1; verdict: pass" in result.out, result
