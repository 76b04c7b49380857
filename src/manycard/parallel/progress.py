"""A progress bar round a loader, on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

__all__ = ["walked_with_bar"]


def walked_with_bar(loader: Iterable[Any], label: str, *, shown: bool) -> Iterator[Any]:
    """Walk `loader` with a bar; without, where it is not to be shown or there is no terminal."""
    console = Console(stderr=True)
    total = len(loader) if isinstance(loader, Sized) else None
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    visible = shown and console.is_terminal
    with Progress(*columns, console=console, disable=not visible, transient=True) as bar:
        yield from bar.track(loader, total=total, description=label)
