"""The variables by which a process knows that it is a rank, kept from a script that is to think it is alone.

Libraries that find RANK or WORLD_SIZE make process groups, share out batches and write on rank 0 by themselves, which
a script that runs in lockstep must not have done to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["RankVariables"]

_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankVariables:
    """Takes the variables out of the environment, until `put_back`."""

    def __init__(self) -> None:
        names = [name for name in os.environ if name in _NAMES or name.startswith(_PREFIXES)]
        self._values = {name: os.environ.pop(name) for name in names}

    def put_back(self) -> None:
        """Let the process know again."""
        os.environ.update(self._values)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the process know meanwhile."""
        before = {name: os.environ.get(name) for name in self._values}
        self.put_back()
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
