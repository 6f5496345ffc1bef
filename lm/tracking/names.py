"""Names as MLflow takes them: of settings, of metrics, of a server."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Dict, List

KEY_CHARACTERS, VALUE_CHARACTERS = 250, 6000  # MLflow's limits


def flatten(values: Dict[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: Dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def legal_names(names: List[str]) -> Dict[str, str]:
    """A name that MLflow takes for each name: other characters replaced, none too long, no two alike."""
    legal: Dict[str, str] = {}
    for name in names:
        short = re.sub(r"[^\w. /:-]", "_", name, flags=re.ASCII)
        if short != name or len(short) > KEY_CHARACTERS:
            mark = hashlib.sha256(name.encode()).hexdigest()[:8]
            short = f"{short[: KEY_CHARACTERS - 9]}_{mark}"
        legal[name] = short
    return legal


def absolute(uri: str) -> str:
    """A sqlite file by its whole path: MLflow keeps a store by its URI, and a process may change its folder."""
    head, separator, path = uri.partition("sqlite:///")
    return f"{separator}{Path(path).resolve()}" if separator and not head else uri
