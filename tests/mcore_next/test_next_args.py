"""Megatron-LM 0.19.2's own parser reads what ``mtpconvert args`` prints for the published configs, value by value."""

import contextlib
import io
import sys
from typing import Any
from unittest import mock

import pytest

from mtpconvert.convert.config_arguments import ArgsOptions, arguments_of
from mtpconvert.convert.launch_flags import NOT_RESTORED, RESTORED
from mtpconvert.mapping.catalogue import architectures, file_of, load, sample_configs
from mtpconvert.mapping.dialect import DialectName
from tests.support.mcore_cpu import cpu_patches, quiet

ELSEWHERE = {  # flag and argument of 0.19.2 differ in name
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
SIZES = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 2,
}  # fmt: skip


def parsed(words: list[str]) -> dict[str, Any]:
    """What ``parse_args`` makes of a command line, before anything is derived."""
    cpu_patches()
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        from megatron.training.arguments import parse_args

        with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]):
            return vars(parse_args())


@pytest.mark.parametrize("architecture", architectures())
def test_every_flag_of_a_published_model_is_read_as_it_is_meant(architecture: str) -> None:
    config = sample_configs(architecture)["full"] | {"dtype": "bfloat16"}
    mcore_version = "0.16" if config.get("q_lora_rank", 0) is None else "0.19"  # 0.19 cannot hold DeepSeek-V2-Lite
    dialect: DialectName = "stock" if load(file_of(architecture)).dialect is None else "bridge"
    options = ArgsOptions(mcore_version=mcore_version, tp=2, pp=4, ep=8, etp=2, dialect=dialect)
    result = arguments_of(config, options)
    args = parsed([word for flag, value in result.flags for word in ([flag] if value is None else [flag, value])])
    experts = result.arguments["num_experts"] is not None
    for name in RESTORED | NOT_RESTORED:
        meant = result.arguments.get(name)
        if meant is None or (not experts and name.startswith("moe_")):
            continue
        assert args[ELSEWHERE.get(name, name)] == meant, name
    assert {name: args[name] for name in SIZES} == SIZES
    assert args["bf16"] is True
