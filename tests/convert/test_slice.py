"""``mtpconvert slice``: which values go into a slice, worked out by hand; refusals; the size of DeepSeek-V3."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconvert.cli.main import call
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.slice import slice_checkpoint
from mtpconvert.convert.slice_config import sliced_config
from mtpconvert.convert.slice_plan import SliceOptions, plan_slice
from mtpconvert.errors import MtpLostError, UnmappedTensorError, UsageError
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.tensors import Inventory, TensorSpec
from tests.support.tiny import read_safetensors, sha256_tree, write_tiny
from tests.support.tiny_families import CONFIGS, units

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"num_hidden_layers": 5, "n_routed_experts": 8, "num_experts_per_tok": 3}


def bits(tensor: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    dtype, shape, data = tensor
    return np.frombuffer(data, "<u2" if dtype == "BF16" else "<u4").reshape(shape)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny("deepseek_v3", tmp_path / "model", mtp_layers=2, config_overrides=MODEL)


@pytest.fixture
def small(model: Path, tmp_path: Path) -> Path:
    """Two layers (a dense one and one with experts) and three experts of ``model``."""
    slice_checkpoint(model, tmp_path / "small", SliceOptions(layers=2, experts=3), Callbacks())
    return tmp_path / "small"


def test_every_value_is_the_models_own(model: Path, small: Path) -> None:
    before, after = read_safetensors(model), read_safetensors(small)
    for name, tensor in after.items():
        old = name.replace("layers.2.", "layers.5.").replace("layers.3.", "layers.6.")  # the two MTP layers
        rows = 3 if ".mlp.gate." in name else before[old][1][0]
        assert tensor[0] == before[old][0]
        np.testing.assert_array_equal(bits(tensor), bits(before[old])[:rows])


def test_exactly_the_tensors_of_such_a_model_are_there(small: Path) -> None:
    config = CONFIGS["deepseek_v3"] | {"num_hidden_layers": 2, "n_routed_experts": 3}
    expected = {name: shape for unit in units(config, 2, copies=True) for name, shape in unit.items()}
    assert {name: shape for name, (_, shape, _) in read_safetensors(small).items()} == expected


def test_config_says_what_is_there_and_nothing_else_changes(model: Path, small: Path) -> None:
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, small))
    changed = {key: value for key, value in after.items() if before[key] != value}
    # 2 groups do not divide 3 experts; 3 of 3 experts stay active
    assert changed == {"num_hidden_layers": 2, "n_routed_experts": 3, "n_group": 1}
    assert list(before) == list(after)
    side = {
        name: digest for name, digest in sha256_tree(model).items() if "model" not in name and name != "config.json"
    }
    assert side.items() <= sha256_tree(small).items()


def test_a_slice_converts_and_passes_its_audit(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["hf2mcore", str(small), str(tmp_path / "mcore"), "--audit", "bits"]) == 0
    assert call(["audit", str(small), str(tmp_path / "mcore")]) == 0
    assert "declared 2" in capsys.readouterr().out


def test_transformers_loads_it_whole_and_runs_it(tmp_path: Path) -> None:
    import torch

    from tests.support.frameworks_hf import hf_model, hf_mtp_model

    model = write_tiny("deepseek_v3", tmp_path / "model", fill="normal", config_overrides=MODEL)
    slice_checkpoint(model, tmp_path / "small", SliceOptions(layers=2, experts=4), Callbacks())
    main = hf_model(tmp_path / "small")
    assert main(torch.arange(8)[None]).logits.isfinite().all()
    assert len(hf_mtp_model(main).layers) == 1


def test_all_layers_and_experts_are_the_model_itself(model: Path, tmp_path: Path) -> None:
    plan = slice_checkpoint(model, tmp_path / "same", SliceOptions(layers=5), Callbacks())
    assert (plan.left, plan.config_changes) == (0, {})
    assert read_safetensors(tmp_path / "same") == read_safetensors(model)


def test_shards_and_their_index(model: Path, tmp_path: Path) -> None:
    slice_checkpoint(model, tmp_path / "small", SliceOptions(2, 3, max_shard_size="20KB"), Callbacks())
    files = sorted(path.name for path in (tmp_path / "small").glob("*.safetensors"))
    index = json.loads((tmp_path / "small/model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files


def test_nothing_stands_under_the_final_name_when_it_fails(model: Path, tmp_path: Path) -> None:
    def stop(_count: int, name: str) -> None:
        if "layers.3" in name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slice_checkpoint(model, tmp_path / "small", SliceOptions(2, 3), Callbacks(start=lambda _: stop))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("layers", "experts", "said"),
    [(6, None, "has 5 layers"), (2, 9, "8 routed experts")],
)
def test_more_than_there_is_is_refused(
    model: Path, layers: int, experts: int | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        slice_checkpoint(model, tmp_path / "small", SliceOptions(layers, experts), Callbacks())


def test_a_slice_is_not_written_into_its_model(model: Path) -> None:
    """It would be a side file of the model from then on."""
    with pytest.raises(UsageError, match="the target is inside the source"):
        slice_checkpoint(model, model / "small", SliceOptions(1), Callbacks())


def test_a_dense_model_has_no_experts_to_cut(tmp_path: Path) -> None:
    dense = write_tiny("qwen3", tmp_path / "dense")
    with pytest.raises(UsageError, match="no routed experts"):
        slice_checkpoint(dense, tmp_path / "small", SliceOptions(2, 2), Callbacks())
    plan = slice_checkpoint(dense, tmp_path / "small", SliceOptions(2), Callbacks())
    assert plan.config_changes == {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


def inventory(config: dict[str, Any], mtp_layers: int) -> Inventory:
    return {
        name: TensorSpec(name, shape, "F32" if name.endswith("correction_bias") else "BF16")
        for unit in units(config, mtp_layers, copies=True)
        for name, shape in unit.items()
    }


def test_a_missing_mtp_tensor_and_an_unknown_one_are_refused() -> None:
    config = CONFIGS["deepseek_v3"]
    mapping, options = mapping_for(config), SliceOptions(2, 2)
    whole = inventory(config, 1)
    lost = {name: spec for name, spec in whole.items() if name != "model.layers.3.eh_proj.weight"}
    with pytest.raises(MtpLostError, match="eh_proj"):
        plan_slice(mapping, config, lost, options)
    dropped = {name: spec for name, spec in whole.items() if ".layers.3." not in name}
    with pytest.raises(MtpLostError, match="declares 1"):
        plan_slice(mapping, config, dropped, options)
    stranger = whole | {"model.layers.1.self_attn.sinks": TensorSpec("model.layers.1.self_attn.sinks", (4,), "BF16")}
    with pytest.raises(UnmappedTensorError, match="sinks"):
        plan_slice(mapping, config, stranger, options)


def test_block_scales_go_with_their_weights() -> None:
    config = CONFIGS["deepseek_v3"]
    source = inventory(config, 1)
    for name, spec in list(source.items()):
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in name:
            source[name] = replace(spec, dtype="F8_E4M3")
            source[f"{name}_scale_inv"] = TensorSpec(f"{name}_scale_inv", (1, 1), "F32")
    plan = plan_slice(mapping_for(config), config, source, SliceOptions(2, 2))
    scaled = [name for name in plan.target if name.endswith("_scale_inv")]
    # dense layer: 5 of attention, 3 of the MLP; MoE and MTP layer: 5, 3 of the shared expert, 3 of each of 2 experts
    assert len(scaled) == 8 + 2 * (5 + 3 + 6)
    assert plan.parts["model.layers.2.mlp.experts.1.up_proj.weight_scale_inv"].tensor == (
        "model.layers.3.mlp.experts.1.up_proj.weight_scale_inv"
    )


def test_full_size_deepseek_v3_is_planned() -> None:
    """By hand: a layer's MLA and norms 8 + 1, dense MLP 3, experts 16 x 3, shared 3, router 2, MTP's own 4 + 2."""
    config = json.loads((ROOT / "mappings/configs/DeepseekV3ForCausalLM.full.json").read_text())
    source = inventory(config, 1)
    assert len(source) == 46_183
    plan = plan_slice(mapping_for(config), config, source, SliceOptions(layers=4, experts=16))
    assert len(plan.target) == 3 + 3 * (9 + 3) + (9 + 48 + 3 + 2) + (9 + 48 + 3 + 2 + 6)
    assert plan.config_changes == {"num_hidden_layers": 4, "n_routed_experts": 16}  # 8 groups of 2; 8 of 16 active
    assert plan.parts["model.layers.4.eh_proj.weight"].tensor == "model.layers.61.eh_proj.weight"
    assert plan.parts["model.layers.3.mlp.gate.weight"].box == ((0, 16), (0, 7168))
    assert plan.target["model.layers.4.mlp.gate.e_score_correction_bias"].shape == (16,)
    assert (plan.mtp.declared, plan.mtp.present, plan.mtp.written) == (1, 1, 1)


def test_lists_with_an_entry_for_each_layer_are_cut() -> None:
    config = {
        "num_hidden_layers": 4,
        "layer_types": ["a", "b", "c", "d"],
        "padded": ["a", "b", "c", "d", "mtp"],
        "mlp_only_layers": [0, 3],
        "eos_token_id": [1, 2, 3, 4],
        "rope": {"factors": [1, 2, 3, 4]},
    }
    assert sliced_config(config, layers=2, experts=None, expert_key=None, mtp_layers=1) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "padded": ["a", "b", "mtp"],
        "mlp_only_layers": [0],
    }


def test_the_command_says_what_it_would_write(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["slice", str(model), str(tmp_path / "small"), "--layers", "2", "--experts", "3"]
    assert call([*arguments, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert not planned["written"] and not (tmp_path / "small").exists()
    assert call(arguments) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("MTP layers: declared 2")
    assert planned["tensors"] == len(read_safetensors(tmp_path / "small"))
