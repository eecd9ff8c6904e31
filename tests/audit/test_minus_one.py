"""Norms kept as w on one side and as w - 1 on the other: Qwen3-Next's delta nets, and models trained with
``apply_layernorm_1p``. torch's own arithmetic is the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtpconvert.audit.api import audit
from mtpconvert.audit.findings import Finding
from mtpconvert.audit.less_one import plus
from mtpconvert.audit.report_model import Report
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from tests.support.family_tables import write_case
from tests.support.handmade import megatron_args, megatron_arrays, read_arrays, write_torch_dist
from tests.support.mcore_edit import Tensors, resaved
from tests.support.sabotage import Tensors as Stored
from tests.support.sabotage import edit_shard
from tests.support.scratch import scratch
from tests.support.tiny import write_tiny

Change = Callable[[torch.Tensor], torch.Tensor]
NORM, OUT = "model.layers.1.linear_attn.norm.weight", "decoder.layers.1.self_attention.out_norm.weight"
KEPT, TWICE = "kept as it is where one should be {}", "one {} twice"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def less(w: torch.Tensor) -> torch.Tensor:
    return (w.float() - 1).to(w.dtype)


def more(m: torch.Tensor) -> torch.Tensor:
    return (1 + m.float()).to(m.dtype)


def next_up(x: torch.Tensor) -> torch.Tensor:
    """The third element by one unit in its last place."""
    bits = x.clone().view(torch.int16)
    bits[2] += 1
    return bits.view(x.dtype)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.fixture(scope="module")
def folders() -> Iterator[tuple[Path, Path]]:
    """Qwen3-Next and its Megatron side, whose delta nets' norms are torch's."""
    with scratch() as root:
        in_bfloat16(write_case("Qwen3-Next", root / "hf"))
        weights = torch.tensor([0.75, 1.0, 1.0078125, 0.0123, -0.5, 3.140625, 1e-30, 200.0]).bfloat16()
        edit_hf(root / "hf", lambda old: weights[: len(old)].clone())
        hf2mcore(root / "hf", root / "converted", ToMcore(), Callbacks(gate=None))
        edit_megatron(root / "converted" / "release", root / "mc", lambda old: less(weights[: len(old)]))
        yield root / "hf", root / "mc"


def in_bfloat16(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")

    def edit(tensors: Stored) -> None:
        for name, (_, shape, data) in tensors.items():
            tensors[name] = "BF16", shape, np.frombuffer(data, "<u4").astype("<u2").tobytes()

    edit_shard(file, edit)


def edit_hf(folder: Path, change: Change) -> None:
    (file,) = folder.glob("*.safetensors")

    def edit(tensors: Stored) -> None:
        dtype, shape, data = tensors[NORM]
        new = change(torch.frombuffer(bytearray(data), dtype=torch.bfloat16)).contiguous()
        tensors[NORM] = dtype, shape, new.view(torch.int16).numpy().tobytes()

    edit_shard(file, edit)


def edit_megatron(source: Path, target: Path, change: Change) -> Path:
    def edit(tensors: Tensors) -> None:
        tensors[OUT] = change(tensors[OUT]).contiguous()

    return resaved(source, target, edit)


def failing(report: Report) -> list[Finding]:
    return report.failing("warning")


def note(report: Report) -> Finding:
    (found,) = [finding for finding in report.findings if finding.code == "norm-less-one"]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [-1.0, 1.0])
def test_adding_and_subtracting_round_as_torch_does(dtype: str, step: float) -> None:
    """Every number of the 16-bit dtypes; of float32 as many, everywhere."""
    kind = DTYPES[dtype]
    bits = torch.arange(-(2**15), 2**15)
    words = (bits * 65521).to(torch.int32) if dtype == "F32" else bits.to(torch.int16)
    numbers = words.view(kind)
    words, numbers = words[~numbers.isnan()], numbers[~numbers.isnan()]
    expected = (numbers.float() + step).to(kind).view(words.dtype).numpy()
    unsigned = {2: "<u2", 4: "<u4"}[expected.itemsize]
    assert np.array_equal(plus(words.numpy().view(unsigned), dtype, step), expected.view(unsigned))


def test_a_right_conversion_passes_and_says_what_rounding_lost(folders: tuple[Path, Path]) -> None:
    hf, mc = folders
    report = audit(hf, mc)
    assert failing(report) == []
    weights = torch.from_numpy(read_arrays(hf)[NORM].view(np.int16)).view(torch.bfloat16)
    lost = int((more(less(weights)) != weights).sum())
    assert lost > 0
    assert note(report).detail["count"] >= lost
    assert audit(hf, mc, level="headers").verdict() == "pass"


def test_back_an_original_a_sum_and_a_mixture_of_both_pass(folders: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mc = folders
    assert failing(audit(mc, hf)) == []
    shutil.copytree(hf, tmp_path / "sum")
    edit_hf(tmp_path / "sum", lambda w: more(less(w)))
    assert failing(audit(mc, tmp_path / "sum")) == []
    shutil.copytree(hf, tmp_path / "both")
    edit_hf(tmp_path / "both", lambda w: torch.cat([w[:4], more(less(w[4:]))]))
    assert failing(audit(mc, tmp_path / "both")) == []


def test_from_w_no_sum_will_do(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """m of more precision than w has: 1 + m is w, and m is not what w less one rounds to."""
    hf, mc = folders
    wrong = edit_megatron(mc, tmp_path / "mc", lambda m: torch.where(m == 0, torch.full_like(m, 2.0**-12), m))
    assert [(finding.code, finding.tensor) for finding in failing(audit(hf, wrong))] == [("bytes-differ", OUT)]
    assert failing(audit(wrong, hf)) == []


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (more, KEPT.format("subtracted")),
        (less, TWICE.format("subtracted")),
        (lambda m: more(more(m)), "one added where one should be subtracted"),
        (next_up, "one bit flipped"),
    ],
    ids=["kept", "twice", "added", "one ulp"],
)
def test_faults_on_the_way_to_megatron(change: Change, cause: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mc = folders
    whole = torch.tensor([0.75, 1.0, 1.5, 0.5, -0.5, 3.0, 2.0, 1.25]).bfloat16()  # where sums are exact
    shutil.copytree(hf, tmp_path / "hf")
    edit_hf(tmp_path / "hf", lambda w: whole[: len(w)].clone())
    wrong = edit_megatron(mc, tmp_path / "mc", lambda m: change(less(whole[: len(m)])))
    (found,) = failing(audit(tmp_path / "hf", wrong))
    assert (found.code, found.tensor, found.detail["cause"]) == ("bytes-differ", OUT, cause)
    assert "gdn.norm.minus_one of trunk layer 1" in found.message
    assert "once one is subtracted" in found.message
    if cause == "one bit flipped":
        assert "1 of 8 elements differ" in found.message
        assert "the first at element 2 " in found.message


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (less, KEPT.format("added")),
        (more, TWICE.format("added")),
        (lambda w: less(less(w)), "one subtracted where one should be added"),
        (next_up, None),
    ],
    ids=["kept", "twice", "subtracted", "one ulp"],
)
def test_faults_on_the_way_back(change: Change, cause: str | None, folders: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mc = folders
    whole = torch.tensor([0.75, 1.0, 1.5, 0.5, -0.5, 3.0, 2.0, 1.25]).bfloat16()
    right = edit_megatron(mc, tmp_path / "mc", lambda m: less(whole[: len(m)]))
    shutil.copytree(hf, tmp_path / "hf")
    edit_hf(tmp_path / "hf", lambda w: change(whole[: len(w)]))
    (found,) = failing(audit(right, tmp_path / "hf"))
    assert (found.code, found.tensor) == ("bytes-differ", NORM)
    assert cause is None or found.detail["cause"] == cause


def with_arguments(source: Path, target: Path, **changed: Any) -> Path:
    shutil.copytree(source, target)
    common = torch.load(target / "common.pt", weights_only=False)
    vars(common["args"]).update(changed)
    torch.save(common, target / "common.pt")
    return target


def test_a_lost_argument_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Without it Megatron multiplies by the w - 1 that every norm holds."""
    hf, mc = folders
    lost = with_arguments(mc, tmp_path / "mc", apply_layernorm_1p=False, layernorm_zero_centered_gamma=False)
    for left, right, side in ((hf, lost, "right"), (lost, hf, "left")):
        found = failing(audit(left, right))
        (named,) = [finding for finding in found if finding.code == "argument-mismatch"]
        assert (named.side, named.detail["key"]) == (side, "apply_layernorm_1p")
        differing = {finding.tensor for finding in found if finding.code == "bytes-differ"}
        kept = KEPT.format("added" if side == "right" else "subtracted")
        causes = {finding.tensor: finding.detail.get("cause") for finding in found}
        final = "decoder.final_layernorm.weight" if side == "right" else "model.norm.weight"
        assert (final in differing, causes[final]) == (True, kept)
        assert (OUT if side == "right" else NORM) in differing


@pytest.mark.parametrize("subtracted", [True, False])
def test_an_argument_that_the_model_does_not_have(subtracted: bool, tmp_path: Path) -> None:
    """Llama with ``apply_layernorm_1p``: right if every norm is kept less one, else a fault of the argument."""
    write_tiny("llama", tmp_path / "hf", fill="normal")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    arrays = megatron_arrays(read_arrays(tmp_path / "hf"), config, rows=128)
    norms = [name for name in arrays if "norm" in name]
    assert len(norms) > 2
    for name in norms if subtracted else ():
        numbers = torch.from_numpy(arrays[name].view(np.int16)).view(torch.bfloat16)
        arrays[name] = less(numbers).view(torch.int16).numpy().view("<u2")
    write_torch_dist(tmp_path / "mc", arrays, megatron_args(config, 128) | {"apply_layernorm_1p": True})
    report = audit(tmp_path / "hf", tmp_path / "mc")
    if subtracted:
        assert failing(report) == []
        assert f"{len(norms)} norms" in note(report).message
    else:
        assert {(f.code, f.tensor, f.detail.get("key")) for f in failing(report)} == {
            ("argument-mismatch", None, "apply_layernorm_1p"),
            *(("bytes-differ", name, None) for name in norms),
        }
