"""Hypothesis on a machine that others use too: no time limit for one example, few examples."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, max_examples=60)
settings.load_profile("shared-machine")
