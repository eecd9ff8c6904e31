"""The torch_dist store once more, against the save, the load and the models of megatron-core 0.19.2."""

from tests.stores.test_torch_dist_mcore import *  # noqa: F403
