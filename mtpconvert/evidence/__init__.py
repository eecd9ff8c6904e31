"""The real frameworks, run: parity and draft acceptance; and what a checkpoint costs to serve, from its headers."""
