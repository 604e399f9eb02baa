"""Checks what a command has printed with ``--json`` against its schema in docs/schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def closed(schema: Any) -> Any:
    """Return *schema* with objects that have no keys but the described ones, so that none is missing from it."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(each) for name, each in schema.items()}
    return inner | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else inner


def check_output(name: str, output: Any) -> None:
    """Raise ValidationError if *output* is not what docs/schemas/*name*.json describes, or has further keys."""
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(closed(schema)).validate(json.loads(json.dumps(output)))
