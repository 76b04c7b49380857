"""Reading a trace of torch.profiler: what the host did, what each card did, in microseconds.

A trace is a JSON document of the Chrome format, as ``export_chrome_trace`` writes it. Of its events, kept are

    spans       manycard's own (`manycard.engine.driving.spans`), and PyTorch's: a DataLoader's next batch, an
                optimizer's step
    kernels     what ran on a GPU: kernels, copies, memory sets, with the card, the stream and what launched them
    launches    CUDA calls of the host, by which a kernel is told to belong to forward, backward or update
    waits       CUDA calls in which the host waits for a card
    backwards   autograd's own work, which runs in threads of its own
    collectives torch.distributed's operations, as the host sees them
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manycard.engine.driving.spans import SPAN

__all__ = ["Interval", "Kernel", "Span", "Trace", "read_trace"]

Interval = tuple[float, float]
"""Begin and end, in microseconds."""
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Span:
    """Something the host did."""

    what: str
    """``forward``, ``backward``, ``update``, ``loader``, ``beat`` and so on."""
    card: str
    """The card it was done for; empty for none."""
    start: float
    end: float
    thread: str
    text: str = ""
    """What it is called in the trace."""


@dataclass(frozen=True)
class Kernel:
    """Something a card did."""

    name: str
    card: str
    start: float
    end: float
    kind: str
    """``compute``, ``collective``, ``to_card``, ``from_card``, ``between`` or ``set``."""
    launched: float | None = None
    """When the host launched it."""
    thread: str = ""
    """The thread that did."""


@dataclass(frozen=True)
class Trace:
    """What was kept of a trace."""

    spans: tuple[Span, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    waits: tuple[Span, ...] = ()
    backwards: tuple[Span, ...] = ()
    collectives: tuple[Span, ...] = ()
    optimizers: tuple[str, ...] = field(default=())
    """The optimizers that stepped, as PyTorch names their step."""

    @property
    def beats(self) -> list[float]:
        """When steps ended."""
        return sorted(span.end for span in self.spans if span.what == "beat")


def read_trace(source: Path | Mapping[str, Any]) -> Trace:
    """Read a trace from its file (``.json`` or ``.json.gz``), or from what that holds."""
    if isinstance(source, Path):
        opened = gzip.open if source.suffix == ".gz" else open
        with opened(source, "rt", encoding="utf-8", errors="replace") as file:
            source = json.load(file)
    document: Mapping[str, Any] = source if not isinstance(source, Path) else {}
    events = [event for event in document.get("traceEvents", []) if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: (float(event["ts"]), str(event.get("tid")))
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    spans = [span for event in events if (span := _span(event)) is not None]
    ours = {span.what for span in spans if span.text.startswith(SPAN)}
    return Trace(
        # Where both name the same, ours is the one whose extent is known.
        spans=tuple(span for span in spans if span.text.startswith(SPAN) or span.what not in ours),
        kernels=tuple(_kernel(event, launches) for event in events if event.get("cat") in _DEVICE_KINDS),
        waits=tuple(_named(event, "wait") for event in events if event.get("name") in _WAITS),
        backwards=tuple(_named(e, "backward") for e in events if str(e["name"]).startswith("autograd::engine::eval")),
        collectives=tuple(_collectives(events)),
        optimizers=tuple(sorted({str(e["name"]) for e in events if str(e["name"]).startswith("Optimizer.step#")})),
    )


def _named(event: Mapping[str, Any], what: str, card: str = "") -> Span:
    start = float(event["ts"])
    return Span(what, card, start, start + float(event.get("dur", 0)), str(event.get("tid")), str(event["name"]))


def _span(event: Mapping[str, Any]) -> Span | None:
    name = str(event["name"])
    if event.get("cat") == "gpu_user_annotation":  # the same span again, as the card saw it
        return None
    if name.startswith(SPAN):
        what, _, card = name.removeprefix(SPAN).partition("@")
        return _named(event, what, card)
    if name.startswith("enumerate(DataLoader)#"):
        return _named(event, "loader")
    if name.startswith("Optimizer.step#"):
        return _named(event, "update")
    return None


def _collectives(events: Iterable[Mapping[str, Any]]) -> Iterable[Span]:
    for event in events:
        name = str(event["name"])
        if event.get("cat") in ("cpu_op", "user_annotation") and name.startswith(("gloo:", "nccl:")):
            yield _named(event, "collective")


def _kernel(event: Mapping[str, Any], launches: Mapping[Any, tuple[float, str]]) -> Kernel:
    name, arguments = str(event["name"]), event.get("args", {})
    start = float(event["ts"])
    launched, thread = launches.get(arguments.get("correlation"), (None, ""))
    card = f"cuda:{arguments.get('device', event.get('pid', 0))}"
    kind = _kind(name, str(event.get("cat")))
    return Kernel(name, card, start, start + float(event.get("dur", 0)), kind, launched, thread)


def _kind(name: str, category: str) -> str:
    if category == "gpu_memset":
        return "set"
    if category == "gpu_memcpy":
        kinds = {"HtoD": "to_card", "DtoH": "from_card", "PtoP": "between"}
        return next((kind for word, kind in kinds.items() if word in name), "compute")
    return "collective" if name.startswith(("nccl", "ncclDevKernel", "ncclKernel")) else "compute"
