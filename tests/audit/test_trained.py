"""``--trained``: what must differ, what must not, and what an untrained or lost MTP layer looks like."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.findings import Finding
from tests.support.sabotage import edit_shard, shards
from tests.support.tiny import write_tiny

L3 = "model.layers.3."
COPIES = {f"{L3}embed_tokens.weight": "model.embed_tokens.weight", f"{L3}shared_head.head.weight": "lm_head.weight"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("deepseek_v3", tmp_path_factory.mktemp("base") / "base", fill="normal")


def floats(dtype: str, data: bytes) -> np.ndarray:
    if dtype == "F32":
        return np.frombuffer(data, "<f4").copy()
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def raw(dtype: str, values: np.ndarray) -> bytes:
    single = np.ascontiguousarray(values, "<f4")
    return single.tobytes() if dtype == "F32" else (single.view("<u4") >> 16).astype("<u2").tobytes()


def train(base: Path, out: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> Path:
    """A copy of ``base`` with each tensor as ``change`` says; None: a step of training (2 percent up)."""
    shutil.copytree(base, out)
    for path in shards(out):

        def step(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
            for name, (dtype, shape, data) in tensors.items():
                values = floats(dtype, data)
                new = change(name, values)
                tensors[name] = (dtype, shape, raw(dtype, values * 1.02 if new is None else new))

        edit_shard(path, step)
    return out


def codes(base: Path, right: Path) -> dict[str, list[Finding]]:
    table: dict[str, list[Finding]] = {}
    for found in audit(base, right, trained=True).findings:
        table.setdefault(found.code, []).append(found)
    return table


def is_mtp(name: str) -> bool:
    return name.startswith(L3)


def test_a_training_step_is_clean(base: Path, tmp_path: Path) -> None:
    report = audit(base, train(base, tmp_path / "r", lambda name, x: None), trained=True)
    assert report.verdict("warning") == "pass", [f.message for f in report.findings]


def test_without_the_flag_every_trained_tensor_differs(base: Path, tmp_path: Path) -> None:
    report = audit(base, train(base, tmp_path / "r", lambda name, x: None))
    assert len([f for f in report.findings if f.code == "bytes-differ"]) == 99


def test_the_base_itself_is_no_trained_checkpoint(base: Path) -> None:
    assert "nothing-changed" in codes(base, base)


def test_stale_mtp(base: Path, tmp_path: Path) -> None:
    """59: the trunk was trained, the exporter took MTP from the base; copies follow the trunk."""
    right = train(base, tmp_path / "r", lambda name, x: x if is_mtp(name) and name not in COPIES else None)
    (found,) = codes(base, right)["mtp-stale"]
    assert found.tensor == L3 + "*" and "67 of 67 trunk tensors changed, 0 of 30 MTP tensors" in found.message


def test_stale_trunk(base: Path, tmp_path: Path) -> None:
    right = train(base, tmp_path / "r", lambda name, x: None if is_mtp(name) and name not in COPIES else x)
    assert "trunk-stale" in codes(base, right)


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_left_behind(base: Path, tmp_path: Path, copy: str) -> None:
    found = codes(base, train(base, tmp_path / "r", lambda name, x: x if name == copy else None))
    assert [f.tensor for f in found["copy-stale"]] == [copy]
    assert [f.tensor for f in found["copy-differs"]] == [copy]


@pytest.mark.parametrize(
    ("tensor", "values", "code"),
    [
        (L3 + "eh_proj.weight", 0.0, "values-constant"),
        (L3 + "enorm.weight", 0.0, "values-constant"),
        (L3 + "self_attn.o_proj.weight", 0.25, "values-constant"),
        (L3 + "eh_proj.weight", np.nan, "values-not-finite"),
        ("model.layers.1.self_attn.o_proj.weight", np.inf, "values-not-finite"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", 0.0, "router-bias-zero"),
        (L3 + "mlp.gate.e_score_correction_bias", 0.0, "router-bias-zero"),
    ],
)
def test_lost_values(base: Path, tmp_path: Path, tensor: str, values: float, code: str) -> None:
    right = train(base, tmp_path / "r", lambda name, x: np.full_like(x, values) if name == tensor else None)
    assert tensor in [f.tensor for f in codes(base, right)[code]]


def test_freshly_initialised_mtp(base: Path, tmp_path: Path) -> None:
    """Norms at one, every matrix from one normal distribution (initializer_range of the config)."""
    random = np.random.default_rng(5)

    def fresh(name: str, x: np.ndarray) -> np.ndarray | None:
        if not is_mtp(name) or name in COPIES:
            return None
        return np.ones_like(x) if "norm" in name else random.normal(0, 0.02, x.shape).astype("<f4")

    (found,) = codes(base, train(base, tmp_path / "r", fresh))["fresh-init"]
    assert "norms are exactly 1" in found.message and "standard deviation of 0.0" in found.message


def test_fresh_matrices_beside_trained_norms(base: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    fresh = lambda n, x: random.normal(0, 0.02, x.shape) if is_mtp(n) and "norm" not in n and n not in COPIES else None  # noqa: E731
    (found,) = codes(base, train(base, tmp_path / "r", fresh))["fresh-init"]
    assert "one standard deviation" in found.message


def test_names_and_shapes_still_must_hold(base: Path, tmp_path: Path) -> None:
    from tests.support.sabotage import drop

    right = train(base, tmp_path / "r", lambda name, x: None)
    drop(lambda name: name == L3 + "enorm.weight")(right)
    assert [f.tensor for f in codes(base, right)["mtp-tensor-missing"]] == [L3 + "enorm.weight"]
