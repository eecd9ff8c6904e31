"""``mappings new``: a draft that loads, places what known rows fit by name and shape, and marks every other tensor."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpconvert.errors import MtpConvertError
from mtpconvert.mapping import catalogue
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.expand import Expansion, expand
from mtpconvert.mapping.mtp import declared_mtp
from mtpconvert.mapping.sites import sites_of, text_key
from mtpconvert.tensors import TensorSpec
from tests.support.command_line import Run
from tests.support.draft_kinds import base, layer, trunk, vectors
from tests.support.family_tables import CASES, write_case
from tests.support.sabotage import edit_json
from tests.support.sparse import write_headers
from tests.support.tiny import read_safetensors, write_safetensors

# Others' rows have all of their tensors: the draft without their own file must make the same plan as that file.
WHOLE = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
SOURCES = (*WHOLE, "Qwen2ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM")
Shapes = dict[str, tuple[int, ...]]


def expansion(architecture: str, of: str) -> Expansion:
    """The rows of ``architecture`` on the tiny config of ``of``."""
    config = catalogue.sample_configs(of)["tiny"]
    mapping = catalogue.load(catalogue.file_of(architecture))
    scope = Scope(config, mapping.defaults, {"mtp_layers": declared_mtp(config, mapping.mtp).count or 0})
    return expand(mapping, scope, scope.integer("vocab_size"), None)


def shapes_of(found: Expansion) -> Shapes:
    entries = [*found.hf.values(), *(entry for entry, copy in found.aliases.values() if not copy.tie)]
    return {entry.name: entry.shape for entry in entries}


def source(architecture: str, folder: Path, extra: Shapes | None = None) -> Path:
    """The tiny model of a family, as headers."""
    found = expansion(architecture, architecture)
    dtypes = {entry.name: entry.dtype for entry in found.hf.values() if entry.dtype is not None}
    return write_headers(
        folder, catalogue.sample_configs(architecture)["tiny"], shapes_of(found) | (extra or {}), dtypes
    )


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``unknown(architecture)``: from now on the tool has no mapping file of it."""
    known = catalogue.architectures()

    def forget(architecture: str) -> None:
        monkeypatch.setattr(catalogue, "architectures", lambda: [name for name in known if name != architecture])

    return forget


def shared(architecture: str) -> set[str]:
    """Tensors that some other mapping, expanded on this model's config, has under this name in this shape."""
    own, found = shapes_of(expansion(architecture, architecture)), set[str]()
    for other in catalogue.architectures():
        if other != architecture:
            try:
                theirs = shapes_of(expansion(other, architecture))
            except MtpConvertError:
                continue  # needs keys that this config does not have
            found |= {name for name, shape in own.items() if theirs.get(name) == shape}
    return found


@pytest.mark.parametrize("architecture", SOURCES)
def test_without_its_own_file_a_family_is_placed_as_far_as_others_go(
    architecture: str, run: Run, tmp_path: Path, unknown: Callable[[str], None]
) -> None:
    hf = source(architecture, tmp_path / "hf")
    wanted = shared(architecture)
    assert wanted
    shipped = run("plan", hf, "--json").json
    unknown(architecture)
    result = run("mappings", "new", hf, "-o", tmp_path / "draft.toml")
    assert result.code == 0, result.err
    assert "its rows are a bijection" in result.out
    assert result.last_line.startswith("MTP layers: ")
    mapping = catalogue.load(tmp_path / "draft.toml")
    assert mapping.architecture == architecture
    config = json.loads((hf / "config.json").read_text())
    scope = Scope(config, mapping.defaults, {"mtp_layers": shipped["mtp"]["written"]})
    assert wanted <= shapes_of(expand(mapping, scope, scope.integer("vocab_size"), None)).keys()
    drafted = run("plan", hf, "--mapping", tmp_path / "draft.toml", "--json")
    if architecture in WHOLE:
        assert drafted.code == 0, drafted.err
        assert sorted(map(str, drafted.json["tiles"])) == sorted(map(str, shipped["tiles"]))
        assert drafted.json["copies"] == shipped["copies"]
    elif drafted.code:
        assert "# not placed: " in (tmp_path / "draft.toml").read_text()


