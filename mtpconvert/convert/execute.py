"""Move every tile: each target chunk is filled window by window, in order, by a few threads.

Target-driven, so that every target byte is written once, in rising order, and the CRC of a record is known when its
last window is written. Memory is bounded by threads x (window + slab), whatever the size of the model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from mtpconvert.convert.nearby import ByFirstAxis, first_axis
from mtpconvert.convert.pieces import Piece, clip, pieces_of
from mtpconvert.convert.window import WINDOW, Gatherer, aligned_buffer
from mtpconvert.errors import CheckpointError
from mtpconvert.mapping.plan import Plan
from mtpconvert.stores.base import Chunk, Reader, Writer
from mtpconvert.tensors import DTYPE_BITS, Tile

THREADS = 2
_WRITEBACK = 32 << 20  # start writing back after so many bytes, so that the final sync has little left to do

Progress = Callable[[int, str], None]  # bytes just written, name of the tensor


@dataclass
class Moved:
    """What a run moved, in bytes: ``read`` equals ``written`` less ``zeros``, and both equal the plan."""

    read: int = 0
    written: int = 0
    zeros: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read: int, written: int) -> None:
        with self.lock:
            self.read += read
            self.written += written
            self.zeros += written - read


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    number: int  # of the chunk among the tensor's
    chunk: Chunk


def execute(plan: Plan, reader: Reader, writer: Writer, progress: Progress, threads: int = THREADS) -> Moved:
    """Move the plan's bytes from ``reader`` to ``writer``, whose files exist. Raises the first error of any thread.

    Raises CheckpointError when the bytes moved are not the plan's, TargetError when the target cannot be written.
    """
    return _Run(plan, reader, writer, progress).go(threads)


class _Run:
    def __init__(self, plan: Plan, reader: Reader, writer: Writer, progress: Progress) -> None:
        self._reader, self._writer, self._progress = reader, writer, progress
        self._to_mcore = plan.direction == "hf2mcore"
        self._targets = plan.mcore if self._to_mcore else plan.hf
        tiles: dict[str, list[tuple[tuple[int, int], Tile]]] = {}
        for tile in plan.tiles:
            block = tile.mcore if self._to_mcore else tile.hf
            tiles.setdefault(block.tensor, []).append((first_axis(block), tile))
        self._tiles = {name: ByFirstAxis(of_one) for name, of_one in tiles.items()}
        self._source_chunks: dict[str, ByFirstAxis[Chunk]] = {}
        self._filled: dict[str, int] = {}  # target tensor -> bytes of it that are zeros
        for fill in plan.fills if self._to_mcore else ():
            name = fill.mcore.tensor
            zeros = fill.mcore.volume * DTYPE_BITS[plan.mcore[name].dtype] // 8
            self._filled[name] = self._filled.get(name, 0) + zeros
        self._moved = Moved()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._queues: dict[int, deque[_Task]] = {}
        self._busy: dict[int, int] = {}
        for name in self._targets:
            if name in self._tiles:
                for number, chunk in enumerate(writer.chunks(name)):
                    self._queues.setdefault(chunk.file, deque()).append(_Task(name, number, chunk))
        for queue in self._queues.values():
            ordered = sorted(queue, key=lambda task: task.chunk.offset)
            queue.clear()
            queue.extend(ordered)

    def go(self, threads: int) -> Moved:
        workers = [threading.Thread(target=self._work, name=f"move-{n}") for n in range(threads - 1)]
        for worker in workers:
            worker.start()
        try:
            self._work()
            for worker in workers:
                worker.join()
        except BaseException as error:  # Ctrl-C while waiting: the others stop at their next window
            self._fail(error)
        for worker in workers:
            worker.join()
        if self._error is not None:
            raise self._error
        expected, zeros = sum(self._targets[name].nbytes for name in self._tiles), sum(self._filled.values())
        if (self._moved.written, self._moved.zeros) != (expected, zeros):
            raise CheckpointError(
                f"{self._moved.written} bytes were written, {self._moved.zeros} of them zeros;"
                f" planned were {expected} and {zeros}",
                next_step="this is a fault of mtpconvert; nothing was left under the final name; please report it",
            )
        return self._moved

    def _work(self) -> None:
        buffer, gatherer = aligned_buffer(WINDOW), Gatherer(self._reader.read)
        while (task := self._next()) is not None:
            try:
                self._move(task, buffer, gatherer)
            except BaseException as error:
                self._fail(error)
            finally:
                with self._lock:
                    self._busy[task.chunk.file] -= 1

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _next(self) -> _Task | None:
        """The next task of the output file that the fewest threads write to: a file system serialises its writers."""
        with self._lock:
            waiting = [file for file, queue in self._queues.items() if queue]
            if not waiting or self._error is not None:
                return None
            file = min(waiting, key=lambda number: (self._busy.get(number, 0), number))
            self._busy[file] = self._busy.get(file, 0) + 1
            return self._queues[file].popleft()

    def _move(self, task: _Task, buffer: memoryview, gatherer: Gatherer) -> None:
        pieces = self._pieces(task)
        spec = self._targets[task.name]
        size = DTYPE_BITS[spec.dtype] // 8
        for start, stop in task.chunk.box:
            size *= stop - start
        zeroed = task.name in self._filled
        read, crc, flushed = 0, 0, 0
        for start in range(0, size, WINDOW):
            if self._error is not None:
                return
            stop = min(start + WINDOW, size)
            window = buffer[: stop - start]
            if zeroed:
                window[:] = bytes(stop - start)
            for piece in pieces:
                for part in clip(piece, start, stop):
                    gatherer.gather(part, window, start)
                    read += part.nbytes
            if self._writer.wants_crc:
                crc = crc32(window, crc)
            self._writer.write(task.chunk.file, window, task.chunk.offset + start)
            if stop - flushed >= _WRITEBACK:
                self._writer.write_back(task.chunk.file, task.chunk.offset + flushed, stop - flushed)
                flushed = stop
            self._progress(stop - start, task.name)
        if read != size and not zeroed:
            raise CheckpointError(f"{read} of {size} bytes have a source", where=task.name)
        self._writer.finish_chunk(task.name, task.number, crc)
        self._moved.add(read, size)

    def _pieces(self, task: _Task) -> list[Piece]:
        itemsize = DTYPE_BITS[self._targets[task.name].dtype] // 8
        pieces: list[Piece] = []
        for tile in self._tiles[task.name].meeting(*(task.chunk.box[0] if task.chunk.box else (0, 1))):
            source = tile.hf if self._to_mcore else tile.mcore
            chunks = self._chunks_of(source.tensor).meeting(*first_axis(source))
            pieces += pieces_of(tile, self._to_mcore, chunks, task.chunk, itemsize)
        return pieces

    def _chunks_of(self, name: str) -> ByFirstAxis[Chunk]:
        if name not in self._source_chunks:
            chunks = self._reader.chunks(name)
            self._source_chunks[name] = ByFirstAxis((c.box[0] if c.box else (0, 1), c) for c in chunks)
        return self._source_chunks[name]
