"""The same tokens through the real transformers and the real megatron-core, compared point by point.

Megatron's model is built from the Megatron checkpoint and its own args, never from config.json, so that wrong args
show.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mtpconvert.convert.configs import read_config
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from mtpconvert.errors import NotRepresentableError, NotRunError, UsageError
from mtpconvert.evidence import megatron_forward, transformers_forward, transformers_model
from mtpconvert.evidence.differences import TOLERANCES, Difference, Tolerance, differences
from mtpconvert.evidence.megatron_checkpoint import MegatronModel, open_megatron
from mtpconvert.evidence.trace import Trace, depth_of
from mtpconvert.stores.detect import detect

Say = Callable[[str], None]


@dataclass(frozen=True)
class ParityOptions:
    dtype: str = "float32"
    device: str = "cpu"
    sequences: int = 2
    length: int = 64
    seed: int = 0
    tokens: list[int] | None = None
    text: str | None = None
    require_mtp: bool = False


@dataclass(frozen=True)
class MtpParity:
    """``state``: "compared", "absent" (neither side has MTP), "lost" (the sides have not the same layers) or "not run";
    ``why`` for all but the first. ``verdicts``: depth -> "pass" or "fail", of what was compared."""

    state: str
    why: str
    declared: int | None
    transformers: int
    megatron: int
    verdicts: dict[int, str]


@dataclass
class ParityReport:
    hf: Path
    mcore: Path | None  # None: converted on the fly
    path: str  # what was exercised, for people
    inputs: str
    device: str
    tolerance: Tolerance
    found: list[Difference]
    apart: list[str]  # points that cannot be compared, and why
    mtp: MtpParity
    require_mtp: bool
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def trunk(self) -> str:
        """Whether all of the trunk is within the tolerance: "pass" or "fail"."""
        trunk = [found for found in self.found if found.depth == 0]
        return "pass" if _all_within(trunk, self.tolerance) and not any(map(_is_trunk, self.apart)) else "fail"

    @property
    def first(self) -> Difference | None:
        """The first point, in the order of computation, that is beyond the tolerance."""
        return next((found for found in self.found if not found.within(self.tolerance)), None)

    @property
    def verdict(self) -> str:
        """One of "pass", "fail", "partial" (the trunk passes and MTP that is there was not run) and "not-run" (the
        same, or no MTP at all, where MTP was required)."""
        if self.trunk == "fail" or self.apart or self.mtp.state == "lost" or "fail" in self.mtp.verdicts.values():
            return "fail"
        if self.mtp.state == "compared":
            return "pass"
        if self.require_mtp:
            return "not-run"
        return "partial" if self.mtp.state == "not run" else "pass"

    @property
    def exit_code(self) -> int:
        return {"pass": 0, "partial": 0, "fail": 1, "not-run": NotRunError.exit_code}[self.verdict]


@dataclass(frozen=True)
class Reference:
    """What transformers computed, without the model: ``layers`` MTP layers ran, ``why_not`` says why none did."""

    hf: Path
    options: ParityOptions
    tokens: Any  # [b, s]
    inputs: str
    trace: Trace
    layers: int
    why_not: str
    has_mtp: bool
    declared: int | None


def parity(hf: Path, mcore: Path | None, options: ParityOptions, say: Say = lambda _text: None) -> ParityReport:
    """Compare ``hf`` with ``mcore``, or with its own conversion made for the purpose. ``say`` gets what is being done.

    Raises NotRunError where a side cannot be run at all, MtpConvertError for a checkpoint that cannot be read.
    """
    if detect(hf).kind != "hf":
        raise UsageError(f"{hf} is no Hugging Face directory", next_step="parity HF [MCORE]: Hugging Face comes first")
    with _megatron_side(hf, mcore, say) as iteration_dir:
        say(f"transformers: {hf}")
        theirs = reference(hf, options)
        say(f"megatron-core: {iteration_dir}")
        report = against(theirs, iteration_dir)
    report.mcore = mcore
    if mcore is None:
        report.path += "; converted on the fly by mtpconvert hf2mcore --spec local"
    return report


def reference(hf: Path, options: ParityOptions) -> Reference:
    """Run transformers; its model is gone before Megatron's is built."""
    tokens, inputs = _tokens(hf, options)
    model = transformers_model.load(hf, dtype=options.dtype, device=options.device)
    _long_enough(tokens, model.layers)
    trace = transformers_forward.trace(model, tokens.to(options.device))
    return Reference(hf, options, tokens, inputs, trace, model.layers, model.why_not, model.has_mtp, model.declared)