def test_a_tensor_that_no_row_fits_is_marked(run: Run, tmp_path: Path, unknown: Callable[[str], None]) -> None:
    extra: Shapes = {f"model.layers.{n}.self_attn.odd.weight": (3, 5) for n in range(3)}
    extra |= {"model.layers.2.mlp.experts.1.odd.weight": (7,), "model.odd.weight": (2,)}
    hf = source("Qwen3ForCausalLM", tmp_path / "hf", extra)
    unknown("Qwen3ForCausalLM")
    result = run("mappings", "new", hf)
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if line.startswith("# not placed: ")]
    assert sorted(lines) == [
        "# not placed: model.layers.{i}.mlp.experts.{e}.odd.weight [7] BF16 x1",
        "# not placed: model.layers.{i}.self_attn.odd.weight [3, 5] BF16 x3",
        "# not placed: model.odd.weight [2] BF16 x1",
    ]
    assert "36 of 41 tensors placed, 3 name patterns not; its rows are a bijection" in result.err
    assert result.last_line.startswith("# MTP layers: declared nothing")
    (tmp_path / "draft.toml").write_text(result.out)
    assert catalogue.load(tmp_path / "draft.toml").architecture == "Qwen3ForCausalLM"
    planned = run("plan", hf, "--mapping", tmp_path / "draft.toml")
    assert planned.code == 8
    assert "5 tensors that nothing maps" in planned.err


def test_a_wrong_shape_or_dtype_is_not_placed(run: Run, tmp_path: Path, unknown: Callable[[str], None]) -> None:
    """Names alone do not place a tensor: a query norm of neither one head nor all, a router bias that is not F32."""
    hf = source(
        "Qwen3ForCausalLM", tmp_path / "hf", {f"model.layers.{n}.self_attn.q_norm.weight": (61,) for n in range(3)}
    )
    unknown("Qwen3ForCausalLM")
    text = run("mappings", "new", hf).out
    assert "# not placed: model.layers.{i}.self_attn.q_norm.weight [61] BF16 x3" in text
    assert '"self_attn.k_norm.weight"' in text
    config = catalogue.sample_configs("DeepseekV3ForCausalLM")["tiny"]
    shapes = shapes_of(expansion("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM"))
    text = run("mappings", "new", write_headers(tmp_path / "v3", config, shapes)).out
    assert "# not placed: model.layers.{i}.mlp.gate.e_score_correction_bias [4] BF16 x2" in text
    assert "# not placed: model.layers.{num_hidden_layers+i}.mlp.gate.e_score_correction_bias [4] BF16 x1" in text


SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8}


def norms(number: int) -> Shapes:
    return {f"model.layers.{number}.self_attn.{x}_norm.weight": (4,) for x in "qk"}


@pytest.mark.parametrize(
    ("with_norms", "more", "selectors"),
    [
        ([0, 1], {}, {"dense_kind0": ["0", "2"], "dense_kind1": ["2", "num_hidden_layers"]}),
        ([0, 1], {"first_k_dense_replace": 2}, {"dense_kind0": ["0", "first_k_dense_replace"],
                                              "dense_kind1": ["first_k_dense_replace", "num_hidden_layers"]}),
        ([0, 2, 4], {}, {"dense_kind0": "every(2, 0)", "dense_kind1": "every(2, 1)"}),
        ([0, 3], {"layer_types": ["a", "b", "b", "a", "b", "b"]}, {"dense_kind0": 'where(layer_types == "a")',
                                                                 "dense_kind1": 'where(layer_types == "b")'}),
        ([0, 3], {}, {"dense_kind0": "every(3, 0)", "dense_kind1_0": ["1", "3"],
                      "dense_kind1_1": ["4", "num_hidden_layers"]}),
    ],
)  # fmt: skip
def test_which_layers_have_which_rows(
    with_norms: list[int], more: dict[str, object], selectors: dict[str, object], run: Run, tmp_path: Path
) -> None:
    config = base("OddForCausalLM", "odd", num_hidden_layers=6, **SIZES, **more)
    shapes = trunk("model.", 6)
    for number in with_norms:
        shapes |= norms(number)
    hf = write_headers(tmp_path / "hf", config, shapes)
    result = run("mappings", "new", hf)
    assert result.code == 0
    assert "its rows are a bijection" in result.err
    table = tomllib.loads(result.out)
    assert table["layers"] == selectors
    (tmp_path / "draft.toml").write_text(result.out)
    assert run("plan", hf, "--mapping", tmp_path / "draft.toml").code == 0


