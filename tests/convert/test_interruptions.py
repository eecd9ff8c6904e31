"""Killed, interrupted, stopped, racing runs and full disks, for real: nothing half-made under a final name, ever."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ENVIRONMENT, command, finish, start, wait_for
from tests.support.sparse import write_sparse
from tests.support.tiny import sha256_tree, write_tiny

LARGE = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "vocab_size": 16000}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 1.1 GB of holes: long enough to be caught while it is converted."""
    return write_sparse(tmp_path_factory.mktemp("large") / "hf", **LARGE)


def moving(target: Path) -> bool:
    """Whether a run has begun to write tensors for ``target``."""
    return any(file.stat().st_blocks > 0 for file in target.with_name(f".{target.name}.partial").glob("*/*.distcp"))


def all_stopped(pid: int) -> bool:
    """Whether every thread stands still: proc_pid_stat(5), the state behind the name in brackets."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(") ")[2].startswith("T") for thread in threads)


def caught(source: Path, target: Path, *options: str) -> subprocess.Popen[str]:
    """A conversion stopped (SIGSTOP) in the middle of its work, so that a busy machine cannot let it end first."""
    process = start("hf2mcore", source, target, "--audit", "none", *options)
    wait_for(lambda: moving(target), process)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: all_stopped(process.pid), process)  # the signal is on its way while threads still run
    assert target.with_name(f".{target.name}.partial").exists(), "the conversion ended before it could be stopped"
    return process


def test_a_killed_run_leaves_nothing_under_the_name_and_the_next_one_works(large: Path, memory: Path) -> None:
    target = memory / "mcore"
    process = caught(large, target)
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    assert not target.exists()
    assert (memory / ".mcore.partial").is_dir()
    (memory / ".mcore.partial" / "stale").write_text("of the killed run")
    small = write_tiny("qwen3", memory / "hf")
    code, _, err = command("hf2mcore", small, target, "--audit", "none")
    assert (code, "error" in err) == (0, False)
    assert sorted(path.name for path in memory.iterdir()) == ["hf", "mcore"]
    assert not list(target.rglob("stale"))
    assert command("mcore2hf", target, memory / "back", "--audit", "none")[0] == 0
    assert sha256_tree(memory / "back") == sha256_tree(small)


def test_a_killed_overwriting_run_leaves_the_old_target_as_it_was(large: Path, memory: Path) -> None:
    small = write_tiny("qwen3", memory / "hf")
    target = memory / "mcore"
    assert command("hf2mcore", small, target, "--audit", "none")[0] == 0
    before = sha256_tree(target)
    process = caught(large, target, "--overwrite")
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert sha256_tree(target) == before
    assert command("hf2mcore", small, target, "--audit", "none")[0] == 2
    assert command("hf2mcore", small, target, "--audit", "none", "--overwrite")[0] == 0
    assert sha256_tree(target) == before
    assert sorted(path.name for path in memory.iterdir()) == ["hf", "mcore"]


def test_ctrl_c_exits_130_and_cleans_up(large: Path, memory: Path) -> None:
    target = memory / "mcore"
    process = caught(large, target)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    code, out, err = finish(process)
    assert code == 130
    assert out == ""
    assert err.strip() == "mtpconvert: interrupted; nothing stands under the final name"
    assert list(memory.iterdir()) == []


def test_a_second_run_on_the_same_target_is_refused_while_the_first_lives(large: Path, memory: Path) -> None:
    small = write_tiny("qwen3", memory / "hf")
    target = memory / "mcore"
    process = caught(large, target)
    try:
        for overwrite in ([], ["--overwrite"]):
            code, _, err = command("hf2mcore", small, target, "--audit", "none", *overwrite)
            assert code == 2
            assert "another mtpconvert is building this target" in err
            assert str(memory / ".mcore.partial") in err
    finally:
        os.kill(process.pid, signal.SIGCONT)
    code, out, _ = finish(process)
    assert (code, "MTP layers" in out) == (0, True)
    assert sorted(path.name for path in memory.iterdir()) == ["hf", "mcore"]
    assert json.loads((target / "hf_assets" / "config.json").read_text())["hidden_size"] == 2048


# ---- a full disk: a small tmpfs in a mount namespace of its own, so that nothing outlives the test

FULL = """
import json, subprocess, sys
from pathlib import Path
from mtpconvert.cli.main import call
from mtpconvert.convert import publish

def left(folder):
    return sorted(path.name for path in folder.iterdir())

disk, check_room, sizes, *arguments = json.loads(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", disk], check=True)
if not check_room:
    publish._check_room = lambda folder, needed: None
results = []
for size in sizes:
    subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
    code = call([*arguments, f"{disk}/out", "--audit", "none"])
    results.append([size, code, left(Path(disk))])
    if code == 0:
        break
print(json.dumps(results))
"""


def on_a_small_disk(folder: Path, sizes: list[int], *arguments: str, check_room: bool) -> tuple[list[Any], str]:
    """[size in KiB, exit code, what lies on the disk] of each run, up to the first that succeeds; and stderr."""
    disk = folder / "disk"
    disk.mkdir()
    isolate = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    assert shutil.which("unshare"), "this test needs util-linux: a full disk is made with a tmpfs"
    done = subprocess.run(
        [*isolate, sys.executable, "-c", FULL, json.dumps([str(disk), check_room, sizes, *arguments])],
        env=ENVIRONMENT, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"no small disk could be made or the run died:\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_disk_that_fills_up_at_any_moment_leaves_nothing(memory: Path) -> None:
    """From no room for one page to enough: tensors, objects, headers and side files each meet the end of the disk."""
    source = write_tiny("deepseek_v3", memory / "hf")
    (source / "tokenizer.json").write_bytes(bytes(60_000))
    sizes = [4, *range(8, 700, 28)]
    results, err = on_a_small_disk(memory, sizes, "hf2mcore", str(source), check_room=False)
    assert len(results) > 8
    assert [code for _, code, _ in results] == [11] * (len(results) - 1) + [0]
    assert all(left == [] for _, _, left in results[:-1])
    assert results[-1][2] == ["out"]
    assert err.count("No space left on device") == len(results) - 1
    assert "next:  free space" in err
    assert "Traceback" not in err


def test_a_full_disk_on_the_way_back(memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf")
    assert command("hf2mcore", source, memory / "mcore", "--audit", "none")[0] == 0
    sizes = [4, *range(8, 700, 28)]
    results, err = on_a_small_disk(memory, sizes, "mcore2hf", str(memory / "mcore"), check_room=False)
    assert len(results) > 5
    assert [code for _, code, _ in results] == [11] * (len(results) - 1) + [0]
    assert all(left == [] for _, _, left in results[:-1])
    assert err.count("No space left on device") == len(results) - 1


@pytest.mark.parametrize("direction", ["hf2mcore", "mcore2hf"])
def test_room_is_checked_before_anything_is_written(direction: str, memory: Path) -> None:
    """What does not fit is refused at once with both numbers; what is let through fits."""
    source = write_tiny("deepseek_v3", memory / "hf")
    (source / "tokenizer.json").write_bytes(bytes(200_000))
    if direction == "mcore2hf":
        assert command("hf2mcore", source, memory / "mcore", "--audit", "none")[0] == 0
        source = memory / "mcore"
    results, err = on_a_small_disk(memory, [4, *range(100, 2000, 60)], direction, str(source), check_room=True)
    assert [code for _, code, _ in results] == [11] * (len(results) - 1) + [0]
    assert all(left == [] for _, _, left in results[:-1])
    assert "No space left" not in err
    assert "bytes are needed, 4,096 are free" in err
    assert "nothing was written" in err