def against(theirs: Reference, iteration_dir: Path) -> ParityReport:
    """Run megatron-core on what ``iteration_dir`` holds, and compare."""
    options = theirs.options
    ours = open_megatron(iteration_dir, dtype=options.dtype, device=options.device)
    _long_enough(theirs.tokens, ours.layers)
    other = megatron_forward.trace(ours.model, theirs.tokens.to(options.device))
    tolerance = TOLERANCES[options.dtype]
    shared = min(theirs.layers, ours.layers)
    found, apart = differences(
        {name: value for name, value in theirs.trace.items() if depth_of(name) <= shared},
        {name: value for name, value in other.items() if depth_of(name) <= shared},
    )
    verdicts = {
        depth: "pass" if _all_within([d for d in found if d.depth == depth], tolerance) else "fail"
        for depth in range(1, shared + 1)
    }
    return ParityReport(
        theirs.hf, iteration_dir, ours.how, theirs.inputs, options.device, tolerance, found, apart,
        _mtp(theirs, ours, verdicts), options.require_mtp,
        {name: version(name) for name in ("torch", "transformers", "megatron-core")},
    )  # fmt: skip


def _mtp(theirs: Reference, ours: MegatronModel, verdicts: dict[int, str]) -> MtpParity:
    state, why = "compared", ""
    if ours.present != ours.layers:
        state = "lost"
        why = f"Megatron's args say {ours.layers} MTP layers, the checkpoint holds tensors of {ours.present}"
    elif not theirs.has_mtp and not ours.layers:
        state, why = "absent", "neither side has MTP layers"
    elif theirs.has_mtp != bool(ours.layers):
        state = "lost"
        why = f"{'the Hugging Face' if theirs.has_mtp else 'the Megatron'} side alone has MTP layers"
    elif not theirs.layers:
        state, why = "not run", theirs.why_not
    elif theirs.layers != ours.layers:
        state, why = "lost", f"transformers runs {theirs.layers} MTP layers, Megatron {ours.layers}"
    return MtpParity(state, why, theirs.declared, theirs.layers, ours.layers, verdicts)


@contextmanager
def _megatron_side(hf: Path, mcore: Path | None, say: Say) -> Iterator[Path]:
    """The iteration's folder of ``mcore``, or of a conversion of ``hf`` that exists as long as the context."""
    if mcore is not None:
        found = detect(mcore)
        if found.iteration_dir is None:
            raise UsageError(f"{mcore} is no Megatron checkpoint but {found.kind}", next_step="parity HF [MCORE]")
        yield found.iteration_dir
        return
    options = ToMcore(spec="local")
    with tempfile.TemporaryDirectory(prefix="mtpconvert-parity-") as scratch:
        say(f"converting {hf} into {scratch}")
        try:
            hf2mcore(hf, Path(scratch) / "mcore", options, Callbacks())
        except NotRepresentableError as error:
            raise NotRunError(
                f"parity not run, because it cannot be converted: {error.what}",
                where=error.where,
                next_step=error.next_step,
            ) from error
        yield Path(scratch) / "mcore" / options.iteration_folder


def _tokens(hf: Path, options: ParityOptions) -> tuple[Any, str]:
    """[b, s] token ids, and what they are, for people."""
    import torch

    config = read_config(hf)
    text = config.get("text_config")
    known = config if "vocab_size" in config or not isinstance(text, dict) else text
    size, longest = int(known["vocab_size"]), known.get("max_position_embeddings")
    ids = _tokenised(hf, options.text) if options.text is not None else options.tokens
    if ids is None:
        length = min(options.length, longest) if isinstance(longest, int) else options.length
        generator = torch.Generator().manual_seed(options.seed)
        tokens = torch.randint(0, size, (options.sequences, length), generator=generator)
        return tokens, f"{options.sequences} sequences of {length} random tokens, seed {options.seed}"
    if wrong := [number for number in ids if not 0 <= number < size]:
        raise UsageError(f"token {wrong[0]} is none of the vocabulary's {size}")
    return torch.tensor([ids]), f"{len(ids)} tokens {'of the given text' if options.text is not None else 'as given'}"


def _tokenised(hf: Path, text: str) -> list[int]:
    tokenizer = transformers_model.load_tokenizer(hf, "give token ids with --tokens")
    return [int(number) for number in tokenizer(text)["input_ids"]]


def _long_enough(tokens: Any, depths: int) -> None:
    if tokens.shape[1] < depths + 2:
        raise UsageError(
            f"{tokens.shape[1]} tokens are too few for {depths} MTP layers", next_step=f"give at least {depths + 2}"
        )


def _all_within(found: list[Difference], tolerance: Tolerance) -> bool:
    return bool(found) and all(difference.within(tolerance) for difference in found)


def _is_trunk(point: str) -> bool:
    return depth_of(point) == 0
