"""A small mapping file with one row of most ops, and a config for it."""

from pathlib import Path

BASE = """
schema = 1
architecture = "TinyForCausalLM"
mcore_model = "GPTModel"
evidence = ["a paper"]

[dims]
V = "vocab_size"
H = "hidden_size"
Q = "heads/groups"

[defaults]
groups = { value = "=heads", source = "TinyConfig" }

[layers]
all = ["0", "num_hidden_layers"]
mtp = ["0", "mtp_layers"]

[mtp]
count = ["num_nextn_predict_layers"]
present = "model.layers.{num_hidden_layers+i}."

[[place]]
rows = ["root"]

[[place]]
rows = ["layer"]
each = "all"
hf = "model.layers.{i}."
mcore = "decoder.layers.{i}."

[[place]]
rows = ["head"]
each = "mtp"
hf = "model.layers.{num_hidden_layers+i}."
mcore = "mtp.layers.{i}."

[rows]
root = [
  { op = "pad_vocab", hf = "embed", mcore = "embedding", dims = ["V", "H"] },
]
layer = [
  { op = "rename", hf = "norm", mcore = "norm", dims = ["H"] },
  { op = "gate_up_concat", hf = ["gate", "up"], mcore = "fc1", dims = ["2*H", "H"] },
  { op = "expert_stack", of = "rename", experts = "3", hf = "x.{e}.down", mcore = "x.fc2", dims = ["H", "H"] },
]
head = [
  { op = "rename", hf = "eh", mcore = "eh", dims = ["H", "2*H"] },
  { op = "copy_of", hf = "embed", source = "embed", dims = ["V", "H"] },
  { op = "aside", hf = "freq", dims = ["Q"], reason = "recomputed" },
]
"""
CONFIG = {"vocab_size": 10, "hidden_size": 4, "heads": 6, "num_hidden_layers": 2}


def written(folder: Path, text: str) -> Path:
    file = folder / "Tiny.toml"
    file.write_text(text, encoding="utf-8")
    return file
