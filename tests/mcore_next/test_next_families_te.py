"""The families of the Transformer Engine spec alone, computed by megatron-core 0.19.2."""

from tests.evidence.test_families_parity_te import outcomes, test_trunk_and_mtp, test_what_is_made_wrong_is_seen

__all__ = ["outcomes", "test_trunk_and_mtp", "test_what_is_made_wrong_is_seen"]
