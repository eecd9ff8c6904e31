"""The evidence once more, with megatron-core 0.19.2: its load, its forward, its saves."""

from tests.evidence.test_forward import *  # noqa: F403
from tests.evidence.test_load import *  # noqa: F403
from tests.evidence.test_parity import *  # noqa: F403
from tests.evidence.test_saves import *  # noqa: F403
from tests.evidence.test_training_flow import *  # noqa: F403
from tests.support.mcore_cpu import version


def test_this_is_the_newer_megatron_core() -> None:
    assert version() == "0.19.2"
