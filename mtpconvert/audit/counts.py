"""Config against names: MTP count keys at every level, layers, experts, per-layer lists, vocabulary, tie."""

from __future__ import annotations

import re
from itertools import islice, pairwise
from typing import Any

from mtpconvert.audit.drafts import MTP, counts_of, number_of
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.mtp import UNDECLARED_IS_USUAL, MtpLayers, count_keys, declared, trunk_layers
from mtpconvert.audit.readers.names import EXPERTS, stems_of
from mtpconvert.audit.readers.side import Side

_MOST_LOST = 100  # layers without a tensor that are named; a count may be out of all proportion
_TRUNK = re.compile(
    r"^(?:(?:model|language_model|llm|backbone|transformer|module|decoder)\.)*(?:decoder\.)?layers\.(?P<n>\d+)\.", re.A
)


def check_counts(side: Side, mtp: MtpLayers, base: Side | None = None) -> list[Finding]:
    """Every disagreement between what the config (or the arguments) counts and what the names count."""
    found = [*_mtp_counts(side, mtp), *_layer_set(side, mtp), *_expert_sets(side), *_names(side)]
    if side.is_huggingface:
        found += [*_layer_lists(side, mtp), *_vocabulary(side), *_dtype(side)]
        found += [] if mtp.kind.whole else _head(side)  # a draft model borrows its target's
    else:
        found += _padded_vocabulary(side)
    if base is not None and base.is_huggingface and side.is_huggingface:
        found += _changed_counts(base, side)
    return found


def _mtp_counts(side: Side, mtp: MtpLayers) -> list[Finding]:
    source = side.config if side.is_huggingface else side.arguments
    label = {"huggingface": "config.json", "gguf": "metadata"}.get(side.kind, "arguments")
    found: list[Finding] = []

    def fault(code: str, message: str, key: str | None = None) -> None:
        found.append(finding(code, f"{label}: {message}", side=side.label, key=key, mtp=True))

    stored = mtp.layers
    if mtp.kind.counts:
        for path, parts in counts_of(source, mtp.kind):
            if parts != stored:
                said = number_of(parts, mtp.kind)
                fault("mtp-count-mismatch", f"{path} stands for {said}, {stored} are stored", path)
        return found
    counts = list(count_keys(source))
    model_type = str((source or {}).get("model_type", ""))
    for count in counts:
        if count.value is None and count.said is not None:
            fault("mtp-count-type", f"{count.path} is {count.said!r}, no count; the names say {stored}", count.path)
        elif count.value is None:
            if side.is_huggingface:
                fault("mtp-count-null", f"{count.path} is null; the names say {stored}", count.path)
        elif stored and stored not in _meant(count.value, source):
            fault(
                "mtp-count-mismatch",
                f"{count.path} says {count.value}, {stored} {mtp.kind.many} are stored",
                count.path,
            )
    numbers = {count.value for count in counts if count.value is not None}
    if len(numbers) > 1:
        fault("mtp-count-contradiction", ", ".join(f"{count.path} = {count.value}" for count in counts))
    usual = model_type in UNDECLARED_IS_USUAL or mtp.kind.one != MTP.one
    if stored and source and not numbers and not usual:
        fault("mtp-undeclared", f"{number_of(stored, mtp.kind)} stored and no count key says so")
    return found


def _meant(count: int, source: dict[str, Any] | None) -> set[int]:
    """Stored layers that a count can mean: itself; one, where one layer is repeated; HY-V4 counts n or n-1."""
    meant = {count}
    if count and _repeated(source):
        meant.add(1)
    if str((source or {}).get("model_type", "")).startswith("hy_v4"):
        meant.add(max(count - 1, 1))
    return meant


def _repeated(source: dict[str, Any] | None) -> bool:
    return any((source or {}).get(key) for key in ("mtp_use_repeated_layer", "mtp_share_layers"))


def _changed_counts(base: Side, side: Side) -> list[Finding]:
    before = {count.path: count.value for count in count_keys(base.config)}
    after = {count.path: count.value for count in count_keys(side.config)}
    missing = object()
    return [
        finding(
            "mtp-count-changed",
            f"config.json: {path} was {before.get(path, '(absent)')} and is {after.get(path, '(absent)')}",
            side="right",
            key=path,
            mtp=True,
        )
        for path in sorted(before.keys() | after.keys())
        if before.get(path, missing) != after.get(path, missing)
    ]


def _layer_set(side: Side, mtp: MtpLayers) -> list[Finding]:
    """Trunk layers by name are 0 to n-1, and n is the config's."""
    of_mtp = stems_of(mtp.all_names())
    numbers = {int(m["n"]) for stem in side.names.stems if stem not in of_mtp and (m := _TRUNK.match(stem + "."))}
    source = side.config if side.is_huggingface else side.arguments
    count = trunk_layers(source)
    if not numbers or count is None:
        return []
    lost = list(islice((number for number in range(count) if number not in numbers), _MOST_LOST))
    extra = sorted(number for number in numbers if number >= count)
    if not lost and not extra:
        return []
    text = f"{count} layers declared; without a tensor: {lost or 'none'}; beyond them: {extra or 'none'}"
    return [finding("layer-set", text, side=side.label)]


