from __future__ import annotations

from tests.unit.launch.conftest import place

__all__ = ["place"]
