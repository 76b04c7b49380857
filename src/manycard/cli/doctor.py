"""``manycard doctor``: what is in this machine, what is wrong with it, and the fix.

Behaviour:
    * Three tables (versions, cards, links) and the findings in words on standard output; with ``--json`` one
      document with the keys machine, cards, links and findings, and nothing else there.
    * ``--cards`` says which cards a run would use; findings about cards are about those.
    * A machine without GPUs is no error: its cards are simulated.
    * Exit status: 0 well, also with warnings and notes; 1 a finding is an error (training on these cards can't
      start, fails or goes wrong); 2 wrong usage, such as cards that aren't there.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manycard.cards import CardInfo, in_words
from manycard.cli.options import CardsOption, JsonOption, print_json
from manycard.diagnosis import Facts, Finding, diagnose, read_facts

__all__ = ["doctor"]

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def doctor(cards: CardsOption = None, as_json: JsonOption = False) -> None:
    """Show what is in this machine, what is wrong with it, and the fix."""
    facts = read_facts("all" if cards is None else cards)
    findings = diagnose(facts)
    if as_json:
        print_json(_document(facts, findings))
    else:
        _render(Console(), facts, findings)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


def _named(facts: Facts) -> list[tuple[str, CardInfo]]:
    """Cards by torch's name; those that torch doesn't see, by the driver's number."""
    seen = [(f"cuda:{place}", info) for place, info in enumerate(facts.visible.cards)]
    return seen + [(f"card {info.index}", info) for info in facts.hidden]


def _document(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    machine = facts.machine
    return {
        "machine": {
            **asdict(machine.host),
            "python": facts.python,
            "torch": facts.torch.version,
            "torch_cuda": _dotted(facts.torch.cuda),
            "nccl": facts.torch.nccl,
            "driver": machine.driver,
            "driver_cuda": _dotted(machine.driver_cuda),
            "gpus": len(machine.cards) or len(facts.visible.cards),
            "why_no_gpus": machine.why_none or None,
        },
        "cards": _describe_cards(facts),
        "links": [
            {"cards": [one, other], **asdict(facts.links.between(info, other_info))}
            for (one, info), (other, other_info) in combinations(_named(facts), 2)
        ],
        "findings": [asdict(finding) for finding in findings],
    }


def _describe_cards(facts: Facts) -> list[dict[str, Any]]:
    chosen = {card.name for card in facts.choice.cards}
    out = {left.name.split(" ")[0]: left.reason for left in facts.choice.left_out}
    rows: list[dict[str, Any]] = [
        {"name": card.name, "model": card.model, "simulated": True, "chosen": True, "left_out": None}
        for card in facts.choice.cards
        if card.simulated
    ]
    for name, info in _named(facts):
        known = asdict(info)
        known.pop("name")
        reason = out.get(name) or (None if name.startswith("cuda:") else "torch doesn't see it")
        state = {"simulated": False, "chosen": name in chosen, "left_out": reason}
        rows.append({"name": name, "model": info.name, **state, **known})
    return rows


def _render(console: Console, facts: Facts, findings: list[Finding]) -> None:
    console.print(_versions_table(facts))
    console.print(_cards_table(facts))
    if len(_named(facts)) > 1:
        console.print(_links_table(facts))
    console.print(f"A run would use {escape(facts.choice.summary())}", highlight=False)
    if said := facts.choice.describe():
        console.print(escape(said), highlight=False)
    console.print()
    if not findings:
        console.print("Nothing is wrong that these probes look for.")
    table = Table.grid(padding=(0, 1))
    for finding in findings:
        table.add_row(f"[bold {_COLOURS[finding.severity]}]{finding.severity}[/]", escape(finding.cause))
        table.add_row("  seen", escape(finding.evidence))
        table.add_row("  fix", escape(finding.fix), end_section=True)
    console.print(table)


def _versions_table(facts: Facts) -> Table:
    host, machine = facts.machine.host, facts.machine
    cores = f"{host.cores} cores" + (f" of {host.cores_total}" if host.cores < host.cores_total else "")
    cuda = f"CUDA {_dotted(facts.torch.cuda)}" if facts.torch.cuda else f"ROCm {facts.torch.hip}"
    driver = f"{machine.driver} (up to CUDA {_dotted(machine.driver_cuda) or 'unknown'})" if machine.driver else "none"
    table = Table(title="Machine", show_header=False, title_justify="left")
    table.add_row("host", escape(f"{host.name}: {cores}, {in_words(host.memory_total)} memory"))
    table.add_row("/dev/shm", f"{in_words(host.shm_free)} free of {in_words(host.shm_total)}")
    table.add_row("Python, torch", f"{facts.python}, {facts.torch.version}")
    table.add_row("torch built for", cuda if facts.torch.cuda or facts.torch.hip else "the CPU only")
    table.add_row("NCCL", facts.torch.nccl or "none")
    table.add_row("driver", driver)
    return table


def _cards_table(facts: Facts) -> Table:
    table = Table(title="Cards", title_justify="left")
    for column in ("card", "model", "free / total", "use", "heat, power", "processes", "state"):
        table.add_column(column, overflow="fold")
    for row in _describe_cards(facts):
        state = "chosen" if row["chosen"] else "left out"
        if row["simulated"]:
            table.add_row(row["name"], row["model"], "the host's", "-", "-", "-", state)
            continue
        use = "-" if row["utilisation"] is None else f"{row['utilisation']} %"
        heat = "-" if row["temperature"] is None else f"{row['temperature']} °C"
        heat += "" if row["power"] is None else f", {row['power']:.0f} W"
        processes = "-" if row["processes"] is None else str(len(row["processes"]))
        memory = f"{in_words(row['memory_free'])} / {in_words(row['memory_total'])}"
        table.add_row(row["name"], escape(row["model"]), memory, use, heat, processes, state)
    return table


def _links_table(facts: Facts) -> Table:
    named = _named(facts)
    table = Table(title="Links (NV: NVLinks; PIX, PXB: PCIe switches; PHB, NODE, SYS: the host)", title_justify="left")
    table.add_column("")
    for name, _ in named:
        table.add_column(name)
    for (name, info), row in zip(named, facts.links.matrix([info for _, info in named]), strict=True):
        cells = [
            "-" if link.kind == "SELF" else link.kind + ("" if link.p2p is not False else " (no P2P)") for link in row
        ]
        table.add_row(name if info.slice_of == "" else f"{name} (slice)", *cells)
    return table


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"
