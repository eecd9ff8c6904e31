"""What the tests of a folder share: a scratch folder in memory; hypothesis without a time limit, with few examples."""

from hypothesis import settings

from tests.support.scratch import memory

__all__ = ["memory"]

settings.register_profile("shared-machine", deadline=None, max_examples=60)
settings.load_profile("shared-machine")
