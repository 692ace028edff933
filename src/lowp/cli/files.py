"""JSON files that any program can read: numbers that are not finite become null."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_DIGITS = 7


def write_json(file: Path, content: Any) -> None:
    """Write `content`, floats with seven significant digits.

    Args:
        file: to write; its folder is made if it isn't there.
        content: dicts, lists, tuples and simple values.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
