"""config.json <-> the Megatron arguments that a checkpoint carries: written by rules, checked on the way back."""

from mtpconvert.convert.argument_check import check_arguments
from mtpconvert.convert.argument_names import Plain
from mtpconvert.convert.argument_rules import Facts, check_rules, megatron_arguments, moe_layers, mtp_spec_layer
from mtpconvert.convert.launch_flags import launch_flags, without_flag

__all__ = [
    "Facts",
    "Plain",
    "check_arguments",
    "check_rules",
    "launch_flags",
    "megatron_arguments",
    "moe_layers",
    "mtp_spec_layer",
    "without_flag",
]
