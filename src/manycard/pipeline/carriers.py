"""Forward passes that stop half-way and go on later: each in a thread of its own, which is a *carrier*.

Python can't lay a running function aside, except in a thread. So the forward pass of a micro-batch runs in one, from
the first stage to the last, and stops at every gate until the card behind it has time. The card's own thread waits for
it meanwhile: of the two, one runs at a time.

Behaviour:
    * `Carrier.go_on` runs the pass up to its next gate or its end, and raises what it raised.
    * An abandoned pass leaves its gate by an exception, so that its ``with`` and ``finally`` clauses run.
    * A carrier's thread bears the name of the card's thread that waits for it, so that stacks say whose work they show.
    * Threads are used again. An idle one holds nothing. They end when the pool is dropped or closed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from manycard.engine.driving.context import in_copied_variables

__all__ = ["AbandonedError", "Carrier", "Carriers"]


class AbandonedError(BaseException):
    """Raised at the gate of a pass that nobody waits for any more. No Exception: models catch those."""


class Carrier:
    """One forward pass.

    Args:
        start: runs a function in a thread of the pool.
        body: the pass; it is given this carrier, whose `gate` it calls.
    """

    def __init__(self, start: Callable[[Callable[[], None]], None], body: Callable[[Carrier], None]) -> None:
        self._start = start
        self._body: Callable[[Carrier], None] | None = body
        self._orders: SimpleQueue[str | None] = SimpleQueue()
        """The name of the thread that waits meanwhile, for a pass that is to go on; None for one that is abandoned."""
        self._came: SimpleQueue[BaseException | None] = SimpleQueue()
        self._started = False
        self.ended = False

    def go_on(self) -> None:
        """Run the pass to its next gate, or to its end."""
        assert not self.ended, "a pass that has ended can't go on"
        waiting = threading.current_thread().name
        if self._started:
            self._orders.put(waiting)
        else:
            self._started = True
            self._start(in_copied_variables(partial(self._run, waiting)))
        failure = self._came.get()
        if failure is not None:
            raise failure

    def gate(self) -> None:
        """Stop here until `go_on` is called. Called by the pass."""
        self._came.put(None)
        waiting = self._orders.get()
        if waiting is None:
            raise AbandonedError
        threading.current_thread().name = waiting

    def abandon(self) -> None:
        """Let a pass that stands at a gate leave it by an exception, and wait until it has."""
        if self._started and not self.ended:
            self._orders.put(None)
            self._came.get()
        self.ended = True

    def _run(self, waiting: str) -> None:
        threading.current_thread().name = waiting
        failure: BaseException | None = None
        body, self._body = self._body, None
        try:
            assert body is not None, "a pass runs once"
            body(self)
        except BaseException as error:
            failure = error
        del body
        self.ended = True
        self._came.put(failure)


class Carriers:
    """The threads of carriers."""

    def __init__(self) -> None:
        self._inboxes: list[SimpleQueue[Any]] = []
        self._idle: list[SimpleQueue[Any]] = []
        self._finalizer = weakref.finalize(self, _stop, self._inboxes)

    def make(self, body: Callable[[Carrier], None]) -> Carrier:
        """A pass that has not begun."""
        return Carrier(self._start, body)

    def close(self) -> None:
        """End the threads; a pass that comes later starts new ones."""
        _stop(self._inboxes)
        self._inboxes.clear()
        self._idle.clear()

    def _start(self, run: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            self._inboxes.append(inbox)
            name = f"manycard-carrier-{len(self._inboxes)}"
            threading.Thread(target=_serve, args=(inbox, self._idle), name=name, daemon=True).start()
        inbox.put(run)


def _serve(inbox: SimpleQueue[Any], idle: list[SimpleQueue[Any]]) -> None:
    """A thread's life: run passes until told to stop."""
    while True:
        run = inbox.get()
        if run is None:
            return
        run()
        del run
        idle.append(inbox)


def _stop(inboxes: list[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)
