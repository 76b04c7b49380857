"""From what each card or rank holds to findings, in words. Pure: no tensor, no collective.

The causes, in the order in which they are looked for:
    1. Parameters that another rank doesn't have, or registers in another order.
    2. Gradients that nothing averages: no wrapper, a wrapper that is never called, ``no_sync`` in the last backward
       pass, parameters that the wrapper was not made for, parameters that a backward pass left out.
    3. Parameters that differ while gradients don't: ranks that started apart, or a write on one of them.
    4. inf and NaN, on one card or on all.
    5. Buffers: other than running statistics of BatchNorm, which are each card's own by design.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from manycard.diagnosis.finding import Finding, Severity
from manycard.diagnosis.lockstep.held import Held, Reducer

__all__ = ["differing", "find"]

_FIX_STARTED = (
    "give all ranks the same weights before the optimizer is made (DistributedDataParallel and parallel.setup do), "
    "and load checkpoints or change parameters in every rank"
)
_FIX_CARDS = "change parameters through the optimizer or in place under torch.no_grad(), not through .data in a thread"


def differing(held: Sequence[Held], kind: str) -> dict[str, list[str]]:
    """What differs between places: its name, and the places that don't hold what most do.

    Args:
        kind: ``"parameters"``, ``"gradients"`` or ``"buffers"``.
    """
    found = {}
    for name in dict.fromkeys(name for each in held for name in getattr(each, kind)):
        values: Mapping[str, Hashable] = {e.place: getattr(e, kind)[name] for e in held if name in getattr(e, kind)}
        counts = Counter(values.values())
        if len(counts) > 1:
            most, _ = counts.most_common(1)[0]  # the first place's, where there is no majority
            found[name] = [place for place, value in values.items() if value != most]
    return found


def find(held: Sequence[Held], since: str = "") -> list[Finding]:
    """The findings, the gravest first.

    Args:
        held: what each card or rank holds, the first one first.
        since: in which steps it came about, in words; empty where that isn't known.
    """
    bad = _nonfinite(held, since)
    structure = _structure(held)
    if structure:  # what else differs follows from it
        return structure + bad
    parameters, gradients = differing(held, "parameters"), differing(held, "gradients")
    apart = _apart(held, parameters, gradients, since) if parameters or gradients else []
    # A card that is NaN alone is why it differs; where all are, it is one more thing.
    lone = any(finding.severity == "error" for finding in bad)
    return [*(bad if lone else []), *apart, *([] if lone else bad), *_buffers(held), *_not_compared(held)]


# ---- names and their order ---------------------------------------------------------------------------------


def _structure(held: Sequence[Held]) -> list[Finding]:
    first = held[0]
    for other in held[1:]:
        missing = [n for n in first.order if n not in other.parameters]
        added = [n for n in other.order if n not in first.parameters]
        if missing or added:
            here, there = (other.place, first.place) if missing else (first.place, other.place)
            return [
                _finding(
                    f"the model has parameters on {there} that it has not on {here}",
                    f"{_listed(missing or added)} on {there} only",
                    "build the same model on every rank: no layer may depend on the rank, its data or its files",
                )
            ]
        if other.order != first.order:
            place = next(i for i, (a, b) in enumerate(zip(first.order, other.order, strict=True)) if a != b)
            return [
                _finding(
                    "the model's parameters are registered in another order on another rank, and ranks add up "
                    "gradients by their place, so one parameter gets another's",
                    f"place {place + 1}: {first.order[place]} on {first.place}, {other.order[place]} on {other.place}",
                    "register layers in one order on every rank: make them from a list, not from a set or from "
                    "os.listdir, and sort what has no order",
                )
            ]
    return []


# ---- parameters and gradients ------------------------------------------------------------------------------


def _apart(
    held: Sequence[Held], parameters: dict[str, list[str]], gradients: dict[str, list[str]], since: str
) -> list[Finding]:
    """Why parameters or gradients differ."""
    reducer = next((each.reducer for each in held if each.reducer is not None), None)
    if reducer is None:  # cards of one process
        return [_on_cards(parameters, gradients, since)]
    findings = []
    left = dict(gradients or parameters)
    unknown = [name for name in left if any(name in (e.reducer.unknown if e.reducer else ()) for e in held)]
    if not unknown and len(left) == reducer.short:
        unknown = list(left)
    if unknown:
        findings.append(_unknown(reducer, _seen(unknown, left, bool(parameters), since)))
        left = {name: places for name, places in left.items() if name not in unknown}
    extra = [name for name in left if name.startswith("optimizer's ")]
    if extra:
        findings.append(_outside(_seen(extra, left, bool(parameters), since)))
        left = {name: places for name, places in left.items() if name not in extra}
    if left and gradients:
        findings.append(_unreduced(held, reducer, left, bool(parameters), since))
    elif left:
        findings.append(_started_apart(held, left, since))
    return findings


def _on_cards(parameters: dict[str, list[str]], gradients: dict[str, list[str]], since: str) -> Finding:
    what = "parameters" if parameters else "gradients"
    differ = parameters or gradients
    return _finding(
        f"{what} differ between cards: {_listed(differ)}",
        _seen(list(differ), differ, bool(parameters), since),
        _FIX_CARDS if parameters else "report it with the script: cards must have equal gradients after each update",
    )


def _unknown(reducer: Reducer, seen: str) -> Finding:
    return _finding(
        f"parameters that were added or unfrozen after {reducer.kind} was made: it never averages their gradients",
        seen,
        "make, freeze and unfreeze all layers first and wrap the model afterwards (what parallel.setup gave follows "
        "such changes)",
    )


def _outside(seen: str) -> Finding:
    return _finding(
        "the optimizer trains parameters that are not the model's, whose gradients nothing averages",
        seen,
        "make them parameters of a module (of the loss, say) and put it, with the model, into the one that is wrapped",
    )


def _unreduced(
    held: Sequence[Held], reducer: Reducer, differ: dict[str, list[str]], stepped: bool, since: str
) -> Finding:
    unused = sorted({n for each in held for n, value in each.gradients.items() if value is None})
    seen = _seen(list(differ), differ, stepped, since)
    if not reducer.kind:
        return _finding(
            "gradients are averaged by nobody: the model is in no wrapper, so every rank trains by itself",
            seen,
            "wrap it (DistributedDataParallel(model), or model, optimizer = parallel.setup(model, optimizer)), or "
            "average gradients after backward in every rank",
        )
    if not reducer.called:
        return _finding(
            f"the forward pass never went through {reducer.kind}, so it averages no gradients",
            seen,
            "call the wrapped model itself: model(x), not model.module(x) or one of its methods; give the module a "
            "forward that chooses the method, or compute the loss in parallel.train_step",
        )
    if not reducer.synced:
        return _finding(
            "the newest backward pass ran inside no_sync, so these are each rank's own gradients",
            seen,
            "leave the *last* micro-batch before optimizer.step() outside no_sync (the others inside); in the middle "
            "of an accumulation this is as it should be: check after the update",
        )
    if unused:
        return _finding(
            "gradients were not averaged: they share a bucket with a parameter that the backward pass didn't reach",
            f"{seen}; no gradient: {_listed(unused)}",
            "use DistributedDataParallel(..., find_unused_parameters=True), or let every parameter take part in the "
            "loss; a gradient penalty reaches no bias of the output",
        )
    return _finding(
        "gradients were not averaged: a backward pass went round the wrapper",
        seen,
        "send every forward pass through the wrapped model: a method of model.module, a second loss on the inner "
        "module, torch.autograd.grad and gradients that are written by hand reach no other rank",
    )


def _started_apart(held: Sequence[Held], differ: dict[str, list[str]], since: str) -> Finding:
    compared = any(value is not None for each in held for value in each.gradients.values())
    return _finding(
        f"parameters differ between ranks: {_listed(differ)}",
        _seen(list(differ), differ, True, since) + ("; their gradients are equal" if compared else ""),
        _FIX_STARTED if len(differ) == len(held[0].parameters) else f"change them in every rank alike; {_FIX_STARTED}",
    )


def _seen(names: Sequence[str], differ: Mapping[str, Sequence[str]], stepped: bool, since: str) -> str:
    """Which, where, since when."""
    places = dict.fromkeys(place for name in names for place in differ[name])
    text = f"{_listed(names)} ({len(names)} in all) on {_listed(places)}" if len(names) > 1 else ""
    text = text or f"{names[0]} on {_listed(places)}"
    when = f", {since}" if since else ""
    return text + when + ("" if stepped else "; parameters are still equal and part at the next update")


# ---- inf and NaN -------------------------------------------------------------------------------------------


def _nonfinite(held: Sequence[Held], since: str) -> list[Finding]:
    broken = {each.place: each.nonfinite for each in held if each.nonfinite}
    if not broken:
        return []
    first = next(iter(broken))
    origin = _origin(held)
    seen = f"{_listed(broken[first])} on {_listed(broken)}" + (f", {since}" if since else "") + origin
    only = len(broken) < len(held)
    where = f"on {_listed(broken)} only" if only else "on all cards" if len(held) > 1 else ""
    return [
        _finding(
            f"inf or NaN {where}".rstrip(),
            seen,
            "look at the batch of the step that is named (a sample that is NaN, a logarithm or root of 0, a division "
            "by 0), clip gradients (clip_norm=1.0), or lower the learning rate",
            "error" if only else "warning",
        )
    ]


def _origin(held: Sequence[Held]) -> str:
    """Where the first loss that is no number came from."""
    found = [(each.losses.index(False) - len(each.losses), each.place) for each in held if False in each.losses]
    if not found:
        return ""
    first = min(when for when, _ in found)
    places = [place for when, place in found if when == first]
    count = -first
    back = "the newest step" if count == 1 else f"{count - 1} step{'s'[: count > 2]} before the newest"
    who = f"the loss of {_listed(places)} alone" if len(places) < len(held) else "the loss on every card"
    return f"; first in {who}, in {back}"


# ---- buffers -----------------------------------------------------------------------------------------------


def _buffers(held: Sequence[Held]) -> list[Finding]:
    differ = differing(held, "buffers")
    statistics = {name for each in held for name in each.statistics}
    known = [name for name in differ if name in statistics]
    others = [name for name in differ if name not in statistics]
    findings = []
    if others:
        findings.append(
            _finding(
                "buffers differ: forward writes them from what each card or rank sees of the batch, and one's are kept",
                f"{_listed(others)} on {_listed(dict.fromkeys(place for name in others for place in differ[name]))}",
                "average what is written over ranks (torch.distributed.all_reduce) or compute it from nothing that "
                "differs; where one card's view is good enough, this is fine",
                "warning",
            )
        )
    if known:
        findings.append(
            _finding(
                "running statistics of BatchNorm differ, as they do by design: each card's are of its own shard",
                f"{_listed(known)} ({len(known)} in all)",
                "set sync_batchnorm=True for statistics of the whole batch, which contrastive losses need",
                "note",
            )
        )
    return findings


def _not_compared(held: Sequence[Held]) -> list[Finding]:
    if not held[0].sharded:
        return []
    return [
        _finding(
            "sharded parameters were not compared: each rank holds another part of them",
            f"{held[0].sharded} parameters (FSDP or DTensor)",
            "compare a gathered state_dict where that is in doubt",
            "note",
        )
    ]


def _finding(cause: str, evidence: str, fix: str, severity: Severity = "error") -> Finding:
    return Finding(cause, evidence, fix, severity)


def _listed(names: object, most: int = 3) -> str:
    words = list(names)  # type: ignore[call-overload]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