def test_prefixes_towers_and_mtp_of_a_model_with_vision(run: Run, tmp_path: Path) -> None:
    """A trunk below another root, a vision tower, MTP layers whose joining tensors have names that no row has."""
    text = base("OddForConditionalGeneration", "odd", **SIZES, num_nextn_predict_layers=1)
    del text["architectures"]
    config = {"architectures": ["OddForConditionalGeneration"], "vision_config": {"num_hidden_layers": 1}}
    config["text_config"] = text
    shapes = trunk("model.language_model.") | layer("model.visual.layers.0.") | layer("mtp.layers.0.")
    shapes |= vectors("mtp.layers.0.", "odd_norm")
    hf = write_headers(tmp_path / "hf", config, shapes)
    result = run("mappings", "new", hf)
    table = tomllib.loads(result.out)
    assert table["mtp"] == {"count": ["text_config.num_nextn_predict_layers"], "present": "mtp.layers.{i}."}
    assert {place.get("hf") for place in table["place"]} == {
        None,
        "model.language_model.layers.{i}.",
        "mtp.layers.{i}.",
    }
    assert {place["mcore"] for place in table["place"] if "mcore" in place} == {
        "decoder.layers.{i}.", "mtp.layers.{i}.transformer_layer.",
    }  # fmt: skip
    assert "# not placed: mtp.layers.{i}.odd_norm.weight [8] BF16 x1" in result.out
    assert (table["text"], table["passthrough"]) == ("text_config", ["model.visual."])
    assert "model.visual.layers" not in result.out
    assert "30 of 40 tensors placed, 9 set aside, 1 name patterns not" in result.err
    assert '"model.language_model.embed_tokens.weight"' in result.out
    assert result.last_line.endswith(
        "declared 1 (text_config.num_nextn_predict_layers), present 1; 10 tensors, 944 bytes"
    )


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_packed_weights_are_drafted_as_what_they_hold(method: str, run: Run, tmp_path: Path) -> None:
    """FP8 blocks are seen as the matrices that they decode to; parts of an unknown packing are marked one by one."""
    config = catalogue.sample_configs("DeepseekV3ForCausalLM")["tiny"]
    config |= {"quantization_config": {"quant_method": method, "fmt": "e4m3", "weight_block_size": [128, 128]}}
    found = expansion("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM")
    shapes = shapes_of(found)
    packed = [name for name in shapes if "_proj." in name and "eh_proj" not in name]
    scales = {f"{name}_scale_inv" if method == "fp8" else name.replace("weight", "qzeros"): (1, 1) for name in packed}
    dtypes = {entry.name: entry.dtype for entry in found.hf.values() if entry.dtype} | dict.fromkeys(scales, "F32")
    dtypes |= dict.fromkeys(packed, "F8_E4M3")
    result = run("mappings", "new", write_headers(tmp_path / "hf", config, shapes | scales, dtypes))
    assert result.code == 0, result.err
    assert ("99 of 99 tensors placed, 0 name patterns not" in result.err) == (method == "fp8")
    assert ("mlp.down_proj.qzeros [1, 1] F32 x1" in result.out) == (method == "awq")


def test_a_refused_family_can_be_drafted(run: Run, tmp_path: Path) -> None:
    config = base("Gemma4ForCausalLM", "gemma4", **SIZES)
    hf = write_headers(tmp_path / "hf", config, trunk("model.", 2, "post_per_layer_input_norm"))
    result = run("mappings", "new", hf)
    assert result.code == 0
    assert "# not placed: model.layers.{i}.post_per_layer_input_norm.weight [8] BF16 x2" in result.out
    assert "[arguments] is not drafted; that of" in result.out


def test_what_cannot_be_drafted(run: Run, tmp_path: Path) -> None:
    config = base("OddForCausalLM", "odd") | {"num_hidden_layers": None}
    hf = write_headers(tmp_path / "hf", config, trunk())
    (tmp_path / "there.toml").touch()
    cases = [
        ([hf], 5, "'num_hidden_layers' is None, no number of layers"),
        ([hf, "-o", tmp_path / "there.toml"], 2, "is there already"),
        ([hf, "-o", tmp_path / "gone" / "x.toml"], 11, "the folder for this file does not exist"),
        ([tmp_path / "gone"], 2, "does not exist"),
    ]
    for arguments, code, what in cases:
        result = run("mappings", "new", *arguments)
        assert (result.code, result.out) == (code, "")
        assert what in result.err
    strange = write_headers(tmp_path / "strange", base("OddForCausalLM", "odd"), {"a.b": (2,)})
    result = run("mappings", "new", strange)
    assert result.code == 0
    assert "# not placed: a.b [2] BF16 x1" in result.out
    assert "0 of 1 tensors placed" in result.err


# MTP's tensors in each layout: Qwen's own projection and norms, layers behind the trunk's, several of them
MTP = {"Qwen3.5 with vision": 15, "Qwen3-Next": 29, "K-EXAONE": 15, "GLM-4.7-Flash": 32, "Ling 2.0": 27, "MiMo": 32}


@pytest.mark.parametrize("name", MTP)
def test_all_mtp_tensors_are_counted_and_no_other(name: str, run: Run, tmp_path: Path) -> None:
    """Counted by hand: the tensors that the case adds behind those of its trunk."""
    case = CASES[name]
    config, trunk = case.config(), case.trunk(case.config())
    assert case.mtp is not None
    added = {name for depth in range(case.depths) for name in case.mtp(config, trunk, depth)}
    assert len(added) == MTP[name]
    hf = write_case(name, tmp_path / "hf")
    nbytes = sum(len(data) for tensor, (_, _, data) in read_safetensors(hf).items() if tensor in added)
    expected = f"present {case.depths}; {len(added)} tensors, {nbytes:,} bytes"
    assert run("inspect", hf).last_line.endswith(expected)
    edit_json(hf / "config.json", lambda table: table.update(architectures=["FooBarForCausalLM"], model_type="foobar"))
    assert run("mappings", "new", hf).last_line.endswith(expected)
    assert run("inspect", hf).last_line.endswith(expected)


