"""What the real megatron-core needs to be imported and run on a CPU: ``mtpconvert.evidence.megatron_cpu``."""

from mtpconvert.evidence.megatron_cpu import cpu_patches, model_parallel, process_group, quiet, quietly, version

__all__ = ["cpu_patches", "model_parallel", "process_group", "quiet", "quietly", "version"]
