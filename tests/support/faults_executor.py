# ruff: noqa: E501 (the table)
"""Faults in what moves the bytes, and in what the converter writes around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mtpconvert.convert import execute, to_hf, to_mcore
from mtpconvert.convert.window import Gatherer
from mtpconvert.stores.durable import TargetFiles
from tests.support.fault_model import ALL, GQA, MLA, NO_EXPERTS, NO_GROUPS, NO_MTP, Fault, Patch
from tests.support.sabotage import change_tensor

EXECUTE = "mtpconvert.convert.execute"
D0, D1 = "decoder.layers.0.", "decoder.layers.1."
M0 = "mtp.layers.0."
T0 = M0 + "transformer_layer."
L3 = "model.layers.3."
FC1, FC2 = D0 + "mlp.linear_fc1.weight", D0 + "mlp.linear_fc2.weight"
TWO = ("deepseek_v3", "qwen3")
BLIND = "the executor sees tiles, not families: one with layers one by one, one with layers under one key"
Change = Callable[[list[Any], int], list[Any]]


def pieces(match: str, change: Change) -> Patch:
    """``change`` made to the strided copies of every target tensor whose name ends so."""
    real = execute.pieces_of

    def pieces_of(tile: Any, to_mcore: bool, sources: Any, target: Any, itemsize: int) -> Iterator[Any]:
        found = list(real(tile, to_mcore, sources, target, itemsize))
        name = (tile.mcore if to_mcore else tile.hf).tensor
        return iter(change(found, itemsize) if name.endswith(match) else found)

    return lambda: patch(f"{EXECUTE}.pieces_of", pieces_of)


def chunks(match: str, other: Callable[[int], int]) -> Patch:
    """Chunk n of matching targets gets what belongs into chunk ``other(n)``."""
    real = execute._Run._pieces

    def of_task(self: Any, task: Any) -> list[Any]:
        if task.name.endswith(match):
            task = replace(task, chunk=list(self._writer.chunks(task.name))[other(task.number)])
        return real(self, task)

    return lambda: patch.object(execute._Run, "_pieces", of_task)


def exchanged(number: int) -> int:
    return {0: 1, 1: 0}.get(number, number)


def spoil(match: str, action: Callable[[memoryview], None] | None) -> Patch:
    """Something done to the bytes of matching tensors once they lie in the window; None: they never get there."""

    @contextmanager
    def plant() -> Iterator[None]:
        marked: set[tuple[int, int]] = set()

        def mark(found: list[Any], itemsize: int) -> list[Any]:
            marked.update((piece.file, piece.source) for piece in found)
            return found

        class Spoiler(Gatherer):
            def gather(self, piece: Any, window: memoryview, start: int) -> None:
                if (piece.file, piece.source) not in marked:
                    super().gather(piece, window, start)
                elif action is not None:
                    marked.discard((piece.file, piece.source))  # gather calls itself for parts
                    super().gather(piece, window, start)
                    begin = piece.target - start
                    action(window[begin : begin + piece.target_span])

        with pieces(match, mark)(), patch(f"{EXECUTE}.Gatherer", Spoiler):
            yield

    return plant


def writes(match: str, written: Callable[[Any, Any], Any] | None = None, crc: int = 0) -> Patch:
    """``written(real, arguments)`` instead of the write of matching tensors; ``crc`` is XORed to their checksum.

    The executor hands over memoryviews; what a writer adds of its own (headers, directories) is bytes.
    """

    @contextmanager
    def plant() -> Iterator[None]:
        current = threading.local()
        move, write, crc32 = execute._Run._move, TargetFiles.write, execute.crc32

        def _move(self: Any, task: Any, *more: Any) -> None:
            current.hit = task.name.endswith(match)
            move(self, task, *more)

        def write_or_not(*arguments: Any) -> None:
            _, _, content, _ = arguments
            if written is not None and isinstance(content, memoryview) and current.hit:
                written(write, arguments)
            else:
                write(*arguments)

        with ExitStack() as stack:
            stack.enter_context(patch.object(execute._Run, "_move", _move))
            stack.enter_context(patch.object(TargetFiles, "write", write_or_not))
            stack.enter_context(patch(f"{EXECUTE}.crc32", lambda *a: crc32(*a) ^ (crc if current.hit else 0)))
            yield

    return plant


def skipped(found: list[Any], itemsize: int) -> list[Any]:
    return []


def shortened(found: list[Any], itemsize: int) -> list[Any]:
    return [replace(piece, run=piece.run - itemsize) for piece in found]


def one_late(found: list[Any], itemsize: int) -> list[Any]:
    return [replace(piece, source=piece.source + itemsize) for piece in found]


def one_early(found: list[Any], itemsize: int) -> list[Any]:
    return [replace(piece, source=piece.source - itemsize) for piece in found]


def other_file(found: list[Any], itemsize: int) -> list[Any]:
    return [replace(piece, file=(piece.file + 1) % 2, source=4096 + piece.source % 64) for piece in found]


def flip(data: memoryview) -> None:
    data[len(data) // 2 & ~1] ^= 4


def zero(data: memoryview) -> None:
    data[:] = bytes(len(data))


def swap_bytes(data: memoryview) -> None:
    data[0::2], data[1::2] = bytes(data[1::2]), bytes(data[0::2])


def negate(data: memoryview) -> None:
    data[1::2] = bytes(byte ^ 0x80 for byte in data[1::2])


def half_only(write: Any, arguments: Any) -> None:
    files, file, window, offset = arguments
    write(files, file, window[: len(window) // 2], offset)


def never(write: Any, arguments: Any) -> None:
    return


def two_bytes_late(write: Any, arguments: Any) -> None:
    files, file, window, offset = arguments
    write(files, file, window[:-2], offset + 2)


def arguments(change: Callable[[dict[str, Any]], Any]) -> Patch:
    real = to_mcore.megatron_arguments

    def megatron_arguments(*given: Any) -> Any:
        table = real(*given)
        change(table)
        return table

    return lambda: patch("mtpconvert.convert.to_mcore.megatron_arguments", megatron_arguments)


def planned_without_mtp() -> Patch:
    real = to_mcore.plan_to_mcore

    def plan_to_mcore(*given: Any, **named: Any) -> Any:
        return real(*given, **(named | {"drop_mtp": True}))

    return lambda: patch("mtpconvert.convert.to_mcore.plan_to_mcore", plan_to_mcore)


def planned_back_without_mtp() -> Patch:
    real = to_hf.plan_to_hf
    return lambda: patch("mtpconvert.convert.to_hf.plan_to_hf", lambda *a, **k: real(*a, **(k | {"drop_mtp": True})))


def count_key(value: int) -> Patch:
    real = to_hf.open_source

    def open_source(*given: Any) -> Any:
        opened = real(*given)
        opened.config_changes["num_nextn_predict_layers"] = value
        return opened

    return lambda: patch("mtpconvert.convert.to_hf.open_source", open_source)


def copies_from_the_other() -> Patch:
    """The MTP layer's embedding and head, each written from the other's source."""
    from mtpconvert.mapping import plan

    real = plan._alias_tiles
    sources = ["model.embed_tokens.weight", "lm_head.weight"]

    def alias_tiles(made: Any) -> Any:
        made = replace(made, copies=[replace(c, source=sources[1 - sources.index(c.source)]) for c in made.copies])
        return real(made)

    return lambda: patch("mtpconvert.mapping.plan._alias_tiles", alias_tiles)


def own_head(source: Path) -> None:
    change_tensor(L3 + "shared_head.head.weight", lambda x: x[::-1])(source)


def there(name: str, families: tuple[str, ...], plant: Patch, tensor: str | None = None, **more: Any) -> Fault:
    return Fault(name, "executor", families, tensor, plant=plant, mtp="MTP" in name, **more)


def back(name: str, families: tuple[str, ...], plant: Patch, tensor: str | None = None, **more: Any) -> Fault:
    return there(f"to HF: {name}", families, plant, tensor, direction="mcore2hf", **more)


EXECUTOR_FAULTS = [
    there("a tile skipped", TWO, pieces("layers.0.mlp.linear_fc2.weight", skipped), refused="CheckpointError", why_not=BLIND),
    there("a copy one element short", TWO, pieces("layers.0.mlp.linear_fc2.weight", shortened), refused="CheckpointError", why_not=BLIND),
    there("read one element late", TWO, pieces("layers.0.mlp.linear_fc2.weight", one_late), FC2, words="too early", why_not=BLIND),
    there("read one element early", TWO, pieces("layers.0.mlp.linear_fc1.weight", one_early), FC1, why_not=BLIND),
    there("gate and up land in each other's place", TWO, chunks("layers.0.mlp.linear_fc1.weight", exchanged), FC1, words="gate and up exchanged", why_not=BLIND),
    there("the source never advances", TWO, chunks("layers.0.mlp.linear_fc1.weight", lambda number: 0), FC1, words="holds the values of mlp.gate", why_not=BLIND),
    there("another file read", TWO, pieces("layers.0.self_attention.linear_proj.weight", other_file), D0 + "self_attention.linear_proj.weight", why_not=BLIND),
    there("the window of the tensor before", TWO, spoil("layers.0.mlp.linear_fc2.weight", None), FC2, why_not=BLIND),
    there("one bit flipped in memory", TWO, spoil("layers.0.mlp.linear_fc2.weight", flip), FC2, words="one bit flipped", why_not=BLIND),
    there("zeros", TWO, spoil("layers.0.mlp.linear_fc2.weight", zero), FC2, words="zeroed", why_not=BLIND),
    there("bytes of each element exchanged", TWO, spoil("layers.0.mlp.linear_fc2.weight", swap_bytes), FC2, words="byte order reversed", why_not=BLIND),
    there("signs flipped", TWO, spoil("layers.0.mlp.linear_fc2.weight", negate), FC2, words="negated", why_not=BLIND),
    there("a short write", TWO, writes("layers.0.mlp.linear_fc2.weight", half_only), FC2, words="zero from element", why_not=BLIND),
    there("a write lost", TWO, writes("layers.0.mlp.linear_fc2.weight", never), FC2, words="zeroed", why_not=BLIND),
    there("a write two bytes late", TWO, writes("layers.0.mlp.linear_fc2.weight", two_bytes_late), FC2, why_not=BLIND),
    there("a wrong checksum", TWO, writes("layers.0.mlp.linear_fc2.weight", crc=1), FC2, code="crc-mismatch", why_not=BLIND),
    there("experts land in each other's place", MLA, chunks("layers.1.mlp.experts.experts.linear_fc2.weight", exchanged), D1 + "mlp.experts.experts.linear_fc2.weight", words="experts 0 and 1 exchanged", why_not=NO_EXPERTS),
    there("half the query groups recorded", GQA, arguments(lambda table: table.update(num_query_groups=table["num_query_groups"] // 2)), None, code="argument-mismatch", words="num_query_groups", why_not=NO_GROUPS),
    there("another epsilon recorded", ALL, arguments(lambda table: table.update(norm_epsilon=0.5)), None, code="argument-mismatch", words="norm_epsilon"),
    # MTP alone
    there("MTP: planned away", MLA, planned_without_mtp(), M0 + "*", code="mtp-layer-missing", why_not=NO_MTP),
    there("MTP: not recorded", MLA, arguments(lambda table: table.update(mtp_num_layers=None)), None, code="argument-mismatch", words="mtp_num_layers", why_not=NO_MTP),
    there("MTP: one layer of two recorded", MLA, arguments(lambda table: table.update(mtp_num_layers=1)), None, code="mtp-count-mismatch", words="mtp_num_layers", why_not=NO_MTP),
    there("MTP: eh_proj skipped", MLA, pieces("mtp.layers.0.eh_proj.weight", skipped), refused="CheckpointError", why_not=NO_MTP),
    there("MTP: eh_proj read one element late", MLA, pieces("mtp.layers.0.eh_proj.weight", one_late), M0 + "eh_proj.weight", why_not=NO_MTP),
    there("MTP: enorm's write lost", MLA, writes("mtp.layers.0.enorm.weight", never), M0 + "enorm.weight", words="zeroed", why_not=NO_MTP),
    there("MTP: hnorm, the window of the tensor before", MLA, spoil("mtp.layers.0.hnorm.weight", None), M0 + "hnorm.weight", why_not=NO_MTP),
    there("MTP: one bit flipped in memory", MLA, spoil("mtp.layers.0.eh_proj.weight", flip), M0 + "eh_proj.weight", words="one bit flipped", why_not=NO_MTP),
    there("MTP: a short write of eh_proj", MLA, writes("mtp.layers.0.eh_proj.weight", half_only), M0 + "eh_proj.weight", words="stopped early", why_not=NO_MTP),
    there("MTP: experts land in each other's place", MLA, chunks(T0 + "mlp.experts.experts.linear_fc2.weight", exchanged), T0 + "mlp.experts.experts.linear_fc2.weight", words="experts 0 and 1 exchanged", why_not=NO_MTP),
    there("MTP: a copy that differs passed over", MLA, lambda: patch("mtpconvert.convert.to_mcore.compare_copies", lambda *a, **k: []), L3 + "shared_head.head.weight", code="copy-differs", source=own_head, why_not=NO_MTP),
    # the other direction
    back("read one element late", TWO, pieces("layers.0.mlp.down_proj.weight", one_late), "model.layers.0.mlp.down_proj.weight", words="too early", why_not=BLIND),
    back("a write lost", TWO, writes("layers.0.mlp.up_proj.weight", never), "model.layers.0.mlp.up_proj.weight", words="zeroed", why_not=BLIND),
    back("zeros", TWO, spoil("model.norm.weight", zero), "model.norm.weight", words="zeroed", why_not=BLIND),
    back("a tile skipped", TWO, pieces("layers.0.mlp.down_proj.weight", skipped), refused="CheckpointError", why_not=BLIND),
    back("MTP: planned away", MLA, planned_back_without_mtp(), L3 + "*", code="mtp-layer-missing", why_not=NO_MTP),
    back("MTP: a count of 0 beside the layers", MLA, count_key(0), None, code="mtp-count-mismatch", words="says 0", why_not=NO_MTP),
    back("MTP: a count of 3 beside two layers", MLA, count_key(3), None, code="mtp-count-mismatch", words="says 3", why_not=NO_MTP),
    back("MTP: embedding and head from each other's source", MLA, copies_from_the_other(), L3 + "embed_tokens.weight", code="copy-differs", why_not=NO_MTP),
    back("MTP: eh_proj's write lost", MLA, writes(L3 + "eh_proj.weight", never), L3 + "eh_proj.weight", words="zeroed", why_not=NO_MTP),
    back("MTP: one bit flipped in memory", MLA, spoil(L3 + "eh_proj.weight", flip), L3 + "eh_proj.weight", words="one bit flipped", why_not=NO_MTP),
]  # fmt: skip
