"""The audit at the end of a conversion: what an option asked for is accepted by name, anything beside it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mtpconvert.cli.gate import ALL_ROWS, DROP_MTP, USE_TRUNK, gate
from mtpconvert.errors import AuditFailedError
from tests.support.command_line import Run
from tests.support.sabotage import change_tensor, drop, edit_json, edit_shard, home_of, reindex
from tests.support.tiny import read_safetensors, write_tiny

BITS = ("--audit", "bits")
HEAD = "model.layers.3.shared_head.head.weight"


@pytest.mark.parametrize("layers", [1, 3])
def test_mtp_dropped_by_request_passes_in_both_directions(layers: int, run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", mtp_layers=layers)
    there = run("hf2mcore", source, memory / "dropped", "--mtp", "drop", *BITS)
    assert there.code == 0, there.err
    # 19 Megatron tensors and one line for each layer; one for mtp_num_layers
    assert f"accepted: {20 * layers + 1} findings: DROPPED BY REQUEST (--mtp drop)" in there.out
    assert run("hf2mcore", source, memory / "mcore", *BITS).code == 0
    back = run("mcore2hf", memory / "mcore", memory / "back", "--mtp", "drop", *BITS, "--json")
    assert back.code == 0, back.err
    assert back.json["audit"] == "pass"
    assert list(back.json["accepted"]) == ["DROPPED BY REQUEST (--mtp drop)"]


def test_broken_or_unknown_mtp_can_be_dropped(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    drop(lambda name: name == "model.layers.3.enorm.weight")(source)
    assert run("hf2mcore", source, memory / "a", *BITS).code == 9
    assert run("hf2mcore", source, memory / "a", "--mtp", "drop", *BITS).code == 0
    other = write_tiny("qwen3", memory / "qwen3")
    norm = read_safetensors(other)["model.norm.weight"]
    extra = dict.fromkeys(("mtp.fc.weight", "model.layers.3.enorm.weight"), norm)
    edit_shard(home_of(other, "model.norm.weight"), lambda tensors: tensors.update(extra))
    reindex(other)
    done = run("hf2mcore", other, memory / "b", "--mtp", "drop", *BITS)
    assert done.code == 0, done.err


def test_a_null_count_passes_where_the_tensors_decide_it(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    edit_json(source / "config.json", lambda table: table.update(num_nextn_predict_layers=None))
    done = run("hf2mcore", source, memory / "mcore", *BITS)
    assert done.code == 0, done.err
    assert run("audit", source, memory / "mcore").code == 0


def test_copies_and_rows_by_request(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    change_tensor(HEAD, lambda x: x[::-1])(source)
    done = run("hf2mcore", source, memory / "mcore", "--mtp-copies", "use-trunk", *BITS)
    assert done.code == 0, done.err
    assert "accepted: 1 finding: the trunk's values by request" in done.out
    rows = run("mcore2hf", memory / "mcore", memory / "back", "--vocab-size", "from-megatron", *BITS)
    assert rows.code == 0, rows.err
    assert "accepted: 1 finding: all of Megatron's rows by request" in rows.out
    assert json.loads((memory / "back" / "config.json").read_text())["vocab_size"] == 128


def test_requests_accept_nothing_else(memory: Path) -> None:
    """A trunk tensor lost with the MTP, another number, a trunk head that its MTP copy shows to be wrong."""
    source = write_tiny("deepseek_v3", memory / "hf")
    check = gate("bits", [DROP_MTP, USE_TRUNK, ALL_ROWS])
    assert check is not None
    lost = shutil.copytree(source, memory / "lost")
    drop(lambda name: name.startswith("model.layers.3.") or name == "model.norm.weight")(lost)
    edit_json(lost / "config.json", lambda table: table.update(num_nextn_predict_layers=0))
    changed = shutil.copytree(source, memory / "changed")
    change_tensor("lm_head.weight", lambda x: x[::-1])(changed)
    part = shutil.copytree(source, memory / "part")
    change_tensor("model.layers.3.eh_proj.weight", lambda x: x[::-1])(part)
    for result, words in ((lost, "model.norm.weight"), (changed, "lm_head.weight"), (part, "eh_proj.weight")):
        with pytest.raises(AuditFailedError) as error:
            check(source, result)
        assert words in str(error.value)
