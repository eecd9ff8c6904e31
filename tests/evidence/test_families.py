"""Every family of ``family_tables`` and ``bridge_tables`` (tests/support) against transformers' class, the auditor and,
where stock megatron-core has modules for it, the real model of that.

Cheap by design: one process with the Transformer Engine stand-in builds and loads all of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpconvert import audit
from mtpconvert.audit.findings import Severity
from mtpconvert.errors import NotRepresentableError
from mtpconvert.mapping.catalogue import file_of, load, mapping_for, sample_configs
from mtpconvert.mapping.expand import expand, proven
from tests.support.bridge_tables import BRIDGE_CASES, BRIDGE_ELEMENTS, write_bridge_case
from tests.support.family_tables import CASES, ELEMENTS, write_case
from tests.support.frameworks_convert import to_hf, to_mcore
from tests.support.mcore_cpu import version
from tests.support.mcore_ranks import run
from tests.support.scratch import scratch
from tests.support.tiny import sha256_tree

SPECS = ("te", "local")
ALL = CASES | BRIDGE_CASES
INSTALLED = version().rpartition(".")[0]


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    """Of each case a folder with the source "hf" and its conversions "te" and "local"."""
    with scratch() as root:
        made = {name: root / str(number) for number, name in enumerate(ALL)}
        for name, folder in made.items():
            case = ALL[name]
            write = write_case if case.dialect == "stock" else write_bridge_case
            write(name, folder / "hf")
            version = "0.19" if "0.16" in case.unsupported else "0.16"
            for spec in case.specs:
                to_mcore(folder / "hf", folder / spec, spec=spec, mcore_version=version, dialect=case.dialect)
        yield made


@pytest.fixture(scope="module")
def built(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    names = {spec: [name for name, case in CASES.items() if spec in case.specs] for spec in SPECS}
    directories = {spec: [str(folders[name] / spec / "release") for name in names[spec]] for spec in SPECS}
    (results,) = run("tests.support.mcore_jobs:ask_and_load", te=True, directories=directories)
    return {spec: dict(zip(names[spec], results[spec], strict=True)) for spec in SPECS}


@pytest.mark.parametrize("name", ALL)
def test_the_plan_has_the_names_and_shapes_of_the_real_model(name: str) -> None:
    case = ALL[name]
    config, shapes = case.config(), case.shapes()
    mapping = mapping_for(config, names=shapes)
    scope = mapping.scope(config, {"mtp_layers": case.depths})
    expansion = expand(mapping, scope, scope.integer("vocab_size"), shapes)
    proven(mapping, expansion)
    optional = {alias: entry for alias, (entry, _) in expansion.aliases.items() if alias in shapes}
    assert {entry.name: entry.shape for entry in [*expansion.hf.values(), *optional.values()]} == {
        name: shape for name, shape in shapes.items() if not mapping.passes_through(name)
    }


@pytest.mark.parametrize("name", ALL)
def test_there_and_back(name: str, folders: dict[str, Path]) -> None:
    """Every element is a bit pattern of its own."""
    folder = folders[name]
    for spec in ALL[name].specs:
        to_hf(folder / spec, folder / f"back {spec}")
        assert sha256_tree(folder / f"back {spec}") == sha256_tree(folder / "hf")


@pytest.mark.parametrize("name", ALL)
def test_the_auditor_finds_every_byte_where_its_own_roles_say(name: str, folders: dict[str, Path]) -> None:
    """It shares no code and no mapping with the conversion. What it says of arguments is tested in tests/audit."""
    for spec in ALL[name].specs:
        report = audit(folders[name] / "hf", folders[name] / spec)
        errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
        assert [finding.message for finding in errors if not finding.code.startswith("argument-")] == []


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, case in CASES.items() for spec in case.specs])
def test_the_real_model_asks_for_what_is_written_and_loads_it(
    name: str, spec: str, built: dict[str, dict[str, Any]]
) -> None:
    """The model that megatron-core builds of the written ``args``: keys, shapes, its load."""
    result = built[spec][name]
    if INSTALLED in CASES[name].unsupported:
        assert "error" in result
        return
    assert "error" not in result, result["error"]
    assert result["asked"] == result["stored"]
    assert result["nan"] == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "local" not in case.specs])
def test_what_has_no_local_spec_is_refused(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(NotRepresentableError, match="no local layer spec"):
        to_mcore(folders[name] / "hf", tmp_path / "local", mcore_version="0.19", spec="local")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.unsupported])
def test_a_version_that_cannot_hold_the_model_is_refused(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The other half of the proof runs with that version: its model does not load the tensors."""
    for refused in CASES[name].unsupported:
        with pytest.raises(NotRepresentableError, match=f"megatron-core {refused} cannot hold this model"):
            to_mcore(folders[name] / "hf", tmp_path / refused, mcore_version=refused)


@pytest.mark.parametrize("architecture", ELEMENTS | BRIDGE_ELEMENTS)
def test_the_published_size_is_a_bijection_of_as_many_elements_as_its_config_says(architecture: str) -> None:
    elements, billions = (ELEMENTS | BRIDGE_ELEMENTS)[architecture]
    config = sample_configs(architecture)["full"]
    mapping = load(file_of(architecture))
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    counts = [config.get("text_config", config)[key] for key in keys if key in config.get("text_config", config)]
    without_key = [case.depths for case in ALL.values() if case.architecture == architecture]
    scope = mapping.scope(config, {"mtp_layers": max(counts or without_key)})
    proof = proven(mapping, expand(mapping, scope, scope.integer("vocab_size"), None))
    assert proof.elements == elements(config)
    assert round(proof.elements / 10**9, 1) == billions
