"""What Megatron cannot hold is refused with 10, its tensors and the reason, by every command that would convert it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import Run
from tests.support.draft_kinds import COUNT, KINDS, base, layer, nested, trunk
from tests.support.sparse import write_headers
from tests.support.tiny import read_safetensors, write_tiny

# family -> (architecture, model type, names that show it, a piece of the reason)
TRUNKS = {
    "gemma 4": ("Gemma4ForCausalLM", "gemma4", "post_feedforward_layernorm", "no module for sandwich norms"),
    "glm ocr": ("GlmOcrForCausalLM", "glm_ocr_text", "post_self_attn_layernorm", "no module for sandwich norms"),
    "exaone 4": ("Exaone4ForCausalLM", "exaone4", "post_feedforward_layernorm", "normed after attention and MLP"),
    "olmoe": ("OlmoeForCausalLM", "olmoe", "self_attn.q_norm", "no q and k norms over all heads at once"),
    "gigachat": ("GigaChat35ForCausalLM", "gigachat35", "post_mlp_layernorm", "no gated norms on both sides"),
    "mimo v2 pro": ("MiMoV2ForCausalLM", "mimo_v2", "self_attn.qkv_proj", "no value heads of another size"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_draft(kind: str, run: Run, tmp_path: Path) -> None:
    checkpoint = KINDS[kind]
    source = write_headers(tmp_path / "hf", checkpoint.config, checkpoint.shapes, checkpoint.dtypes)
    for command in (["plan", source], ["hf2mcore", source, tmp_path / "out"], ["roundtrip", source]):
        result = run(*command)
        assert (result.code, result.out) == (10, ""), result.err
        assert checkpoint.reason in result.err
        assert any(name in result.err for name in checkpoint.shapes), result.err
        assert "mtpconvert inspect" in result.err
        assert ("convert its target alone" in result.err) == (checkpoint.draft_only or kind == "meta")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    checked = run("mappings", "check", "--config", source / "config.json")
    if kind == "eagle 1":  # its config.json is that of a Llama; the tensors give it away
        assert checked.code == 5
    elif kind != "dspark":
        assert checked.code == 10
        assert checkpoint.reason in checked.err


@pytest.mark.parametrize("family", TRUNKS)
def test_every_trunk_without_a_module_in_megatron(family: str, run: Run, tmp_path: Path) -> None:
    architecture, model_type, norm, reason = TRUNKS[family]
    source = write_headers(tmp_path / "hf", base(architecture, model_type), trunk("model.", 2, norm))
    result = run("plan", source)
    assert (result.code, result.out) == (10, "")
    assert reason in result.err
    assert f"(2 tensors: model.layers.0.{norm}.weight, model.layers.1.{norm}.weight)" in result.err
    (source / "config.json").write_text(json.dumps(nested("OtherName", model_type)))
    assert run("plan", source).code == 10  # an architecture of remote code: the model type says it
    assert run("mappings", "check", "--config", source / "config.json").code == 10


MODULES = {  # kind -> (the name without which it is not known, a piece of what is said)
    "inkling": ("wq_du", "a model with Inkling's modules"),
    "glm 5 next": ("attn_hc", "a model with hyper-connections"),
    "hy v4": ("attn_hc", "a model with hyper-connections"),
    "deepseek v4": ("hc_attn_fn", "a model with hyper-connections"),
    "qwen4 exp": ("hyper_connection", "a model with hyper-connections"),
    "kimi k3": ("q_conv1d", "a model with KDA linear attention"),
    "nemotron 3": ("mixer", "a Mamba model, or a hybrid one"),
}


@pytest.mark.parametrize("kind", MODULES)
def test_modules_tell_a_family_of_an_unknown_name(kind: str, run: Run, tmp_path: Path) -> None:
    """An architecture that nobody has heard of, or none at all; a mapped one is believed, and fails by its tensors."""
    checkpoint = KINDS[kind]
    name, what = MODULES[kind]
    renamed = base("OddForCausalLM", "odd")
    nameless = {key: value for key, value in renamed.items() if key not in ("architectures", "model_type")}
    for number, config in enumerate((renamed, nameless)):
        source = write_headers(tmp_path / f"{number}", config, checkpoint.shapes, checkpoint.dtypes)
        result = run("plan", source)
        assert (result.code, result.out) == (10, "")
        assert what in result.err and checkpoint.reason.replace("hybrid Mamba models", "Mamba layers") in result.err
        assert any(name in found and found in result.err for found in checkpoint.shapes), result.err
    mapped = renamed | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    trunk_only = {n: s for n, s in checkpoint.trunk.items() if ".experts." not in n}
    result = run("plan", write_headers(tmp_path / "mapped", mapped, trunk_only))
    assert result.code not in (0, 10) and what not in result.err


def test_dropping_mtp_helps_only_where_the_trunk_has_a_mapping(run: Run, tmp_path: Path) -> None:
    """Own heads on a DeepSeek-V3 trunk, and on a trunk that nothing maps."""
    step = KINDS["step 3.5"]
    source = write_headers(tmp_path / "step", step.config, step.shapes)
    result = run("plan", source, "--mtp", "drop")
    assert result.code == 10
    assert "--mtp drop does not help: there is no mapping for its trunk either" in result.err
    tiny = write_tiny("deepseek_v3", tmp_path / "tiny")
    shapes = {name: shape for name, (_, shape, _) in read_safetensors(tiny).items()}
    dtypes = {name: dtype for name, (dtype, _, _) in read_safetensors(tiny).items()}
    own = "model.layers.3.transformer.shared_head.output.weight"
    config = json.loads((tiny / "config.json").read_text())
    source = write_headers(tmp_path / "own", config, shapes | {own: (98, 36)}, dtypes)
    result = run("plan", source)
    assert result.code == 10
    assert own in result.err
    assert "leave MTP out on purpose with --mtp drop" in result.err
    dropped = run("plan", source, "--mtp", "drop")
    assert dropped.code == 0, dropped.err
    assert "MTP layers: declared 1" in dropped.last_line


def test_a_reference_that_megatron_cannot_hold(run: Run, tmp_path: Path) -> None:
    source = write_tiny("qwen3", tmp_path / "hf")
    assert run("hf2mcore", source, tmp_path / "mcore").code == 0
    step = KINDS["step 3.5"]
    reference = write_headers(tmp_path / "step", step.config, step.shapes)
    result = run("mcore2hf", tmp_path / "mcore", tmp_path / "out", "--reference", reference)
    assert (result.code, result.out) == (10, "")
    assert step.reason in result.err


def test_a_mapping_of_ones_own_is_believed(run: Run, tmp_path: Path) -> None:
    """A refused architecture with a mapping for it comes as far as that mapping goes."""
    from mtpconvert.mapping.catalogue import file_of

    source = write_headers(tmp_path / "hf", base("OlmoeForCausalLM", "olmoe"), trunk())
    result = run("plan", source, "--mapping", file_of("LlamaForCausalLM"))
    assert result.code != 10


def test_an_unknown_architecture_names_the_closest_by_name_and_by_tensors(run: Run, tmp_path: Path) -> None:
    """18 names in 11 patterns, of which Llama's rows have all but two."""
    config = base("Qwen3XForCausalLM", "qwen3_x") | {COUNT: 0}
    shapes = trunk("model.", 2, "self_attn.odd", "self_attn.other")
    result = run("plan", write_headers(tmp_path / "hf", config, shapes))
    assert (result.code, result.out) == (10, "")
    assert "no mapping file for the architecture 'Qwen3XForCausalLM'; the closest known one is Qwen3" in result.err
    assert "by its tensors " in result.err
    assert "whose rows have 12 of 14 name patterns" in result.err
    assert "mtpconvert mappings new HF_DIR" in result.err
    strange = write_headers(tmp_path / "strange", config, {"a.b": (2, 2)})
    assert "no mapping has a row for any of its tensors" in run("plan", strange).err


