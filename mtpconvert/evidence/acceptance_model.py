"""A checkpoint's trunk and MTP layers as transformers runs them, or the reason why transformers cannot.

transformers keeps MTP outside its models: ``modeling_layers.MtpModel`` holds the layers, and finds their tensors by the
model class's ``_keys_to_ignore_on_load_unexpected``, whose layer number is that of the released size (61, 92, 46). A
checkpoint of another depth needs its own number there, for as long as it loads.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtpconvert.convert.configs import read_config
from mtpconvert.errors import CheckpointError, MtpLostError, NotRunError, UsageError, some
from mtpconvert.mapping.mtp import declared_mtp, looks_like_mtp
from mtpconvert.stores.detect import detect
from mtpconvert.stores.safetensors.reader import SafetensorsReader

_APPENDED = re.compile(r"^(model\.(?:language_model\.)?layers\.)(\d+)\.")


@dataclass
class Drafter:
    """``main``: the causal LM. ``mtp``: an ``MtpModel`` with as many layers as tokens are drafted at once; ``layers``
    of them are the checkpoint's, the rest is the last one again."""

    path: Path
    main: Any
    mtp: Any
    layers: int
    dtype: str
    device: str

    @property
    def draft_length(self) -> int:
        return len(self.mtp.layers)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's own. Raises UsageError where there is none that works without remote code."""
        from transformers import AutoTokenizer

        try:
            with _quiet():
                return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        except (ValueError, KeyError, OSError, ImportError) as error:
            raise UsageError(
                f"there is no tokenizer beside these weights that loads: {error}",
                where=str(self.path),
                next_step="add one, or give prompts as token ids: --prompts FILE.jsonl with 'tokens'",
            ) from error


def load_drafter(path: Path, *, dtype: str, device: str, draft_length: int | None) -> Drafter:
    """Load trunk and MTP. ``draft_length`` None: one token for each MTP layer. ``dtype``: float32 or bfloat16.

    Raises NotRunError with the reason where transformers cannot run this MTP, MtpLostError where MTP tensors are
    missing, CheckpointError where trunk tensors are.
    """
    found = detect(path)
    if found.kind != "hf":
        raise UsageError(
            f"{path} is {found.kind}; transformers runs Hugging Face checkpoints only",
            next_step="convert it first: mtpconvert mcore2hf",
        )
    config, names = read_config(path), list(SafetensorsReader(path).inventory())
    _refuse_unrunnable(path, config, names, device)
    with _quiet():
        main, mtp, layers = _load(path, names, dtype, device)
    drafter = Drafter(path, main, mtp, layers, dtype, device)
    _set_length(drafter, draft_length or layers)
    return drafter


