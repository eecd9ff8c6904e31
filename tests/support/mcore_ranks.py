"""Run a function in processes of its own that form one gloo world, with or without the Transformer Engine stand-in.

Real processes: megatron-core decides at import whether there is a Transformer Engine, and a rank is a process.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RankFailedError(AssertionError):
    """A rank ended with an error; carries the end of its output."""


def run(
    job: str,
    world: int = 1,
    *,
    te: bool = False,
    kernels: bool = False,
    timeout: float = 300,
    python: str = sys.executable,
    **arguments: Any,
) -> list[Any]:
    """Call ``job`` ("package.module:function") with ``arguments`` in ``world`` processes; its results in rank order.

    Arguments and results travel as JSON (paths as strings). ``te``: with the stand-in, ``kernels``: with that of
    ``te_kernels``. ``python``: the interpreter, where it is that of another environment. Raises RankFailedError when
    a rank fails, TimeoutExpired when one hangs; no process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="mtpconvert-ranks-") as name:
        scratch = Path(name)
        what = {"job": job, "arguments": arguments, "te": te, "kernels": kernels}
        (scratch / "job.json").write_text(json.dumps(what, default=str))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        processes = []
        for rank in range(world):
            command = [python, "-m", "tests.support.mcore_ranks", str(scratch), str(rank), str(world)]
            with (scratch / f"{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code != 0:
                logs = "\n".join((scratch / f"{r}.log").read_text(errors="replace")[-4000:] for r in range(world))
                raise RankFailedError(f"{job}: rank {rank} of {world} ended with {code}\n{logs}")
        return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(world)]


def main(scratch: Path, rank: int, world: int) -> None:
    job = json.loads((scratch / "job.json").read_text())
    if job["kernels"]:
        from tests.support import te_kernels

        te_kernels.install()
    elif job["te"]:
        from tests.support import te_standin

        te_standin.install()
    from tests.support.mcore_cpu import cpu_patches, process_group

    cpu_patches()
    process_group(rank, world, str(scratch / "store"))
    module, function = job["job"].split(":")
    result = getattr(importlib.import_module(module), function)(**job["arguments"])
    (scratch / f"{rank}.json").write_text(json.dumps(result))
    import torch

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
