"""Facts, findings and a sweep as the one document of ``manycard doctor --json``: machine, cards, links, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from manycard.cards import CardInfo
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.tuning import Sweep

__all__ = ["describe", "describe_sweep"]


def describe(facts: Facts, findings: Sequence[Finding], sweep: dict[str, Any] | None = None) -> dict[str, Any]:
    """The document.

    Args:
        facts: what was read and measured.
        findings: what is wrong.
        sweep: what `describe_sweep` gave, or ``{"left_out": REASON}``; None where nobody asked for it.
    """
    return {
        "machine": _machine(facts, sweep),
        "cards": _cards(facts),
        "links": _links(facts),
        "findings": [asdict(finding) for finding in findings],
    }


def describe_sweep(sweep: Sweep, saved_in: str, missing: str = "") -> dict[str, Any]:
    """A sweep as plain data.

    Args:
        sweep: what was found.
        saved_in: the file that holds it; empty where it could not be saved.
        missing: why it could not be saved.
    """
    return {
        "left_out": None,
        "best": dict(sweep.best.settings) if sweep.best else {},
        "gain": sweep.best.gain if sweep.best else 1.0,
        "noise": sweep.noise,
        "default_us": {str(size): seconds * 1e6 for size, seconds in sweep.default.items()},
        "trials": [
            {
                "settings": dict(trial.settings),
                "gain": trial.gain,
                "least": trial.least,
                "by_size": {str(size): gain for size, gain in trial.by_size.items()},
                "final": trial.final,
                "failure": trial.failure or None,
            }
            for trial in sweep.trials
        ],
        "saved_in": saved_in or None,
        "not_saved": missing or None,
    }


def _named(facts: Facts) -> list[tuple[str, CardInfo]]:
    """Cards by torch's name; those that torch doesn't see, by the driver's number."""
    seen = [(f"cuda:{place}", info) for place, info in enumerate(facts.visible.cards)]
    return seen + [(f"card {info.index}", info) for info in facts.hidden]


def _machine(facts: Facts, sweep: dict[str, Any] | None) -> dict[str, Any]:
    machine, around, measured = facts.machine, facts.surroundings, facts.measured
    return {
        **asdict(machine.host),
        "python": facts.python,
        "torch": facts.torch.version,
        "torch_cuda": _dotted(facts.torch.cuda),
        "torch_rocm": facts.torch.hip,
        "nccl": facts.torch.nccl,
        "driver": machine.driver,
        "driver_cuda": _dotted(machine.driver_cuda),
        "gpus": len(machine.cards) or len(facts.visible.cards),
        "why_no_gpus": machine.why_none or None,
        "open_files": around.open_files,
        "numa_nodes": len(around.nodes) or None,
        "iommu": around.iommu,
        "virtual": around.virtual,
        "networks": [asdict(network) for network in around.networks],
        "infiniband": list(around.infiniband),
        "choice": facts.choice.summary(),
        "said": facts.choice.describe() or None,
        "all_reduce": [asdict(reduced) for reduced in measured.all_reduces],
        "ranks_join_s": measured.ranks[0].seconds if measured.ranks else None,
        "not_measured": measured.left_out or None,
        "nccl_sweep": sweep,
    }


def _cards(facts: Facts) -> list[dict[str, Any]]:
    chosen = {card.name for card in facts.choice.cards}
    out = {left.name.split(" ")[0]: left.reason for left in facts.choice.left_out}
    host = {copy.card: asdict(copy) for copy in facts.measured.host_copies}
    loads = {load.card: asdict(load) for load in facts.measured.loads}
    rows: list[dict[str, Any]] = [
        {"name": card.name, "model": card.model, "simulated": True, "chosen": True, "left_out": None}
        for card in facts.choice.cards
        if card.simulated
    ]
    for name, info in _named(facts):
        known = asdict(info)
        known.pop("name")
        reason = out.get(name) or (None if name.startswith("cuda:") else "torch doesn't see it")
        health = facts.health.get(info.index)
        state = {
            "simulated": False,
            "chosen": name in chosen,
            "left_out": reason,
            "health": asdict(health) if health else None,
            "host_copies": host.get(name),
            "load": loads.get(name),
        }
        rows.append({"name": name, "model": info.name, **state, **known})
    return rows


def _links(facts: Facts) -> list[dict[str, Any]]:
    rows = []
    for (one, info), (other, other_info) in combinations(_named(facts), 2):
        there, back = facts.measured.copy(one, other), facts.measured.copy(other, one)
        rows.append(
            {
                "cards": [one, other],
                **asdict(facts.links.between(info, other_info)),
                "copies": [asdict(copy) for copy in (there, back) if copy is not None],
            }
        )
    return rows


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"
