"""Plans that were made before, one file each in the user's cache folder.

Behaviour:
    * A plan is found again only for the same key: cards, versions, model and batch, or script, as whoever plans puts
      together. Anything else is another key.
    * A file is whole or not there. One that can't be read, or holds something else, counts as not there; a folder that
      can't be written to is no error: the plan is made again next time.
    * The folder is ``$MANYCARD_CACHE``, else ``manycard`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "keep_plan", "kept_plan", "plan_key"]

_VERSION = 1
"""Moves when what is kept, or how plans are made, changes."""


def cache_folder() -> Path:
    """Where plans are kept."""
    own = os.environ.get("MANYCARD_CACHE")
    if own:
        return Path(own) / "plans"
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return (Path(base) if base else Path.home() / ".cache") / "manycard" / "plans"
    return Path("/nonexistent")


def plan_key(parts: Mapping[str, Any]) -> str:
    """A name for everything that a plan depends on; `parts` is what JSON can say."""
    text = json.dumps({"version": _VERSION, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def kept_plan(key: str) -> dict[str, Any] | None:
    """The document that was kept under `key`; None where there is none."""
    try:
        found = json.loads((cache_folder() / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("key") == key else None


def keep_plan(key: str, document: Mapping[str, Any]) -> None:
    """Keep `document` under `key`."""
    path = cache_folder() / f"{key}.json"
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({**document, "key": key}, indent=1), encoding="utf-8")
        os.replace(beside, path)
