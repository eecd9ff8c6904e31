"""The real transformers model of a checkpoint, its MTP layers, and what both compute on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconvert.convert.configs import read_config
from mtpconvert.errors import CheckpointError, MtpLostError, NotRunError, some
from mtpconvert.evidence.acceptance_model import _quiet, recognised, transformers_version
from mtpconvert.evidence.trace import TRUNK_LOGITS, Trace, depth_point, layer_point
from mtpconvert.mapping.mtp import declared_mtp, looks_like_mtp
from mtpconvert.stores.safetensors.reader import SafetensorsReader


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


def load(path: Path, *, dtype: str, device: str = "cpu") -> TransformersModel:
    """Trunk and MTP of ``path`` with eager attention and eager experts. ``dtype``: "float32" or "bfloat16".

    Raises NotRunError where transformers cannot run the trunk, CheckpointError where tensors of it are missing,
    MtpLostError where the config declares MTP and tensors of it are missing.
    """
    config, names = read_config(path), list(SafetensorsReader(path).inventory())
    text = config.get("text_config")
    trunk = config.get("num_hidden_layers", text.get("num_hidden_layers") if isinstance(text, Mapping) else None)
    has_mtp = any(looks_like_mtp(name, trunk if isinstance(trunk, int) else None) for name in names)
    declared = declared_mtp(config, None).count
    if declared and not has_mtp:
        raise MtpLostError(
            f"config declares {declared} MTP layers, not one MTP tensor is present",
            where=str(path),
            next_step="take the tensors from the checkpoint that this one was made from",
        )
    main = load_trunk(path, names, dtype=dtype, device=device)
    why_not = "the Hugging Face checkpoint has none" if not has_mtp else _why_no_mtp(main.config)
    mtp = None if why_not else load_mtp(main, names, device=device)
    return TransformersModel(main, mtp, why_not, has_mtp, declared)


@_quiet()
def load_trunk(path: Path, names: list[str], *, dtype: str, device: str = "cpu") -> Any:
    """The causal LM in eval mode. Errors as ``load``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model_class = auto._model_mapping[type(config)]
    except (ValueError, KeyError, OSError) as error:
        raise NotRunError(
            f"parity not run, because transformers {transformers_version()} has no causal language model for it",
            where=f"{path}: {str(error).splitlines()[0]}",
            next_step="there is nothing to compare Megatron with; the audit of bits needs no model",
        ) from error
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


def _why_no_mtp(config: Any) -> str:
    """Why transformers cannot run the MTP of this config; "" where it can."""
    if not getattr(config.get_text_config(), "num_mtp_layers", None):
        return f"transformers {transformers_version()} knows no MTP of model type {config.model_type}"
    try:
        config.get_mtp_config()
    except ValueError as error:
        return f"transformers {transformers_version()} refuses this config: {error}"
    return ""


@_quiet()
def load_mtp(main: Any, names: list[str], *, device: str = "cpu") -> Any:
    """transformers' ``MtpModel`` of the layers beside ``main`` on disk. MtpLostError when a tensor is missing."""
    import torch
    from transformers.modeling_layers import MtpModel

    with recognised(type(main), names):
        try:
            mtp: Any = MtpModel.from_pretrained(main)
        except RuntimeError as error:
            raise MtpLostError(
                f"transformers cannot load the MTP layers: {error}",
                where=str(main.config.name_or_path),
                next_step="run mtpconvert audit",
            ) from error
    return (mtp.float() if main.dtype is torch.float32 else mtp).to(device).eval()


@_quiet()
def trace(model: TransformersModel, tokens: Any) -> Trace:
    """Every point of ``evidence.trace`` for ``tokens`` [b, s], on the CPU, in float32.

    MTP layer k gets the hidden state of the layer before (k = 1: of the trunk, final and normed) at positions
    0 .. s-k-1 and the embeddings of the tokens k later, as ``MtpModel.forward`` rolls them.
    """
    import torch

    main, mtp, length = model.main, model.mtp, tokens.shape[1]
    decoder, taken = main.get_decoder(), dict[str, Any]()
    points = {"embedding": main.get_input_embeddings()}
    points |= {layer_point(number): layer for number, layer in enumerate(decoder.layers)}
    points["final norm"] = decoder.norm
    for depth, layer in enumerate([] if mtp is None else mtp.layers, start=1):
        points[depth_point(depth, "eh_proj")] = layer.eh_proj
        points[depth_point(depth, "layer")] = layer.mtp_block
    handles = [module.register_forward_hook(_take(taken, name)) for name, module in points.items()]
    try:
        with torch.no_grad():
            taken[TRUNK_LOGITS] = main(tokens, use_cache=False).logits
            hidden = taken["final norm"]
            for depth in range(1, model.layers + 1):
                hidden = hidden[:, : length - depth]
                positions = torch.arange(depth, length, device=tokens.device).expand(tokens.shape[0], -1)
                hidden = mtp.forward_layer(depth - 1, hidden, positions, None, input_ids=tokens[:, depth:])
                taken[depth_point(depth, "final norm")] = hidden
                taken[depth_point(depth, "logits")] = mtp._project_to_logits(hidden)
    finally:
        for handle in handles:
            handle.remove()
    return {name: value.detach().float().cpu() for name, value in taken.items()}


def _take(taken: dict[str, Any], name: str) -> Callable[[Any, Any, Any], None]:
    """A hook that keeps the first output only: MTP calls the embedding again."""

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        taken.setdefault(name, output[0] if isinstance(output, tuple) else output)

    return hook