def test_layers_of_a_trunk_are_no_draft(run: Run, tmp_path: Path) -> None:
    """fc beside a trunk of another root is no EAGLE, numbers in names no Medusa; nor is a bare trunk any EAGLE, with
    only its last norm, its first norms, or norms of outputs."""
    config = base("OddForCausalLM", "odd")
    bare = {name: shape for name, shape in trunk("").items() if not name.startswith("lm_head")}
    inner = {name: shape for name, shape in bare.items() if "input_layernorm" not in name}
    del inner["norm.weight"]
    after = {"layers.0.post_feedforward_layernorm.weight": (8,)}
    for number, shapes in enumerate(
        (bare, inner | {"norm.weight": (8,)}, inner | after, inner | {"lm_head.weight": (16, 8)})
    ):
        result = run("plan", write_headers(tmp_path / f"bare {number}", config, shapes))
        assert "no mapping file for the architecture" in result.err, result.err
    assert "EAGLE-2 draft model, its projection" in run("plan", write_headers(tmp_path / "eagle", config, inner)).err
    for number, extra in enumerate(({"fc.weight": (8, 8)}, {"heads.0.1.weight": (8, 8)}, layer("model.midlayer2."))):
        result = run("plan", write_headers(tmp_path / f"{number}", config, trunk() | extra))
        assert "no mapping file for the architecture" in result.err, result.err
