"""The families against megatron-core 0.19.2: what its models ask for and load, and what they compute."""

from tests.evidence.test_families import (
    built,
    folders,
    test_the_real_model_asks_for_what_is_written_and_loads_it,
)
from tests.evidence.test_families_parity import test_trunk, test_trunk_and_mtp

__all__ = [
    "built",
    "folders",
    "test_the_real_model_asks_for_what_is_written_and_loads_it",
    "test_trunk",
    "test_trunk_and_mtp",
]
