"""The part of JSON Schema 2020-12 that docs/audit-report.schema.json uses; an unknown keyword is an error."""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
KNOWN = {
    "$schema", "$id", "$ref", "$defs", "title", "description", "type", "required", "additionalProperties", "properties",
    "items", "enum", "const", "minimum", "pattern",
}  # fmt: skip


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "$") -> list[str]:
    """Every way in which ``value`` is not what ``schema`` says."""
    assert not set(schema) - KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        return faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    found: list[str] = []
    names = schema.get("type", list(TYPES))
    names = [names] if isinstance(names, str) else names
    kinds = tuple(TYPES[name] for name in names)
    if not isinstance(value, kinds) or (isinstance(value, bool) and "boolean" not in names):
        return [f"{path}: {value!r} is no {names}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r} not in {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{path}: {value!r} is not {schema['const']}")
    if isinstance(value, int) and value < schema.get("minimum", value):
        found.append(f"{path}: {value} below {schema['minimum']}")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{path}: {value!r} does not match")
    if isinstance(value, list):
        found += [
            f for n, item in enumerate(value) for f in faults(item, schema.get("items", {}), root, f"{path}[{n}]")
        ]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{path}: no {key}" for key in schema.get("required", []) if key not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{path}: {key} is unknown" for key in value if key not in properties]
        found += [f for k, v in value.items() if k in properties for f in faults(v, properties[k], root, f"{path}.{k}")]
    return found
