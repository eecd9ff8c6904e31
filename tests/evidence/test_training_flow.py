"""Convert, load into the real megatron-core, change every weight, save with it, convert back: changed values land."""

from pathlib import Path

import numpy as np
import pytest

from mtpconvert.errors import MtpConvertError
from tests.support.frameworks_convert import FAMILIES, Converted, Tiny, to_hf
from tests.support.mcore_jobs import resave
from tests.support.mcore_ranks import run
from tests.support.tiny import read_safetensors


def source(tiny: Tiny, family: str) -> Path:
    return tiny(family, dtype="BF16", **({"mtp_layers": 2} if family == "deepseek_v3" else {}))


def lowest_bit_flipped(dtype: str, data: bytes) -> bytes:
    """What ``mcore_jobs.changed`` does to every element, without torch."""
    return (np.frombuffer(data, {"BF16": "<u2", "F32": "<u4"}[dtype]) ^ 1).tobytes()


def assert_all_changed(back: Path, original: Path) -> None:
    """Every tensor of ``original``, copies in MTP layers included, is back with each element's lowest bit flipped."""
    wanted = {
        name: (dtype, shape, lowest_bit_flipped(dtype, data))
        for name, (dtype, shape, data) in read_safetensors(original).items()
    }
    assert read_safetensors(back) == wanted


@pytest.fixture(scope="module")
def trained(tiny: Tiny, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family changed and saved by a Transformer Engine model, the default of ``hf2mcore`` and of training."""
    saves = {family: tmp_path_factory.mktemp("trained") / family for family in FAMILIES}
    runs = [
        {"source": converted(source(tiny, family)), "target": save, "spec": "te", "change": True, "optimizer": True}
        for family, save in saves.items()
    ]
    run("tests.support.mcore_jobs:resave_each", te=True, runs=runs)
    return saves


@pytest.mark.parametrize("family", FAMILIES)
def test_changed_values_land(family: str, trained: dict[str, Path], tiny: Tiny, tmp_path: Path) -> None:
    original = source(tiny, family)
    conversion = to_hf(trained[family], tmp_path / "back", reference=original)
    assert_all_changed(tmp_path / "back", original)
    assert conversion.plan.mtp.written == (2 if family == "deepseek_v3" else 0)


def test_changed_values_land_by_the_local_spec(tiny: Tiny, converted: Converted, tmp_path: Path) -> None:
    """``hf2mcore``'s own output serves as the reference too."""
    original = source(tiny, "deepseek_v3")
    directory = converted(original, spec="local")
    resave(str(directory), str(tmp_path / "save"), spec="local", change=True)
    to_hf(tmp_path / "save", tmp_path / "back", reference=directory.parent)
    assert_all_changed(tmp_path / "back", original)


@pytest.mark.parametrize("rows", [128, 256])
def test_padding_rows_that_training_filled(rows: int, tiny: Tiny, converted: Converted, tmp_path: Path) -> None:
    """Vocabulary padding that is not zero, of the converter's size or another, is left out and mentioned."""
    original = source(tiny, "deepseek_v3")
    resave(str(converted(original, spec="local")), str(tmp_path / "save"), padding=0.5, vocab_rows=rows)
    conversion = to_hf(tmp_path / "save", tmp_path / "back", reference=original)
    assert read_safetensors(tmp_path / "back") == read_safetensors(original)
    noted = [note for note in conversion.notes if "padding" in note and str(rows - 98) in note]
    assert any("embedding.word_embeddings.weight" in note for note in noted)
    assert any("output_layer.weight" in note for note in noted)


def test_a_vocabulary_cut_by_megatron_is_refused(tiny: Tiny, converted: Converted, tmp_path: Path) -> None:
    """Megatron loads 128 rows into a 64-row model without a word; what it then saves has lost 34 of 98 tokens."""
    original = source(tiny, "deepseek_v3")
    resave(str(converted(original, spec="local")), str(tmp_path / "save"), vocab_rows=64)
    with pytest.raises(MtpConvertError, match=r"(?s)64.*98|98.*64"):
        to_hf(tmp_path / "save", tmp_path / "back", reference=original)
    assert not (tmp_path / "back").exists()


def test_training_without_mtp_is_refused(tiny: Tiny, converted: Converted, tmp_path: Path) -> None:
    """A model without ``--mtp-num-layers`` loads the checkpoint without a word and saves it without its MTP layers."""
    original = source(tiny, "deepseek_v3")
    resave(str(converted(original, spec="local")), str(tmp_path / "save"), mtp_num_layers=None)
    with pytest.raises(MtpConvertError, match="MTP") as caught:
        to_hf(tmp_path / "save", tmp_path / "back", reference=original)
    assert caught.value.exit_code == 9
