"""Processes that hold memory on a card, and which of them are ours.

A process that ends while it is looked at, belongs to somebody else or lives outside this container has no
user and no command here; its pid is kept, and nothing is raised.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from manycard.cards.memory_size import in_words

__all__ = ["CardProcess", "look_up", "own_pids"]

_LONGEST_COMMAND = 120


@dataclass(frozen=True)
class CardProcess:
    """A process that has something on a card."""

    pid: int
    """As this machine (or container) numbers it where the driver can tell, else as the host does."""
    memory: int | None = None
    """Bytes it holds on the card; None where the driver doesn't say."""
    graphics: bool = False
    """Whether it only draws (a desktop); such a process doesn't make a card busy."""
    gpu_instance: int | None = None
    """On a card in MIG mode: the number of the GPU instance it runs on."""
    user: str | None = None
    """Who runs it; None where that can't be read."""
    command: str | None = None
    """Its command line, shortened; None where that can't be read, as for a process outside this container."""

    @property
    def computes(self) -> bool:
        """Whether it makes a card busy: it computes, and isn't known to hold no memory."""
        return not self.graphics and self.memory != 0

    def __str__(self) -> str:
        who = f"pid {self.pid}"
        if self.user is not None:
            who += f" of {self.user}"
        if self.command:
            who += f" ({self.command[:40]})"
        elif self.command is None and self.user is None:
            who += " (outside this container, or another user's)"
        return f"{who}, {in_words(self.memory)}" if self.memory is not None else who


def look_up(pid: int, memory: int | None, *, graphics: bool = False, gpu_instance: int | None = None) -> CardProcess:
    """Add the user and the command to what the driver says of a process."""
    user = command = None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            user = process.username()
            command = " ".join(process.cmdline()) or process.name()
    except (psutil.Error, OSError, KeyError, ValueError):  # KeyError: a user id without a name
        pass
    command = command[:_LONGEST_COMMAND] if command else command
    return CardProcess(pid, memory, graphics, gpu_instance, user, command)


def own_pids() -> frozenset[int]:
    """This process, its children and theirs; for a rank also the other ranks, which its parent started."""
    me = psutil.Process()
    root = me
    if "LOCAL_RANK" in os.environ:
        try:
            root = me.parent() or me
        except psutil.Error:
            root = me
    try:
        family = {process.pid for process in root.children(recursive=True)}
    except psutil.Error:
        family = set()
    return frozenset(family | {me.pid, root.pid})
