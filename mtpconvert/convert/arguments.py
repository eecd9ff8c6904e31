"""config.json <-> the Megatron arguments that a checkpoint carries: written by rules, checked on the way back."""

from mtpconvert.convert.argument_check import check_arguments
from mtpconvert.convert.argument_rules import check_rules, megatron_arguments
from mtpconvert.convert.launch_flags import launch_flags, without_flag

__all__ = ["check_arguments", "check_rules", "launch_flags", "megatron_arguments", "without_flag"]
