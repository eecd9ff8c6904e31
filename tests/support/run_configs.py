"""``run_config.yaml`` for tests: those of ``fixtures/run_config`` with fields changed, and files that are none."""

from __future__ import annotations

import re
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "run_config"
NAME = "run_config.yaml"

# What no reader may take for a run's configuration, or run, or hang on.
BROKEN: dict[str, bytes] = {
    "no YAML": b"model:\n  num_layers: [1, 2\nhidden: }\n",
    "a tab for indentation": b"model:\n\tnum_layers: 3\n",
    "two documents": b"model: {num_layers: 3}\n---\nmodel: {num_layers: 4}\n",
    "no text": b"model: \xff\xfe\n",
    "control characters": b"model: \x00\x01\n",
    "an alias to nothing": b"model: {num_layers: *gone}\n",
    "nested too deep": b"model: " + b"[" * 100_000,
    "nested blocks": b"- " * 100_000,
    "too many entries": b"model: [" + b"1," * 200_000 + b"1]",
    "too large": b"# " + b"x" * (4 << 20) + b"\nmodel: {num_layers: 3}\n",
    "cut off": b"model:\n  num_layers: 3\n  name: 'half a",
}
# One text in ten, and that ten times in ten others, and so on: 10 ** 9 in a kilobyte.
BOMB = "a0: &a0 [lol]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
ITSELF = "model: &model\n  num_layers: 3\n  again: *model\n"


def write(folder: Path, family: str, **fields: str) -> Path:
    """Write the family's file to ``folder`` with fields of the model changed, values as YAML; those must be there.

    The file's path.
    """
    text = (FIXTURES / f"{family}.yaml").read_text(encoding="utf-8")
    section = re.compile(r"(?m)^model:\n(?:  .*\n)+")
    (model,) = section.findall(text)
    for field, value in fields.items():
        deep = "    " if f"\n    {field}:" in model and f"\n  {field}:" not in model else "  "
        model, count = re.subn(rf"(?m)^{deep}{field}:.*$(\n{deep}(- |  ).*$)*", f"{deep}{field}: {value}", model)
        assert count == 1, (field, count)
    text = section.sub(lambda _: model, text)
    path = folder / NAME
    path.write_text(text, encoding="utf-8")
    return path
