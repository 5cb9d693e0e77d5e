"""The OpenAPI document, from the YAML files beside this one."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML

FRAME = "document.yaml"


@cache
def document_json() -> bytes:
    """The document as it is served. Read once and kept: that takes a fifth of a second."""
    return json.dumps(load_document(), ensure_ascii=False, separators=(",", ":")).encode()


def load_document() -> dict[str, Any]:
    """The frame with the paths and components of all other files."""
    parts = {file.name: file for file in files(__name__).iterdir()}
    document = _read(parts.pop(FRAME).read_text("utf-8"))
    document["paths"] = {}
    for name, file in sorted(parts.items()):
        if name.endswith(".yaml"):
            part = _read(file.read_text("utf-8"))
            document["paths"] |= part.get("paths", {})
            for kind, named in part.get("components", {}).items():
                document["components"].setdefault(kind, {}).update(named)
    return document


def _read(text: str) -> dict[str, Any]:
    document: dict[str, Any] = YAML(typ="safe").load(text)
    return document
