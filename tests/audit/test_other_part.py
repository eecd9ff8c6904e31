"""Vision beside a language model: counted, kept and compared, and never a fault of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.report.markdown import render as as_markdown
from mtpconvert.audit.report.text import render as as_text
from mtpconvert.audit.report_model import Report
from tests.support.family_tables import write_case
from tests.support.frameworks_convert import to_mcore
from tests.support.json_schema import faults
from tests.support.sabotage import change_tensor, drop
from tests.support.scratch import scratch
from tests.support.tiny import read_safetensors

KEPT = "hf_assets/passthrough"
OLD = "hf_assets/mtpconvert/aside"
BIAS = "model.visual.merger.norm.bias"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "audit-report.schema.json").read_text())


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Path, Path]]:
    with scratch() as root:
        write_case("Qwen3.5 with vision", root / "hf")
        to_mcore(root / "hf", root / "mcore")
        yield root / "hf", root / "mcore"


@pytest.fixture
def pair(made: tuple[Path, Path]) -> Iterator[tuple[Path, Path]]:
    hf, mcore = made
    with scratch() as root:
        yield shutil.copytree(hf, root / hf.name), shutil.copytree(mcore, root / mcore.name)


def is_vision(name: str) -> bool:
    return name.startswith("model.visual.")


def codes(report: Report) -> list[tuple[str, str | None]]:
    return [(found.code, found.tensor) for found in report.failing("warning")]


def test_all_kept(pair: tuple[Path, Path]) -> None:
    vision = {name: tensor for name, tensor in read_safetensors(pair[0]).items() if is_vision(name)}
    nbytes = sum(len(content) for _, _, content in vision.values())
    for left, right, tensors in ((*pair, 71), (*pair[::-1], 74)):
        report = audit(left, right)
        assert codes(report) == []
        (note,) = [found for found in report.findings if found.code == "other-part"]
        assert note.message.startswith("21 tensors (")
        assert note.message.endswith(f"all are kept in {KEPT}, byte for byte")
        document = report.as_json()
        assert faults(document, SCHEMA, SCHEMA) == []
        assert document["checked"]["passthrough"] == {"tensors": len(vision), "bytes": nbytes}
        last = as_text(report, "error").splitlines()[-1]
        assert last.startswith(f"PASS  {tensors} tensors compared, every byte, ")
        assert "; beside them 21 of another part of the model, as kept for the way back, " in last
        assert " Beside them 21 of another part of the model" in as_markdown(report, "error")


def test_headers_and_training(pair: tuple[Path, Path]) -> None:
    """Names, shapes and dtypes only; and nothing beside where no side is Megatron's."""
    change_tensor(BIAS, lambda values: values ^ 1)(pair[1] / KEPT)
    report = audit(*pair, level="headers")
    assert (codes(report), report.passthrough) == ([], {"tensors": 21, "bytes": 0})
    assert any(found.message.endswith(f"all are kept in {KEPT}, bytes not read") for found in report.findings)
    drop(lambda name: name == BIAS)(pair[1] / KEPT)
    report = audit(*pair, level="headers")
    assert (codes(report), report.passthrough["tensors"]) == ([("kept-tensors", BIAS)], 20)
    assert audit(pair[0], pair[0]).passthrough == {"tensors": 0, "bytes": 0}


def test_one_changed_and_one_lost(pair: tuple[Path, Path]) -> None:
    change_tensor(BIAS, lambda values: values ^ 1)(pair[1] / KEPT)
    (fault,) = [found for found in audit(*pair).findings if found.code == "kept-tensors"]
    assert (fault.tensor, "with other bytes" in fault.message) == (BIAS, True)
    drop(lambda name: name == BIAS)(pair[1] / KEPT)
    (fault,) = [found for found in audit(*pair).findings if found.code == "kept-tensors"]
    assert (fault.tensor, "not among the tensors kept" in fault.message) == (BIAS, True)


def test_kept_where_earlier_conversions_put_them(pair: tuple[Path, Path]) -> None:
    (pair[1] / KEPT).rename(pair[1] / OLD)
    report = audit(*pair)
    assert (codes(report), report.passthrough["tensors"]) == ([], 21)
    assert any(found.message.endswith(f"all are kept in {OLD}, byte for byte") for found in report.findings)
    change_tensor(BIAS, lambda values: values ^ 1)(pair[1] / OLD)
    assert codes(audit(*pair)) == [("kept-tensors", BIAS)]


def test_none_kept(pair: tuple[Path, Path]) -> None:
    """As when the Megatron checkpoint was saved by training: said, and no fault."""
    shutil.rmtree(pair[1] / KEPT)
    report = audit(*pair)
    assert (report.verdict(), report.passthrough["tensors"]) == ("pass", 0)
    assert any(found.message.endswith(f"none are kept in {KEPT}") for found in report.findings)


def test_lost_on_the_way_back(pair: tuple[Path, Path]) -> None:
    """One tensor, all of them, and all of them where the Megatron side keeps none either."""
    hf, mcore = pair
    drop(lambda name: name == BIAS)(hf)
    assert codes(audit(mcore, hf)) == [("tensor-missing", BIAS)]
    drop(is_vision)(hf)
    (fault,) = audit(mcore, hf).failing("warning")
    assert (fault.code, fault.side, fault.detail["count"]) == ("other-part-missing", "right", 21)
    assert (
        "config.json has a vision_config, and none of its tensors is there: the left side keeps 21 (" in fault.message
    )
    assert [found.code for found in audit(mcore, hf, level="headers").failing()] == ["other-part-missing"]
    shutil.rmtree(mcore / KEPT)
    report = audit(mcore, hf)
    assert codes(report) == []
    assert any("neither side has a tensor of it" in found.message for found in report.findings)


def test_lost_between_two_of_hugging_face(made: tuple[Path, Path], pair: tuple[Path, Path]) -> None:
    drop(is_vision)(pair[0])
    missing = [found.tensor for found in audit(made[0], pair[0]).failing() if found.code == "tensor-missing"]
    assert (len(missing), all(is_vision(name or "") for name in missing)) == (21, True)


def test_a_config_of_the_language_model_alone(pair: tuple[Path, Path]) -> None:
    """Qwen3_5ForCausalLM's names and config: nobody misses vision."""
    write_case("Qwen3.5", pair[0].parent / "text")
    report = audit(pair[1], pair[0].parent / "text", level="headers")
    assert not [found for found in report.findings if found.code.startswith("other-part")]