def choose_device(asked: str) -> str:
    """``asked``, or for "auto" CUDA where torch has it and the CPU elsewhere."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


def _refuse_unrunnable(path: Path, config: Mapping[str, Any], names: list[str], device: str) -> None:
    """What config and names alone decide, before anything heavy is imported."""
    text = config.get("text_config")
    trunk = config.get("num_hidden_layers", text.get("num_hidden_layers") if isinstance(text, Mapping) else None)
    mtp = [name for name in names if looks_like_mtp(name, trunk if isinstance(trunk, int) else None)]
    declared = declared_mtp(config, None)
    if declared.count and not mtp:
        raise MtpLostError(
            f"config declares {declared.count} MTP layers ({declared.key}), not one MTP tensor is present",
            where=str(path),
            next_step="take the tensors from the checkpoint that this one was made from",
        )
    if not mtp:
        raise _not_run("it has no MTP: none declared, none present", path, "there is nothing to draft with")
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method is not None and not device.startswith("cuda"):
        raise _not_run(f"its weights are quantised ({method})", path, "use --device cuda, or a bfloat16 checkpoint")


def _not_run(why: str, path: Path, next_step: str) -> NotRunError:
    return NotRunError(f"draft acceptance not run, because {why}", where=str(path), next_step=next_step)


def _load(path: Path, names: list[str], dtype: str, device: str) -> tuple[Any, Any, int]:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    generation_config: Any = transformers.GenerationConfig
    version = transformers_version()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        why = str(error).splitlines()[0]
        raise _not_run(f"transformers {version} has no class for it ({why})", path, "use a serving engine") from error
    layers = _runnable_layers(config, path, version)
    model_class = _model_class(AutoModelForCausalLM, config, path, version)
    with recognised(model_class, names):
        main: Any
        main, info = model_class.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        if wrong := [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]:
            raise CheckpointError(
                f"transformers finds {len(wrong)} trunk tensors missing or of another shape: {some(sorted(wrong))}",
                where=str(path),
                next_step="a model with such tensors would be run with random ones; correct the checkpoint",
            )
        try:
            mtp: Any = MtpModel.from_pretrained(main)
        except RuntimeError as error:
            raise MtpLostError(
                f"transformers cannot load the MTP layers: {error}", where=str(path), next_step="run mtpconvert audit"
            ) from error
    main.generation_config = generation_config(
        eos_token_id=main.generation_config.eos_token_id, pad_token_id=main.generation_config.pad_token_id or 0
    )
    target = getattr(torch, dtype)
    return main.to(device).eval(), (mtp.float() if target is torch.float32 else mtp).to(device).eval(), layers


def _runnable_layers(config: Any, path: Path, version: str) -> int:
    """How many MTP layers transformers would run. Raises NotRunError."""
    layers = getattr(config.get_text_config(), "num_mtp_layers", None)
    if not layers:
        raise _not_run(
            f"transformers {version} knows no MTP of model type {config.model_type}", path, "use a serving engine"
        )
    try:
        config.get_mtp_config()
    except ValueError as error:
        raise _not_run(f"transformers {version} refuses this config: {error}", path, "use a serving engine") from error
    return int(layers)


def _model_class(auto: Any, config: Any, path: Path, version: str) -> Any:
    try:
        return auto._model_mapping[type(config)]
    except KeyError as error:
        raise _not_run(
            f"transformers {version} has no causal language model of type {config.model_type}", path, "use another"
        ) from error


@contextmanager
def recognised(model_class: Any, names: list[str]) -> Iterator[None]:
    """Let ``model_class`` take every appended layer of ``names`` for MTP's, whatever its number; restored after."""
    before = model_class._keys_to_ignore_on_load_unexpected
    prefixes = {match[0] for name in names if (match := _APPENDED.match(name))}
    model_class._keys_to_ignore_on_load_unexpected = [*(before or []), *(re.escape(prefix) for prefix in prefixes)]
    try:
        yield
    finally:
        model_class._keys_to_ignore_on_load_unexpected = before


def _set_length(drafter: Drafter, length: int) -> None:
    """Draft ``length`` tokens at once: the first layers of the checkpoint, or its last layer again and again, with the
    same parameters and a cache slot of its own each time."""
    mtp = drafter.mtp
    layers = list(mtp.layers)[:length]
    while len(layers) < length:
        memo = {id(parameter): parameter for parameter in layers[-1].parameters()}
        again = copy.deepcopy(layers[-1], memo)
        for module in again.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = len(layers)
        layers.append(again)
    mtp.layers = type(mtp.layers)(layers)
    mtp.num_mtp_layers = length
    text = drafter.main.config.get_text_config()
    for key in ("mtp_layer_types", "mtp_mlp_layer_types"):
        kinds = getattr(text, key, None)
        if kinds is not None:
            setattr(text, key, [*kinds[:length], *kinds[-1:] * (length - len(kinds))])
    text.num_mtp_layers = length
    mtp.config = drafter.main.config.get_mtp_config()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, warnings or log lines of transformers: that MTP tensors are no part of a model is known."""
    from transformers.utils import logging

    messages: Any = logging
    level, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()