@pytest.mark.parametrize("name", ["Qwen3.5 with vision", "Qwen3-Next", "Ling 2.0"])
def test_a_draft_converts_there_and_back(name: str, run: Run, tmp_path: Path) -> None:
    """A nested config, a vision tower, one projection for all MTP layers, codecs: under a name that nobody knows."""
    hf = write_case(name, tmp_path / "hf")
    edit_json(hf / "config.json", lambda table: table.update(architectures=["FooBarForCausalLM"], model_type="foobar"))
    draft = tmp_path / "draft.toml"
    drafted = run("mappings", "new", hf, "-o", draft)
    assert drafted.code == 0, drafted.err
    assert "0 name patterns not; its rows are a bijection" in drafted.out
    table = tomllib.loads(draft.read_text())
    codecs = {row["hf"]: row["codec"] for rows in table["rows"].values() for row in rows if "codec" in row}
    assert codecs == ({"linear_attn.norm.weight": "minus_one"} if "Qwen" in name else {})
    if "vision" in name:
        assert (table["text"], table["passthrough"]) == ("text_config", ["model.visual."])
        assert table["mtp"]["count"] == ["text_config.mtp_num_hidden_layers"]
        assert "71 of 92 tensors placed, 21 set aside" in drafted.out
    assert run("mappings", "check", draft, "--config", hf / "config.json").code == 0
    there = run("hf2mcore", hf, tmp_path / "mc", "--mapping", draft)
    assert there.code == 0, there.err
    back = run("mcore2hf", tmp_path / "mc", tmp_path / "back", "--mapping", draft)
    assert back.code == 0, back.err
    assert read_safetensors(tmp_path / "back") == read_safetensors(hf)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "FooBarForCausalLM"])
def test_what_is_left_of_mtp_without_a_layer(architecture: str, run: Run, tmp_path: Path) -> None:
    """Only the projection and the three norms: no layer is present, and four tensors are."""
    hf = write_case("Qwen3.5", tmp_path / "hf", architectures=[architecture])
    tensors = {n: t for n, t in read_safetensors(hf).items() if not n.startswith("mtp.layers.")}
    write_safetensors(hf / "model.safetensors", tensors)
    left = [data for name, (_, _, data) in tensors.items() if name.startswith("mtp.")]
    assert len(left) == 4
    expected = f"present 0; 4 tensors, {sum(map(len, left)):,} bytes"
    assert run("inspect", hf).last_line.endswith(expected)
    mtp = run("inspect", hf, "--json").json["mtp"]
    assert (mtp["present"], mtp["tensors"], mtp["bytes"]) == (0, 4, sum(map(len, left)))
    assert run("mappings", "new", hf).last_line.endswith(expected)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"num_hidden_layers": 2}, None),
        ({"num_hidden_layers": 2, "text_config": {"num_hidden_layers": 2}}, "text_config"),
        ({"vision_config": {"num_hidden_layers": 2}, "llm_config": {"num_hidden_layers": 2}}, "llm_config"),
        ({"vision_config": {"num_hidden_layers": 2, "vocab_size": 7},
          "decoder": {"num_hidden_layers": 2, "vocab_size": 7}}, "decoder"),
        ({"vision_config": {"num_hidden_layers": 2}}, None),
    ],
)  # fmt: skip
def test_the_table_of_the_language_model(config: dict[str, object], key: str | None) -> None:
    assert text_key(config) == key


TOWERS = {
    "model.visual.blocks.0.attn.qkv.weight": "model.visual.",
    "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight": "vision_tower.",
    "model.multi_modal_projector.linear.weight": "model.multi_modal_projector.",
    "model.embed_vision.norm.weight": "model.embed_vision.",
    "audio_tower.conv1.weight": "audio_tower.",
    "mm_projector.0.weight": "mm_projector.",
    "vision_language_model.layers.0.mlp.up_proj.weight": None,
    "model.layers.0.visual_gate.weight": None,
    "model.division.weight": None,
    "transformer.encoder.layers.0.mlp.up_proj.weight": None,
}


@pytest.mark.parametrize("name", TOWERS)
def test_what_is_another_part_of_the_model(name: str) -> None:
    sites = sites_of({name: TensorSpec(name, "BF16", (2,))}, 2)
    assert [site.hf for site in sites if site.tower] == ([] if TOWERS[name] is None else [TOWERS[name]])
