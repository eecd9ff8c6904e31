"""The command line in a process of its own: started, watched, stopped and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mtpconvert", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and every process below inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code (negative: the signal), stdout and stderr."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def command(*arguments: object) -> tuple[int, str, str]:
    return finish(start(*arguments))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Wait until ``condition``; fail when the process ends or the time is over before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)