def _expert_sets(side: Side) -> list[Finding]:
    sets: dict[str, set[int]] = {}
    for stem, names in side.names.stems.items():
        start = len(stem) + len(EXPERTS)
        there = {name[start:].partition(".")[0] for name in names if name != stem}
        if numbers := {int(number) for number in there if number.isdecimal()}:
            sets[stem + ".experts"] = numbers
    wanted = max((len(numbers) for numbers in sets.values()), default=0)
    return [
        finding(
            "expert-set",
            f"{stem} holds experts {sorted(numbers)[:8]}, expected 0 to {wanted - 1}",
            side=side.label,
            tensor=f"{stem}.*",
        )
        for stem, numbers in sets.items()
        if numbers != set(range(max(wanted, max(numbers) + 1)))
    ]


def _names(side: Side) -> list[Finding]:
    found: list[Finding] = []
    mtp = [members[0] for stem, members in side.names.stems.items() if stem.startswith("mtp.layers.")]
    if all(any(part in name for name in mtp) for part in (".transformer_layer.", ".mtp_model_layer.")):
        found.append(
            finding("spelling-mixed", "mtp.layers.* is spelt transformer_layer and mtp_model_layer", side=side.label)
        )
    repeated = []
    if any(_repeats_segment(name) for name in side.names.templates):
        repeated = [name for name in side.inventory if _repeats_segment(name)]
    if repeated:
        text = f"{len(repeated)} names repeat a path segment, the first is {repeated[0]}"
        found.append(finding("segment-repeated", text, side=side.label, tensor=repeated[0], count=len(repeated)))
    return found


def _repeats_segment(name: str) -> bool:
    """``model.model.x``; not ``experts.experts`` (Megatron's own) nor numbers."""
    parts = name.split(".")
    return any(a == b and not a.isdigit() and a != "experts" for a, b in pairwise(parts))


def _layer_lists(side: Side, mtp: MtpLayers) -> list[Finding]:
    """``layer_types`` and the like have one entry per trunk layer, or one more per MTP layer."""
    found: list[Finding] = []
    for path, level in _levels(side.config or {}):
        count = level.get("num_hidden_layers")
        if not isinstance(count, int):
            continue
        allowed = {count, count + mtp.layers, count + (declared(side) or 0)}
        for key in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types"):
            value = level.get(key)
            if isinstance(value, list) and len(value) not in allowed:
                layers = f"{count} trunk and {mtp.layers} MTP layers"
                text = f"config.json: {path}{key} has {len(value)} entries, the model {layers}"
                found.append(finding("layer-list-length", text, side=side.label))
    return found


def _levels(config: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    inner = [(f"{path}{key}.", value) for key, value in config.items() if isinstance(value, dict)]
    return [(path, config)] + [pair for prefix, value in inner for pair in _levels(value, prefix)]


def _vocabulary(side: Side) -> list[Finding]:
    keys = ("vocab_size", "draft_vocab_size")  # EAGLE-3 has an output vocabulary of its own
    levels = [level for _, level in _levels(side.config or {})]
    sizes = [level[key] for level in levels for key in keys if isinstance(level.get(key), int)]
    found: list[Finding] = []
    tables = ("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight")
    for name in [stem for stem in side.names.stems if stem.endswith(tables)]:  # no expert has a table
        spec = side.inventory.get(name)
        if spec is None or len(spec.shape) != 2:
            continue
        if sizes and spec.shape[0] not in sizes:
            few = spec.shape[0] < max(sizes)
            text = f"{name} has {spec.shape[0]} rows, vocab_size is {max(sizes)}"
            found.append(finding("vocab-rows" if few else "vocab-padding", text, side=side.label, tensor=name))
    return found


def _padded_vocabulary(side: Side) -> list[Finding]:
    """Megatron builds both tables with ``padded_vocab_size`` rows and cannot load others."""
    rows = (side.arguments or {}).get("padded_vocab_size")
    found: list[Finding] = []
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        spec = side.inventory.get(name)
        if spec is not None and isinstance(rows, int) and len(spec.shape) == 2 and spec.shape[0] != rows:
            text = f"{name} has {spec.shape[0]} rows, padded_vocab_size is {rows}"
            found.append(finding("vocab-rows", text, side=side.label, tensor=name))
    return found


def _head(side: Side) -> list[Finding]:
    """Output head: stored, tied (flag at any level), or lost."""
    words = side.names.templates
    names = [name for name in words if name.endswith(("lm_head.weight", "output.weight")) and "mtp" not in name]
    embedding = any(name.endswith(("embed_tokens.weight", "word_embeddings.weight")) for name in words)
    flags = [level["tie_word_embeddings"] for _, level in _levels(side.config or {}) if "tie_word_embeddings" in level]
    if names or not embedding or side.config is None:
        return []
    if any(flags):
        return [finding("head-tied", "lm_head: tied to the embedding (config says so, no tensor)", side=side.label)]
    if flags:
        return [finding("head-missing", "no lm_head.weight, and tie_word_embeddings is false", side=side.label)]
    return []


def _dtype(side: Side) -> list[Finding]:
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
    config = side.config or {}
    says = names.get(str(config.get("dtype") or config.get("torch_dtype") or ""))
    stored = {dtype for dtype, axes in side.names.dtypes if axes >= 2}
    if says is None or not stored or says in stored or "quantization_config" in config:
        return []
    return [
        finding(
            "dtype-config", f"config.json says {says}, the matrices are {', '.join(sorted(stored))}", side=side.label
        )
    ]
