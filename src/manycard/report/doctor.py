"""What ``manycard doctor`` found, in the terminal, from the document that it prints with ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manycard.cards import in_words

__all__ = ["print_doctor"]

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_KINDS = "NV: NVLinks; PIX, PXB: PCIe switches; PHB, NODE, SYS: the host"
_SPEEDS = "; numbers: GB/s from the row's card to the column's, and from the host"
_WIDE = 5
"""More cards than this are drawn closer together, so that eight fit into 80 columns."""

Row = Mapping[str, Any]


def print_doctor(console: Console, document: Row) -> None:
    """Print tables of the machine, its cards and links, and the findings in words."""
    machine, cards = document["machine"], document["cards"]
    console.print(_machine_table(machine))
    console.print(_cards_table(cards))
    if document["links"]:
        console.print(_links_table(cards, document["links"]))
        measured = any(link["copies"] for link in document["links"])
        console.print(f"({_KINDS}{_SPEEDS if measured else ''})", style="dim", highlight=False)
    if machine["all_reduce"]:
        console.print(_all_reduce_table(machine["all_reduce"]))
    if machine["nccl_sweep"]:
        _print_sweep(console, machine["nccl_sweep"])
    console.print(f"A run would use {escape(machine['choice'])}", highlight=False)
    if machine["said"]:
        console.print(escape(machine["said"]), highlight=False)
    if machine["not_measured"] and machine["gpus"]:
        console.print(f"Not measured: {escape(machine['not_measured'])}", highlight=False)
    console.print()
    _print_findings(console, document["findings"])


def _print_findings(console: Console, findings: list[Row]) -> None:
    if not findings:
        console.print("Nothing is wrong that these probes look for.")
        return
    table = Table.grid(padding=(0, 1))
    for finding in findings:
        severity = finding["severity"]
        table.add_row(f"[bold {_COLOURS[severity]}]{severity}[/]", escape(finding["cause"]))
        table.add_row("  seen", escape(finding["evidence"]))
        table.add_row("  fix", escape(finding["fix"]), end_section=True)
    console.print(table)


def _machine_table(machine: Row) -> Table:
    cores = f"{machine['cores']} cores"
    cores += f" of {machine['cores_total']}" if machine["cores"] < machine["cores_total"] else ""
    built_for = "the CPU only"
    if machine["torch_cuda"]:
        built_for = f"CUDA {machine['torch_cuda']}"
    elif machine["torch_rocm"]:
        built_for = f"ROCm {machine['torch_rocm']}"
    driver = "none"
    if machine["driver"]:
        driver = f"{machine['driver']} (up to CUDA {machine['driver_cuda'] or 'unknown'})"
    table = Table(title="Machine", show_header=False, title_justify="left")
    table.add_row("host", escape(f"{machine['name']}: {cores}, {in_words(machine['memory_total'])} memory"))
    table.add_row("/dev/shm", f"{in_words(machine['shm_free'])} free of {in_words(machine['shm_total'])}")
    table.add_row("Python, torch", f"{machine['python']}, {machine['torch']}")
    table.add_row("torch built for", built_for)
    table.add_row("NCCL", machine["nccl"] or "none")
    table.add_row("driver", driver)
    return table


def _cards_table(cards: list[Row]) -> Table:
    table = Table(title="Cards", title_justify="left")
    for column in ("card", "model", "free / total", "use", "heat, power", "processes", "state"):
        table.add_column(column, overflow="fold")
    for row in cards:
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


def _links_table(cards: list[Row], links: list[Row]) -> Table:
    """Each cell: what joins the two cards, and how fast copies from the row's card to the column's are."""
    between = {frozenset(link["cards"]): link for link in links}
    speeds = {(copy["source"], copy["target"]): copy for link in links for copy in link["copies"]}
    real = [row for row in cards if not row["simulated"]]
    table = Table(title="Links", title_justify="left", padding=(0, 1) if len(real) <= _WIDE else (0, 0))
    table.add_column("")
    for row in real:
        table.add_column(row["name"])
    for row in real:
        cells = [_cell(row["name"], other["name"], between, speeds) for other in real]
        table.add_row(row["name"] if not row["slice_of"] else f"{row['name']} (slice)", *cells)
    if any(row["host_copies"] for row in real):
        table.add_row(
            "PCIe" if len(real) > _WIDE else "host, by PCIe", *(_host_cell(row["host_copies"]) for row in real)
        )
    return table


def _cell(one: str, other: str, between: Mapping[frozenset[str], Row], speeds: Mapping[tuple[str, str], Row]) -> str:
    if one == other:
        return "-"
    link = between[frozenset((one, other))]
    words = link["kind"] + ("" if link["p2p"] is not False else " (no P2P)")
    copy = speeds.get((one, other))
    if copy is None:
        return str(words)
    if copy["wrong_bytes"]:
        return f"{words}\n[bold red]WRONG[/]"
    return f"{words}\n{_speed(copy['gb_per_s'])}"


def _host_cell(copies: Row | None) -> str:
    if copies is None:
        return "-"
    link = f"{copies['generation']}.0 x{copies['width']}\n" if copies["generation"] and copies["width"] else ""
    return f"{link}{_speed(copies['to_card'])}"


def _speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.0f}" if gb_per_s >= 10 else f"{gb_per_s:.1f}"


def _all_reduce_table(rows: list[Row]) -> Table:
    table = Table(title="NCCL all-reduce over the chosen cards", title_justify="left")
    for column in ("a card", "time", "bus bandwidth"):
        table.add_column(column, justify="right")
    for row in rows:
        size = f"{row['size'] >> 10} KiB" if row["size"] < 1 << 20 else in_words(row["size"])
        right = f"{row['bus_gb_per_s']:.1f} GB/s" if row["right"] else "[bold red]WRONG[/]"
        table.add_row(size, f"{row['us']:,.0f} us", right)
    return table


def _print_sweep(console: Console, sweep: Row) -> None:
    if sweep["left_out"]:
        console.print(f"NCCL settings were not compared: {escape(sweep['left_out'])}.", highlight=False)
        return
    sizes = list(sweep["default_us"])
    table = Table(title="NCCL settings, times as fast as the default", title_justify="left")
    table.add_column("settings", overflow="fold")
    for column in ("all sizes", *(in_words(int(size)) for size in sizes)):
        table.add_column(column, justify="right")
    table.add_row("default", "1.00", *(f"{us:,.0f} us" for us in sweep["default_us"].values()))
    for trial in sweep["trials"]:
        words = " ".join(f"{name}={value}" for name, value in trial["settings"].items())
        if trial["failure"]:
            table.add_row(escape(words), "failed", escape(trial["failure"]), style="dim")
            continue
        gains = [f"{trial['by_size'][size]:.2f}" if size in trial["by_size"] else "-" for size in sizes]
        best = trial["settings"] == sweep["best"]
        table.add_row(escape(words), f"{trial['gain']:.2f}", *gains, style="bold green" if best else None)
    console.print(table)
    noise = f"the default differs from itself by {sweep['noise']:.1%}"
    if not sweep["best"]:
        console.print(f"NCCL's default is best here: nothing is faster beyond the noise ({noise}).", highlight=False)
    else:
        console.print(f"Best: {sweep['gain']:.2f} times as fast as the default ({noise}).", highlight=False)
        for name, value in sweep["best"].items():
            console.print(f"export {name}={value}", highlight=False, markup=False)
    if sweep["saved_in"]:
        console.print(
            f"Saved for this machine in {escape(sweep['saved_in'])}; Parallel and manycard run apply it.",
            highlight=False,
            soft_wrap=True,
        )
    elif sweep["not_saved"]:
        console.print(f"Not saved: {escape(sweep['not_saved'])}.", highlight=False)
