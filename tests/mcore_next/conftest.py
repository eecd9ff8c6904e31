"""Tests with megatron-core 0.19.2, in an environment of its own: ``make test-mcore-next``.

The fixtures are those of the evidence; in an environment with another megatron-core nothing is collected here.
"""

import pytest

from tests.support.mcore_cpu import version

pytest.register_assert_rewrite(
    "tests.audit.test_roles_megatron_kinds",
    "tests.evidence.test_families",
    "tests.evidence.test_families_parity",
    "tests.evidence.test_families_parity_te",
    "tests.evidence.test_forward",
    "tests.evidence.test_load",
    "tests.evidence.test_parity",
    "tests.evidence.test_saves",
    "tests.evidence.test_training_flow",
)

from tests.support.command_line import run  # noqa: E402
from tests.support.frameworks_convert import converted, tiny  # noqa: E402

__all__ = ["converted", "run", "tiny"]

if not version().startswith("0.19."):
    collect_ignore_glob = ["test_*.py"]
