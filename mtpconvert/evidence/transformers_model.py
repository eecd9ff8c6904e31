"""A checkpoint's trunk and MTP layers as transformers runs them, or the reason why transformers cannot.

transformers keeps MTP outside its models: ``modeling_layers.MtpModel`` holds the layers, and finds their tensors by the
model class's ``_keys_to_ignore_on_load_unexpected``, whose layer number is that of the released size (61, 92, 46). A
checkpoint of another depth needs its own number there, for as long as it loads.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconvert.convert.configs import read_config
from mtpconvert.errors import CheckpointError, MtpLostError, NotRunError, UsageError, some
from mtpconvert.mapping.mtp import declared_mtp, looks_like_mtp
from mtpconvert.stores.safetensors.reader import SafetensorsReader

_APPENDED = re.compile(r"^(model\.(?:language_model\.)?layers\.)(\d+)\.")


@dataclass(frozen=True)
class TransformersModel:
    """``main``: the causal LM. ``mtp``: its ``MtpModel``, or None and ``why_not``. ``has_mtp``: whether the checkpoint
    holds MTP tensors, runnable or not; ``declared``: how many MTP layers its config speaks of."""

    main: Any
    mtp: Any
    why_not: str
    has_mtp: bool
    declared: int | None

    @property
    def layers(self) -> int:
        return 0 if self.mtp is None else len(self.mtp.layers)


def load(
    path: Path, *, dtype: str, device: str = "cpu", evidence: str = "parity", needs_mtp: bool = False
) -> TransformersModel:
    """Trunk and MTP of ``path`` with eager attention and eager experts. ``dtype``: "float32" or "bfloat16".

    Raises NotRunError, saying that ``evidence`` was not run, where transformers cannot run the trunk, or MTP that is
    needed; CheckpointError where trunk tensors are missing; MtpLostError where the config declares MTP and tensors of
    it are missing.
    """
    config, names = read_config(path), list(SafetensorsReader(path).inventory())
    text = config.get("text_config")
    trunk = config.get("num_hidden_layers", text.get("num_hidden_layers") if isinstance(text, Mapping) else None)
    has_mtp = any(looks_like_mtp(name, trunk if isinstance(trunk, int) else None) for name in names)
    declared = declared_mtp(config, None)

    def not_run(why: str, next_step: str = "use a serving engine") -> NotRunError:
        return NotRunError(f"{evidence} not run, because {why}", where=str(path), next_step=next_step)

    if declared.count and not has_mtp:
        raise MtpLostError(
            f"config declares {declared.count} MTP layers ({declared.key}), not one MTP tensor is present",
            where=str(path),
            next_step="take the tensors from the checkpoint that this one was made from",
        )
    if needs_mtp and not has_mtp:
        raise not_run("it has no MTP: none declared, none present", "there is nothing to draft with")
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method is not None and not device.startswith("cuda"):
        raise not_run(f"its weights are quantised ({method})", "use --device cuda, or a bfloat16 checkpoint")
    settings, why = _settings(path)
    if why:
        raise not_run(why)
    why_not = _why_no_mtp(settings) if has_mtp else "the Hugging Face checkpoint has none"
    if needs_mtp and why_not:
        raise not_run(why_not)
    main = load_trunk(path, names, dtype=dtype, device=device)
    mtp = None if why_not else load_mtp(main, names, device=device)
    return TransformersModel(main, mtp, why_not, has_mtp, declared.count)


def _settings(path: Path) -> tuple[Any, str]:
    """The checkpoint's transformers config, and why transformers has no causal language model of it, or ""."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        settings: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        return None, f"transformers {transformers_version()} has no class for it ({str(error).splitlines()[0]})"
    if type(settings) not in auto._model_mapping:
        kind = settings.model_type
        return settings, f"transformers {transformers_version()} has no causal language model of type {kind}"
    return settings, ""


def _why_no_mtp(settings: Any) -> str:
    """Why transformers cannot run the MTP of this config; "" where it can."""
    if not getattr(settings.get_text_config(), "num_mtp_layers", None):
        return f"transformers {transformers_version()} knows no MTP of model type {settings.model_type}"
    try:
        settings.get_mtp_config()
    except ValueError as error:
        return f"transformers {transformers_version()} refuses this config: {error}"
    return ""


def load_trunk(path: Path, names: list[str], *, dtype: str, device: str = "cpu") -> Any:
    """The causal LM in eval mode. CheckpointError where transformers misses one of its tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with quiet_transformers():
        model_class = auto._model_mapping[type(AutoConfig.from_pretrained(path, trust_remote_code=False))]
        with recognised(model_class, names):
            model: Any
            model, info = model_class.from_pretrained(
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
    return model.to(device).eval()


def load_mtp(main: Any, names: list[str], *, device: str = "cpu") -> Any:
    """transformers' ``MtpModel`` of the layers beside ``main`` on disk. MtpLostError when a tensor is missing."""
    import torch
    from transformers.modeling_layers import MtpModel

    with quiet_transformers(), recognised(type(main), names):
        try:
            mtp: Any = MtpModel.from_pretrained(main)
        except RuntimeError as error:
            raise MtpLostError(
                f"transformers cannot load the MTP layers: {error}",
                where=str(main.config.name_or_path),
                next_step="run mtpconvert audit",
            ) from error
    return (mtp.float() if main.dtype is torch.float32 else mtp).to(device).eval()


def load_tokenizer(path: Path, otherwise: str) -> Any:
    """The checkpoint's own. UsageError, with the advice ``otherwise``, where none loads without remote code."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UsageError(
            f"there is no tokenizer beside these weights that loads: {error}", where=str(path), next_step=otherwise
        ) from error


def choose_device(asked: str) -> str:
    """``asked``, or for "auto" CUDA where torch has it and the CPU elsewhere."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


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


@contextmanager
def quiet_transformers() -> Iterator[None]:
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
