"""Megatron-LM 0.19.2's own parser and ``load_args_from_checkpoint`` read what a conversion writes and prints."""

import dataclasses
import inspect
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.convert.launch_flags import launch_flags
from mtpconvert.evidence.megatron_model import CPU_SETTINGS
from tests.convert.test_arguments import READ_BY_MEGATRON
from tests.evidence.test_forward import TOLERANCE, VARIANTS, distance, tokens
from tests.support import mcore, mcore_forward
from tests.support.frameworks_convert import FAMILIES, Converted, Tiny, to_hf
from tests.support.frameworks_hf import hf_trunk_logits
from tests.support.mcore_cpu import cpu_patches, quiet
from tests.support.mcore_launch import core_config, launched, model_config
from tests.support.tiny import sha256_tree

# The plain families, and every variant of the configs: how rotary embedding, windows and routing are spelled
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | VARIANTS
# Arguments that Megatron keeps under another name, derives, or takes for the run
ELSEWHERE = {"norm_epsilon", "apply_layernorm_1p", "use_rotary_position_embeddings", "seq_length", "vocab_size"}
# Values that no flag brings into the model, said by ``without_flag``: fields of MLATransformerConfig
NO_FLAG = {"original_max_position_embeddings", "beta_fast", "beta_slow"}


def test_every_argument_that_megatron_reads_is_written(tiny: Tiny, converted: Converted) -> None:
    """By the source of the installed ``load_args_from_checkpoint``: each of its ``_set_arg`` calls."""
    cpu_patches()
    with quiet():
        from megatron.training import checkpointing

    code = inspect.getsource(checkpointing.load_args_from_checkpoint)
    read = set(re.findall(r"_set_arg\(\s*'(\w+)'", code))
    assert read == set(READ_BY_MEGATRON)
    for family in FAMILIES:
        assert read - set(vars(saved_args(converted(source(tiny, family))))) == set()


def source(tiny: Tiny, name: str) -> Path:
    family, changes = SOURCES[name]
    return tiny(family, dtype="F32", config_overrides=changes)


def saved_args(directory: Path) -> Namespace:
    return mcore.common_state(directory)["args"]


def launch(directory: Path, how: str) -> Namespace:
    """By the flags that ``hf2mcore`` prints, or by those for a launch without ``--use-checkpoint-args``."""
    flags = launch_flags(vars(saved_args(directory)), complete=how == "complete")
    return launched(directory.parent, flags, *(["--seq-length", "64"] if how == "complete" else []))


@pytest.mark.parametrize("how", ["printed", "complete"])
@pytest.mark.parametrize("name", SOURCES)
def test_flags_bring_back_every_argument(name: str, how: str, tiny: Tiny, converted: Converted) -> None:
    directory = converted(source(tiny, name), spec="local")
    args = launch(directory, how)
    saved = vars(saved_args(directory))
    wanted = {key: value for key, value in saved.items() if value is not None and key not in ELSEWHERE | NO_FLAG}
    assert {key: getattr(args, key, "absent") for key in wanted} == wanted


@pytest.mark.parametrize("how", ["printed", "complete"])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatrons_own_configs(family: str, how: str, tiny: Tiny, converted: Converted) -> None:
    """Megatron's config of the launch equals the one made of the checkpoint's arguments, field by field."""
    directory = converted(source(tiny, family), spec="local")
    args = launch(directory, how)
    direct = mcore.transformer_config(saved_args(directory), spec="local", dtype=args.params_dtype)
    config = core_config(args)
    assert type(config) is type(direct)
    # how it is run, not what it computes
    run = {name for name in CPU_SETTINGS if not name.startswith("moe_router")} | {
        "batch_p2p_comm", "calculate_per_token_loss", "cp_comm_type", "cuda_graph_modules", "inference_sampling_seed",
        "moe_router_load_balancing_type", "moe_router_fusion", "overlap_p2p_comm", "output_layer_init_method",
        "init_method", "embedding_init_method", "mtp_loss_scaling_factor", "tensor_parallel_num_weight_shards",
        "expert_tensor_parallel_num_weight_shards",
    }  # fmt: skip
    fields = [field.name for field in dataclasses.fields(direct) if field.name not in run]
    different = {name: (getattr(config, name), getattr(direct, name)) for name in fields}
    assert {name: pair for name, pair in different.items() if pair[0] != pair[1]} == {}
    built = model_config(args)
    saved = saved_args(directory)
    assert (built.vocab_size, built.should_pad_vocab) == (128, False)
    assert built.share_embeddings_and_output_weights is not saved.untie_embeddings_and_output_weights
    assert (built.rotary_base, built.rope_scaling) == (saved.rotary_base, saved.use_rope_scaling)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "llama3", "yarn", "sliding window by layer"])
def test_a_launched_model_computes_the_same(name: str, tiny: Tiny, converted: Converted) -> None:
    """The model of the launched arguments, not of the checkpoint's: what the flags do not bring is not there."""
    directory = converted(source(tiny, name), spec="local")
    model = mcore.model_from_args(launch(directory, "printed"), spec="local")
    assert mcore.load_into(model, directory) == []
    wanted = hf_trunk_logits(source(tiny, name), tokens())
    assert distance(mcore_forward.trunk_logits(model, tokens()), wanted) < TOLERANCE


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_without_the_printed_flags_the_model_is_another(family: str, tiny: Tiny, converted: Converted) -> None:
    """Why they are printed: by ``--use-checkpoint-args`` alone, Qwen3 loses its q and k norms without a word."""
    directory = converted(source(tiny, family), spec="local")
    args = launched(directory.parent, ["--use-checkpoint-args"])
    assert not args.qk_layernorm and not args.multi_latent_attention
    assert saved_args(directory).qk_layernorm


def test_the_flag_that_0_19_2_does_not_pass_on(tiny: Tiny, converted: Converted) -> None:
    """``without_flag`` says so: ``--rope-scaling-factor`` is parsed, and GPTModelBuilder builds with 8.0."""
    directory = converted(source(tiny, "llama3 factor"), spec="local")
    args = launch(directory, "printed")
    assert args.rope_scaling_factor == 32.0
    assert model_config(args).rope_scaling_factor == 8.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_save_of_a_real_launch_comes_back(family: str, tiny: Tiny, converted: Converted, tmp_path: Path) -> None:
    """``args`` as training writes it: Megatron's whole namespace, 0.19.2's names, enums and dtypes."""
    original = source(tiny, family)
    directory = converted(original, spec="local")
    args = launch(directory, "printed")
    model = mcore.model_from_args(args, spec="local")
    assert mcore.load_into(model, directory) == []
    mcore.save_from(model, tmp_path / "save", args=args)
    conversion = to_hf(tmp_path / "save", tmp_path / "back", reference=original)
    assert sha256_tree(tmp_path / "back") == sha256_tree(original)
    assert not [note for note in conversion.notes if "unchecked" in note and "num_layers" in note]
