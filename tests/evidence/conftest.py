"""Fixtures of the evidence: tiny checkpoints and their conversions, each made once a session."""

from tests.support.command_line import run
from tests.support.frameworks_convert import converted, tiny

__all__ = ["converted", "run", "tiny"]
