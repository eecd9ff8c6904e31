"""Number formats that Megatron does not keep, each with its arithmetic and the reason why it is exact."""
