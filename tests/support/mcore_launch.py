"""Megatron-LM's own command line (0.19.2's ``megatron.training``, which 0.16.1's wheel does not have), on a CPU."""

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.mcore_cpu import cpu_patches, quiet

RUN = (
    "--micro-batch-size", "1", "--global-batch-size", "1", "--bf16",
    "--no-rope-fusion", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion",
    "--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--attention-softmax-in-fp32",
)  # fmt: skip


def launched(root: Path, flags: Sequence[str], *more: str) -> Namespace:
    """The arguments that a launch with ``--load root`` and these flags ends up with.

    Megatron's parser, its ``load_args_from_checkpoint`` where the flags say ``--use-checkpoint-args``, and its
    ``validate_args``, in the order of ``parse_and_validate_args``: before there is a process group. SystemExit, with
    the parser's message, for a flag that it does not know.
    """
    cpu_patches()
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        from megatron.training.arguments import parse_args, validate_args
        from megatron.training.checkpointing import load_args_from_checkpoint

        words = ["pretrain_gpt.py", "--load", str(root), *flags, *RUN, *more]
        with (
            mock.patch.object(sys, "argv", words),
            mock.patch("torch.distributed.is_initialized", lambda: False),
        ):
            args = parse_args()
            if args.use_checkpoint_args:
                load_args_from_checkpoint(args)
            validate_args(args)
    return args


def core_config(args: Namespace) -> Any:
    """Megatron's own ``core_transformer_config_from_args``."""
    with quiet():
        from megatron.training.argument_utils import core_transformer_config_from_args

        return core_transformer_config_from_args(args)


def model_config(args: Namespace) -> Any:
    """Megatron's own ``gpt_config_from_args``: what its ``GPTModelBuilder`` builds from."""
    with quiet():
        from megatron.training.argument_utils import gpt_config_from_args

        return gpt_config_from_args(args)
