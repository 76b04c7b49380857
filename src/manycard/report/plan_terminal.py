"""A plan in the terminal: the decision tree with the branch taken, the candidates as a table, and why others lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from manycard.report import figures

__all__ = ["plan_tree", "print_plan"]

_WIDTH_OF_A_FILE = 120


def print_plan(document: Mapping[str, Any], console: Console, *, explain: bool = False) -> None:
    """Print a plan.

    Args:
        document: what ``manycard plan --json`` prints.
        explain: whether to say why each of the others lost.
    """
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_OF_A_FILE)
    console.print(plan_tree(document))
    console.print()
    console.print(_candidates(document))
    if explain:
        console.print(Text("Why not the others", style="bold"))
        for row in document["predictions"]:
            if row["why_not"]:
                console.print(Text(f"  {row['name']} on {row['cards']}: {row['why_not']}"))
        console.print()
    for note in document["notes"]:
        console.print(Text(note, style="yellow"))
    settings = ", ".join(f"{key}={value!r}" for key, value in document["settings"].items())
    console.print(Text(f"Plan: strategy={document['strategy']!r}, {settings}", style="bold green"))


def plan_tree(document: Mapping[str, Any]) -> Tree:
    """The forks in order, each under the one before it, with its number and the branch taken; others are dim.

    One level a fork, so that ten of them fit on a narrow terminal.
    """
    root = Tree(Text("How to train this", style="bold"))
    place = root
    for fork in document["forks"]:
        question = Text(fork["question"] + " ")
        question.append(fork["number"], style="cyan")
        leads_to = next((b["leads_to"] for b in fork["branches"] if b["answer"] == fork["taken"]), "")
        question.append(f" → {fork['taken']}: {leads_to}" if leads_to else f" → {fork['taken']}", style="bold green")
        place = place.add(question)
        for branch in fork["branches"]:
            if branch["answer"] != fork["taken"]:
                place.add(Text(f"{branch['answer']}: {branch['leads_to']}", style="dim"))
    place.add(Text(document["line"], style="bold green"))
    return root


def _candidates(document: Mapping[str, Any]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("candidate", no_wrap=True)
    for heading in ("cards", "ms a\nstep", "samples/s", "MiB a card,\nfullest", "how", "ms,\npredicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in document["predictions"]:
        table.add_row(
            row["name"],
            str(row["cards"]),
            figures.speed(row["step_ms"]),
            figures.speed(row["samples_per_s"]),
            figures.memory([row["memory_mib"]]),
            row["how"],
            figures.speed(row["predicted_ms"]),
            style="bold green" if not row["why_not"] else None,
        )
    return table
