"""``mtpconvert args``: the flags that config.json stands for, in both its spellings, as shell and as YAML."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpconvert.mapping.catalogue import architectures, file_of, load, sample_configs
from tests.support.command_line import Result, Run
from tests.support.draft_kinds import KINDS
from tests.support.tiny import write_tiny
from tests.support.tiny_families import CONFIGS

CASES = [(name, size) for name in architectures() for size in ("tiny", "full")]
# Qwen/Qwen3-8B from its published config.json; spelling of the flags: megatron/training/arguments.py of 0.19.2
QWEN3_8B = shlex.split("""
--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --kv-channels 128 --max-position-embeddings 40960 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --disable-bias-linear --swiglu --untie-embeddings-and-output-weights
--normalization RMSNorm --attention-dropout 0.0 --hidden-dropout 0.0 --padded-vocab-size 151936 --norm-epsilon 1e-06
--qk-layernorm --make-vocab-size-divisible-by 128 --transformer-impl transformer_engine --bf16
""")


def words(result: Result) -> list[str]:
    """What stands in the array; the lines around it are comments."""
    assert result.code == 0, result.err
    head, *lines, tail = [line for line in result.out.splitlines() if not line.startswith("#")]
    assert (head, tail) == ("MODEL_ARGS=(", ")")
    return [word for line in lines for word in shlex.split(line)]


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` with ``type``, ``torch_dtype``, as transformers 4 wrote them."""
    old = copy.deepcopy(config)
    rope = old.pop("rope_parameters", None)
    if rope is not None:
        if "sliding_attention" in rope:  # configuration_gemma3.py: a key of its own, and no scaling there
            old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        old["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    return old


def new_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` and ``dtype``, as transformers 5 writes them (modeling_rope_utils.py)."""
    new = copy.deepcopy(config)
    if "rope_theta" in new:
        scaling = new.pop("rope_scaling", None) or {"rope_type": "default"}
        scaling["rope_type"] = scaling.pop("rope_type", None) or scaling["type"]
        scaling.pop("type", None)
        new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), **scaling}
        if "partial_rotary_factor" in new:
            new["rope_parameters"]["partial_rotary_factor"] = new.pop("partial_rotary_factor")
        bases = [new.pop(key) for key in ("rope_local_base_freq", "swa_rope_theta") if key in new]
        if bases:
            sliding = {"rope_theta": bases[0], "rope_type": "default"}
            sliding |= {k: v for k, v in new["rope_parameters"].items() if k == "partial_rotary_factor"}
            new["rope_parameters"] = {"full_attention": new["rope_parameters"], "sliding_attention": sliding}
    if "torch_dtype" in new:
        new["dtype"] = new.pop("torch_dtype")
    return new


def respelled(config: dict[str, Any], *spellings: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """In one spelling after the other, the language model's part too where the config has one."""
    for spelling in spellings:
        part = {"text_config": spelling(config["text_config"])} if "text_config" in config else {}
        config = spelling(config) | part
    return config


@pytest.mark.parametrize(("architecture", "size"), CASES)
def test_both_spellings_of_the_config_give_the_same_flags(
    architecture: str, size: str, run: Run, tmp_path: Path
) -> None:
    config = sample_configs(architecture)[size] | {"dtype": "bfloat16"}
    config.pop("torch_dtype", None)
    mapping = load(file_of(architecture))
    if "rope_by_kind" in mapping.arguments.get("functions", ()):
        text = config.get("text_config", config)
        if "rope_parameters" not in text:  # what the classes of these families take for keys that are not there
            base = text.setdefault("rope_theta", 1000000)
            text.setdefault("rope_local_base_freq", text.get("swa_rope_theta", base))
    old, new = respelled(config, new_spelling, old_spelling), respelled(config, old_spelling, new_spelling)
    for table, spelled in ((old, (True, False)), (new, (False, True))):
        text = table.get("text_config", table)
        assert ("rope_theta" in text, "rope_parameters" in text) == spelled
        assert ("torch_dtype" in table, "dtype" in table) == spelled
    unsupported = {entry.version for entry in mapping.unsupported}
    options = ["--mcore-version", "0.19" if "0.16" in unsupported else "0.16"]
    options += ["--dialect", mapping.dialect.name] if mapping.dialect else []
    one = run("args", written(tmp_path / "old", old), *options)
    two = run("args", written(tmp_path / "new", new), *options)
    assert words(one) == words(two)
    assert "--bf16" in words(one)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_check_of_a_reference_reads_both_spellings(family: str, run: Run, memory: Path) -> None:
    """``mcore2hf`` holds the checkpoint's arguments against the reference's config.json; a real change it sees."""
    source = write_tiny(family, memory / "hf")
    config = json.loads((source / "config.json").read_text())
    assert run("hf2mcore", source, memory / "mcore").code == 0
    for spelling in (old_spelling, new_spelling):
        (source / "config.json").write_text(json.dumps(spelling(config)))
        done = run("plan", memory / "mcore", "--reference", source)
        assert done.code == 0, done.err
        assert "unchecked" not in done.err
    changed = old_spelling(config)
    changed["rope_theta"] *= 2
    (source / "config.json").write_text(json.dumps(changed))
    result = run("plan", memory / "mcore", "--reference", source)
    assert result.code == 5
    assert "rotary_base" in result.err


@pytest.mark.parametrize("family", CONFIGS)
def test_config_json_alone_says_what_a_conversion_writes(family: str, run: Run, memory: Path) -> None:
    from mtpconvert.convert.launch_flags import launch_flags
    from mtpconvert.stores.torch_dist.reader import TorchDistReader

    source = write_tiny(family, memory / "hf")
    options = ("--tp", "2", "--ep", "2", "--spec", "local", "--make-vocab-size-divisible-by", "16")
    assert run("hf2mcore", source, memory / "mcore", *options).code == 0
    for shard in source.glob("*.safetensors"):
        shard.unlink()
    stored = TorchDistReader(memory / "mcore" / "release").args
    assert stored is not None
    sizes = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--bf16"]
    assert words(run("args", source, *options)) == [*launch_flags(stored, complete=True), *sizes]


def test_a_published_model_by_hand(run: Run, tmp_path: Path) -> None:
    source = written(tmp_path / "hf", sample_configs("Qwen3ForCausalLM")["full"])
    result = run("args", source)
    assert words(result) == QWEN3_8B
    assert words(run("args", source / "config.json")) == QWEN3_8B
    assert result.out.startswith("# Qwen3ForCausalLM, for megatron-core 0.16 with --spec te")
    assert result.last_line == "# MTP layers: declared nothing, to be launched with: 0"


def test_deepseek_v3_as_a_shell_reads_it_and_as_yaml(run: Run, tmp_path: Path) -> None:
    source = written(tmp_path / "hf", sample_configs("DeepseekV3ForCausalLM")["full"])
    result = run("args", source, "--tp", "8", "--pp", "16", "--ep", "64", "--etp", "2")
    file = tmp_path / "args.sh"
    file.write_text(result.out)
    done = subprocess.run(
        ["bash", "-c", 'set -eu; source "$0"; printf "%s\\n" "${MODEL_ARGS[@]}"', file],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seen = done.stdout.splitlines()
    assert seen == words(result)
    assert seen[seen.index("--moe-layer-freq") + 1] == "[0]*3+[1]*58"
    assert seen[-9:] == [
        "--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "16", "--expert-model-parallel-size",
        "64", "--expert-tensor-parallel-size", "2", "--bf16",
    ]  # fmt: skip
    assert seen[seen.index("--padded-vocab-size") + 1] == "130048"  # 127 x 1024, the first multiple of 8 x 128
    assert result.last_line == "# MTP layers: declared 1, to be launched with: 1"
    table = yaml.safe_load(run("args", source, "--format", "yaml").out)
    wanted = {
        "num-layers": 61, "moe-layer-freq": "[0]*3+[1]*58", "multi-latent-attention": True, "norm-epsilon": 1e-6,
        "rotary-scaling-factor": 40.0, "mtp-num-layers": 1, "normalization": "RMSNorm", "bf16": True,
    }  # fmt: skip
    assert {key: table[key] for key in wanted} == wanted
    assert all(f"--{key}" in seen for key in table)


def test_what_the_config_leaves_open_is_said(run: Run, tmp_path: Path) -> None:
    config = sample_configs("DeepseekV3ForCausalLM")["tiny"] | {"num_nextn_predict_layers": None}
    for key in ("dtype", "torch_dtype", "rms_norm_eps"):
        config.pop(key, None)
    result = run("args", written(tmp_path / "hf", config))
    assert {"--bf16", "--mtp-num-layers"}.isdisjoint(words(result))
    assert "note: config.json gives no dtype" in result.err
    assert "config.json gives no MTP count (num_nextn_predict_layers)" in result.err
    assert "config.json has no rms_norm_eps: taken as 1e-06" in result.err
    half = written(tmp_path / "half", config | {"dtype": "float16"})
    assert words(run("args", half))[-1] == "--fp16"
    odd = run("args", written(tmp_path / "odd", config | {"torch_dtype": "float8_e4m3fn"}))
    assert "the dtype 'float8_e4m3fn', for which Megatron has no flag" in odd.err


def test_refusals(run: Run, tmp_path: Path) -> None:
    step = written(tmp_path / "step", KINDS["step 3.5"].config)
    cases = [
        ([step], 10, "nowhere to keep a trained head"),
        ([tmp_path], 5, "there is no config.json"),
        ([step, "--format", "toml"], 2, "'toml' is not one of"),
        ([step, "--tp", "0"], 2, "not in the range"),
    ]
    for arguments, code, what in cases:
        result = run("args", *arguments)
        assert (result.code, result.out) == (code, "")
        assert what in result.err
