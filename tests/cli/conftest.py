"""What the tests of the command line share."""

from tests.support.command_line import run
from tests.support.scratch import memory

__all__ = ["memory", "run"]
