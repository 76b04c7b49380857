"""Choosing a backend: by name, or by measuring those that can work here.

Behaviour of ``auto``:
    * Each backend decodes the images of the first batches, in turn, in several rounds; its best round counts, since
      whatever else the machine does only ever slows one down. A backend far behind is left out of later rounds.
    * The fastest is taken, and one line on standard error says which, and what the others did.
    * A backend that fails to start is left out, and the line says why.
    * Where only one can work nothing is measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch

from manycard.data.image_files.backends.backend import Backend
from manycard.data.image_files.backends.card import Card
from manycard.data.image_files.backends.dali import Dali, DaliMixed
from manycard.data.image_files.backends.processes import Processes
from manycard.data.image_files.backends.threads import Threads
from manycard.data.image_files.recipe import Recipe, Request
from manycard.errors import BatchError, MissingExtraError, SettingError

__all__ = ["BACKENDS", "default_workers", "installed", "make_backend", "measure", "run_once"]

BACKENDS: dict[str, type[Backend]] = {kind.name: kind for kind in (Threads, Processes, Dali, DaliMixed, Card)}
_ROUNDS = 6
_BEHIND = 0.7
"""A backend below this share of the fastest after the first round is left out."""
_SECONDS = 0.25
"""What one round of one backend is to take."""
_FEWEST, _MOST = 32, 512
"""Images in one round."""


def default_workers() -> int:
    """The cores that this process may use, shared with the other ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def installed(cards: Sequence[int] | None) -> list[str]:
    """The backends that can work here; those on cards only where cards were given."""
    return [
        name
        for name, kind in BACKENDS.items()
        if kind.missing() is None and (cards or name not in (Card.name, DaliMixed.name))
    ]


def make_backend(
    recipe: Recipe, requests: Sequence[Request], name: str, workers: int, cards: Sequence[int] | None
) -> Backend:
    """Make the backend `name`, or for ``auto`` the fastest on `requests`.

    Raises:
        SettingError: there is no such backend, or it needs a card.
        MissingExtraError: what it needs is not installed.
    """
    if name != "auto":
        return _make(recipe, name, workers, cards)
    names = installed(cards)
    if len(names) == 1:
        return _make(recipe, names[0], workers, cards)
    backends = {each: _make(recipe, each, workers, cards) for each in names}
    speeds, failed = measure(backends, requests)
    if not speeds:
        reasons = "; ".join(f"{each}: {reason}" for each, reason in failed.items())
        raise BatchError(f"no backend could decode the first batch ({reasons})", fix="look at the files")
    best = max(speeds, key=lambda each: speeds[each])
    others = [f"{each} {speeds[each]:,.0f}" for each in speeds if each != best]
    others += [f"{each} failed ({reason})" for each, reason in failed.items()]
    print(
        f"manycard: images are decoded by {best!r}, {speeds[best]:,.0f} images/s ({', '.join(others)})",
        file=sys.stderr,
        flush=True,
    )
    for each, backend in backends.items():
        if each != best:
            backend.close()
    return backends[best]


def check_name(name: str) -> None:
    """Refuse a backend that does not exist or can't work here."""
    if name == "auto":
        return
    if name not in BACKENDS:
        raise SettingError(
            "backend", name, "there is no such backend", fix=f"give auto, {', '.join(BACKENDS)}, or leave it out"
        )
    missing = BACKENDS[name].missing()
    if missing == "a CUDA card":
        raise SettingError("backend", name, "it decodes on a card, and there is none", fix="give backend='auto'")
    if missing is not None:
        raise MissingExtraError(missing, BACKENDS[name].extra, f"backend={name!r}")


def _make(recipe: Recipe, name: str, workers: int, cards: Sequence[int] | None) -> Backend:
    check_name(name)
    if name == Card.name:
        return Card(recipe, workers, [torch.device("cuda", card) for card in cards or (torch.cuda.current_device(),)])
    if name == DaliMixed.name:
        return DaliMixed(recipe, workers, cards or (torch.cuda.current_device(),))
    if cards and name != Dali.name:  # DALI normalises by itself, on the host
        return BACKENDS[name](recipe, workers, torch.device("cuda", cards[0]))
    return BACKENDS[name](recipe, workers)


def measure(
    backends: dict[str, Backend], requests: Sequence[Request], *, rounds: int = _ROUNDS
) -> tuple[dict[str, float], dict[str, str]]:
    """Images/s of each backend, interleaved, the best of `rounds`; and why others failed.

    Args:
        backends: by name; started, and left running.
        requests: what they decode; repeated where they are few.
        rounds: how often each is timed.
    """
    speeds: dict[str, float] = {}
    failed: dict[str, str] = {}
    few = requests[:_FEWEST]
    for name, backend in backends.items():
        started = _start(backend, few)
        if isinstance(started, str):
            failed[name] = started
        else:
            speeds[name] = started
    if not speeds:
        return speeds, failed
    count = min(max(int(max(speeds.values()) * _SECONDS), len(few)), _MOST)
    longer = (list(requests) * (count // len(requests) + 1))[:count]
    best = dict.fromkeys(speeds, 0.0)
    for turn in range(rounds):
        for name in best:
            if turn == 0 or best[name] >= _BEHIND * max(best.values()):
                best[name] = max(best[name], run_once(backends[name], longer, len(requests)))
    return best, failed


def _start(backend: Backend, requests: Sequence[Request]) -> float | str:
    """Images/s of the second batch; the reason where the backend doesn't work here."""
    try:
        run_once(backend, requests)
        return run_once(backend, requests)
    except Exception as error:  # whatever a library raises
        return str(error).splitlines()[0] if str(error) else type(error).__name__


def run_once(backend: Backend, requests: Sequence[Request], size: int | None = None) -> float:
    """Images/s of some batches, until they are ready to be used; each is begun before the one before it is finished.

    Args:
        backend: decodes.
        requests: all of them.
        size: images in a batch; None for one batch.

    Raises:
        BatchError: no file of a batch is an image; that many a second would be no speed.
    """
    size = size or len(requests)
    batches = [requests[first : first + size] for first in range(0, len(requests), size)]
    begin = time.perf_counter()
    begun = [backend.begin(batches[0])]
    for number, batch in enumerate(batches):
        begun += [backend.begin(following) for following in batches[number + 1 : number + 2]]
        found = backend.finish(begun.pop(0))
        if len(found.bad) == len(batch):
            raise BatchError(f"{batch[0].path}: {found.bad[0]}")
    if found.images.device.type == "cuda":
        torch.cuda.synchronize(found.images.device)
    return len(requests) / (time.perf_counter() - begin)
