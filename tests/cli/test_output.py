"""What commands say when all is well: the MTP line last, notes on stderr, one JSON document, tracebacks by request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.convert import to_mcore as to_mcore_module
from tests.support.command_line import Run
from tests.support.mcore_edit import resaved
from tests.support.processes import command
from tests.support.sabotage import edit_json
from tests.support.tiny import read_safetensors, write_tiny

MTP_KEYS = {"key", "declared", "present", "written", "tensors", "bytes"}


@pytest.fixture
def source(memory: Path) -> Path:
    return write_tiny("deepseek_v3", memory / "hf", mtp_layers=2)


def mtp_numbers(source: Path, *, copies: bool) -> tuple[int, int]:
    """Tensors and bytes of the MTP layers of a tiny DeepSeek-V3 with two of them, counted from the files."""
    left_out = () if copies else ("embed_tokens.weight", "head.weight")
    found = [
        len(data)
        for name, (_, _, data) in read_safetensors(source).items()
        if re.match(r"model\.layers\.[34]\.", name) and not name.endswith(left_out)
    ]
    return len(found), sum(found)


def test_the_mtp_line_is_the_last_line_of_every_command(source: Path, run: Run, memory: Path) -> None:
    mcore_tensors = 2 * 19  # per layer 8 of MLA, 7 of MoE, enorm, hnorm, eh_proj, final_layernorm
    _, nbytes = mtp_numbers(source, copies=False)
    megatron = f"declared 2 (num_nextn_predict_layers), present 2, written 2; {mcore_tensors} tensors, {nbytes:,} bytes"
    hf_tensors, hf_bytes = mtp_numbers(source, copies=True)
    hf = f"declared 2 (num_nextn_predict_layers), present 2, written 2; {hf_tensors} tensors, {hf_bytes:,} bytes"
    lines = {
        ("hf2mcore", source, memory / "mcore"): megatron,
        ("plan", source): megatron,
        ("roundtrip", source): megatron,
        ("mcore2hf", memory / "mcore", memory / "back"): hf,
        ("plan", memory / "mcore"): hf,
    }
    for words, line in lines.items():
        result = run(*words)
        assert result.code == 0, result.err
        assert result.last_line == f"MTP layers: {line}"
    for words in (("inspect", source), ("inspect", memory / "mcore")):
        assert run(*words).last_line.startswith("MTP layers: declared 2 (")


def test_a_family_without_mtp_says_so_too(run: Run, memory: Path) -> None:
    result = run("hf2mcore", write_tiny("qwen3", memory / "hf"), memory / "mcore")
    assert result.last_line == "MTP layers: declared nothing, present 0, written 0; 0 tensors, 0 bytes"


def test_flags_to_launch_with_are_printed(source: Path, run: Run, memory: Path) -> None:
    out = run("hf2mcore", source, memory / "mcore").out
    assert "Launch Megatron with these flags" in out
    assert f"--load {memory / 'mcore'}" in out
    assert "--multi-latent-attention" in out
    assert "--finetune" not in out
    out = run("hf2mcore", source, memory / "o ther", "--iteration", "7").out
    assert f"--load '{memory / 'o ther'}' --use-checkpoint-args" in out
    assert "There is no optimizer here: add --finetune, or --no-load-optim --no-load-rng." in out


# ---- JSON


def test_json_of_a_conversion(source: Path, run: Run, memory: Path) -> None:
    result = run("hf2mcore", source, memory / "mcore", "--json")
    document = result.json
    assert (result.code, result.err) == (0, "")
    assert set(document) >= {
        "schema_version", "source", "target", "direction", "architecture", "plan_sha256", "moved", "seconds",
        "launch_flags", "config_changes", "notes", "audit", "mtp",
    }  # fmt: skip
    assert set(document["mtp"]) >= MTP_KEYS
    tensors, nbytes = 38, mtp_numbers(source, copies=False)[1]
    assert document["mtp"] == {
        "key": "num_nextn_predict_layers",
        "declared": 2,
        "present": 2,
        "written": 2,
        "tensors": tensors,
        "bytes": nbytes,
    }
    read = sum(
        len(data)
        for name, (_, _, data) in read_safetensors(source).items()
        if not re.fullmatch(r"model\.layers\.[34]\.(embed_tokens|shared_head\.head)\.weight", name)
    )
    padding = 2 * (128 - 98) * 36 * 2
    assert document["moved"] == {"read": read, "written": read + padding, "zeros": padding}
    assert (document["source"], document["target"]) == (str(source), str(memory / "mcore"))
    assert len([note for note in document["notes"] if "bit-equal copy" in note]) == 4

    document = run("mcore2hf", memory / "mcore", memory / "back", "--mtp", "drop", "--json").json
    assert document["direction"] == "mcore2hf"
    assert document["config_changes"] == {"num_nextn_predict_layers": 0}
    assert document["mtp"]["written"] == 0
    assert any("MTP DROPPED BY REQUEST" in note for note in document["notes"])


def test_json_of_a_plan_is_canonical(source: Path, run: Run, memory: Path) -> None:
    document = run("plan", source, "--json").json
    assert set(document) >= {
        "schema_version", "direction", "architecture", "mapping", "hf", "mcore", "tiles", "fills", "copies", "asides",
        "dropped", "variants", "defaults", "notes", "totals", "mtp", "sha256",
    }  # fmt: skip
    assert document["totals"]["hf_tensors"] == len(read_safetensors(source))
    assert document["mtp"]["declared"] == 2
    assert len(document["copies"]) == 4
    assert run("plan", source, "--json").json == document
    converted = run("hf2mcore", source, memory / "mcore", "--json").json
    assert converted["plan_sha256"] == document["sha256"]
    # a default that only the arguments need is one more note, and no other plan
    edit_json(source / "config.json", lambda table: table.pop("rms_norm_eps"))
    converted = run("hf2mcore", source, memory / "other", "--json").json
    assert "config.json has no rms_norm_eps" in str(converted["notes"])
    assert converted["plan_sha256"] == run("plan", source, "--json").json["sha256"] == document["sha256"]
    assert run("plan", source, "--mtp", "drop", "--json").json["sha256"] != document["sha256"]
    assert re.search(rf"^sha256 {document['sha256']}$", run("plan", source).out, re.MULTILINE)


def test_json_of_a_roundtrip(source: Path, run: Run) -> None:
    document = run("roundtrip", source, "--json").json
    assert set(document) >= {"schema_version", "source", "equal", "groups", "tensors", "bytes", "notes", "mtp"}
    assert document["equal"] is True
    assert document["tensors"] == len(read_safetensors(source)) - 4  # the copies are compared, not carried
    assert set(document["mtp"]) >= MTP_KEYS


@pytest.mark.parametrize("words", [["hf2mcore", "hf", "out"], ["plan", "hf"], ["roundtrip", "hf"]])
def test_json_of_a_refusal(words: list[str], run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(memory)
    edit_json(write_tiny("deepseek_v3", Path("hf")) / "config.json", lambda t: t.update(num_nextn_predict_layers=0))
    result = run(*words, "--json")
    assert result.code == 9
    assert set(result.json) == {"error"}
    assert set(result.json["error"]) == {"kind", "exit_code", "what", "where", "next_step"}
    assert result.json["error"]["kind"] == "MtpLostError"
    assert result.json["error"]["exit_code"] == 9
    assert "num_nextn_predict_layers" in result.json["error"]["what"]


@pytest.mark.parametrize(
    ("words", "kind", "code", "text"),
    [
        (["hf2mcore", "--json"], "UsageError", 2, "Missing argument 'SRC'"),
        (["hf2mcore", "a", "b", "--spec", "fast", "--json"], "UsageError", 2, "'fast' is not one of"),
        (["audit", "a", "b", "--format", "json"], "CheckpointError", 6, "no such directory"),
        (["audit", "a", "b", "--format=json"], "CheckpointError", 6, "no such directory"),
        (["audit", "a", "--format", "json"], "UsageError", 2, "Missing argument 'RIGHT'"),
    ],
)
def test_json_of_every_kind_of_error(words: list[str], kind: str, code: int, text: str, run: Run) -> None:
    result = run(*words)
    error = result.json["error"]
    assert (result.code, error["kind"], error["exit_code"]) == (code, kind, code)
    assert text in error["what"] and error["next_step"] and text in result.err


def test_json_through_a_pipe_is_alone_on_stdout(source: Path, memory: Path) -> None:
    code, out, err = command("hf2mcore", source, memory / "mcore", "--audit", "none", "--json")
    assert code == 0
    assert json.loads(out)["mtp"]["present"] == 2
    assert err == ""  # no progress where stderr is no terminal


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": None}, None),
        ({"quantization_config": "fp8"}, "quantisation: fp8"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation: awq"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "architecture not recorded"),
        ({"architectures": [1]}, "architecture not recorded"),
    ],
)
def test_inspect_takes_odd_configs(changes: dict[str, Any], said: str | None, source: Path, run: Run) -> None:
    edit_json(source / "config.json", lambda table: table.update(changes))
    result = run("inspect", source)
    assert result.code == 0, result.err
    assert said in result.out if said else "quantisation" not in result.out


# ---- notes


def test_padding_rows_that_are_not_zero_are_said_and_left_out(run: Run, memory: Path) -> None:
    """After training they seldom are zero: field reports, class L."""
    source = write_tiny("qwen3", memory / "hf")
    assert run("hf2mcore", source, memory / "mcore").code == 0

    def change(tensors: dict[str, Any]) -> None:
        tensors["embedding.word_embeddings.weight"][100:103] = 1.0
        tensors["output_layer.weight"][127, 35] = -0.0  # a bit that is set, though the number is zero

    trained = resaved(memory / "mcore" / "release", memory / "trained", change)
    result = run("mcore2hf", trained, memory / "back", "--reference", memory / "mcore")
    assert result.code == 0
    for name, rows in (("embedding.word_embeddings.weight", 3), ("output_layer.weight", 1)):
        assert f"note: {name}: {rows} of 30 vocabulary padding rows are not zero" in result.err
    assert read_safetensors(memory / "back") == read_safetensors(source)
    assert "padding rows" not in run("mcore2hf", memory / "mcore", memory / "again").err


def test_defaults_that_stand_in_for_config_keys_are_printed(run: Run, memory: Path) -> None:
    source = write_tiny("llama", memory / "hf")
    edit_json(source / "config.json", lambda table: [table.pop(key) for key in ("head_dim", "tie_word_embeddings")])
    err = run("plan", source).err
    assert "note: config.json has no head_dim: taken as 6 (transformers LlamaConfig" in err
    assert "note: config.json has no tie_word_embeddings: taken as False" in err


def test_without_arguments_in_the_checkpoint_it_is_said_that_they_were_not_checked(run: Run, memory: Path) -> None:
    assert run("hf2mcore", write_tiny("qwen3", memory / "hf"), memory / "mcore").code == 0
    trained = resaved(memory / "mcore" / "release", memory / "trained", lambda _: None, args=False)
    result = run("mcore2hf", trained, memory / "back", "--reference", memory / "hf")
    assert result.code == 0
    assert "carries no Megatron arguments: only names and shapes were checked" in result.err


def test_another_dtype_than_the_references_is_said(run: Run, memory: Path) -> None:
    assert run("hf2mcore", write_tiny("qwen3", memory / "hf", dtype="F32"), memory / "mcore").code == 0
    result = run("mcore2hf", memory / "mcore", memory / "back", "--reference", write_tiny("qwen3", memory / "bf16"))
    assert result.code == 0
    assert "36 tensors are BF16 in the reference, F32 in Megatron: written as Megatron has them" in result.err
    assert read_safetensors(memory / "back") == read_safetensors(memory / "hf")


# ---- faults


def test_tracebacks_only_with_debug(source: Path, run: Run, memory: Path) -> None:
    edit_json(source / "config.json", lambda table: table.update(num_nextn_predict_layers=7))
    assert "Traceback" not in run("hf2mcore", source, memory / "out").err
    result = run("--debug", "hf2mcore", source, memory / "out")
    assert result.code == 9
    assert "Traceback" in result.err
    assert "mtpconvert: error: config declares 7 MTP layers" in result.err


def test_a_fault_of_the_tool_itself_is_one_line_without_debug(
    source: Path, run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_mcore_module, "chunk_boxes", lambda plan: {}["boom"])
    result = run("hf2mcore", source, memory / "out")
    assert result.code == 70
    assert "mtpconvert: internal error: KeyError: 'boom'" in result.err
    assert "Traceback" not in result.err
    error = run("hf2mcore", source, memory / "out", "--json").json["error"]
    assert (error["kind"], error["exit_code"]) == ("InternalError", 70)
    with pytest.raises(KeyError):
        run("--debug", "hf2mcore", source, memory / "out")
    assert [path.name for path in memory.iterdir()] == ["hf"]


def test_plan_writes_nothing_and_reads_headers_only(source: Path, run: Run, memory: Path) -> None:
    """The same plan when every weight is gone: files of the same size, full of holes."""
    document = run("plan", source, "--json").json
    for shard in source.glob("*.safetensors"):
        raw = shard.read_bytes()
        header = 8 + int.from_bytes(raw[:8], "little")
        shard.write_bytes(raw[:header])
        with shard.open("r+b") as file:
            file.truncate(len(raw))
    assert run("plan", source, "--json").json == document
    assert [path.name for path in memory.iterdir()] == ["hf"]
