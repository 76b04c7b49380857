"""Noticing that a script uses manycard by itself."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["noticing"]


@contextlib.contextmanager
def noticing(*kinds: type[Any], then: Callable[[], None]) -> Iterator[list[inspect.BoundArguments]]:
    """Note with which arguments `kinds` are made meanwhile, and call `then` whenever one is about to be."""
    made: list[inspect.BoundArguments] = []
    originals = {kind: kind.__init__ for kind in kinds}

    def noting(original: Any) -> Any:
        @functools.wraps(original)
        def note_and_make(*args: Any, **settings: Any) -> None:
            with contextlib.suppress(TypeError):  # which the call below raises
                made.append(inspect.signature(original).bind(*args, **settings))
                made[-1].apply_defaults()
                del made[-1].arguments["self"]  # so that nothing is kept alive
            then()
            original(*args, **settings)

        return note_and_make

    for kind, original in originals.items():
        kind.__init__ = noting(original)
    try:
        yield made
    finally:
        for kind, original in originals.items():
            kind.__init__ = original
