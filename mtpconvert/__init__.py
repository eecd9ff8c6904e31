"""Convert, audit and prove Megatron-Core <-> Hugging Face checkpoints, multi-token prediction (MTP) included."""

__version__ = "0.1.0"
