"""Files of results: JSON that is always whole, however the run that writes it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["write_json"]


def write_json(path: Path, document: Any) -> None:
    """Write `document` beside `path` and put it in place in one move, so that no reader sees half of it."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(beside, path)
