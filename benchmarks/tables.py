"""Write the tables of docs/performance.md and docs/patterns.md from the results in benchmarks/results.

    python benchmarks/tables.py            # rewrite the tables
    python benchmarks/tables.py --check    # exit status 1 where a document differs from the results

A table stands between ``<!-- results: FILE -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "docs" / "performance.md", ROOT / "docs" / "patterns.md")
MARKED = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end -->", re.DOTALL)


GRAPHED = ("dp_graph", "dp_best", "ddp_graph", "manual_graph")
"""Ways whose activations PyTorch doesn't count as allocated, since they lie in the memory of graphs."""


def script_table(document: dict[str, Any]) -> str:
    """One file's ways of running a script."""
    lines = ["| way | samples/s, median | every round | ÷ python_one | ÷ data_parallel |", "|---|---|---|---|---|"]
    speed = {way: row["samples_per_s"] for way, row in document["rows"].items()}
    for way, row in document["rows"].items():
        rounds = ", ".join(f"{value:,.0f}" for value in row["samples_per_s_all"])
        ratios = [f"{speed[way] / speed[other]:.3f}" for other in ("python_one", "data_parallel")]
        lines.append(f"| `{way}` | {speed[way]:,.0f} | {rounds} | {' | '.join(ratios)} |")
    setup = (
        f"{document['cards']} x {document['gpu']}, {document['model']}, {document['per_card_batch']} a card, torch"
        f" {document['torch']}, Python {document['python']}; `{document['command']}`"
    )
    return "\n".join([*lines, "", setup])


def patterns_table(document: dict[str, Any]) -> str:
    """One training written in several ways."""
    rows = document["rows"]
    base = rows["one_card"].get("images_per_s")
    lines = [
        "| pattern | lines | images/s | every round | ÷ one card | peak MiB a card | host MiB | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        script = name.removesuffix("_ddp") if name != "ddp" else name
        shown = f"[`{name}`](../examples/patterns/{script}.py)"
        changed = "-" if name == "one_card" else f"+{row['lines_added']}, -{row['lines_removed']}"
        if "error" in row:
            lines.append(f"| {shown} | {changed} | failed | - | - | - | - | - |")
            continue
        rounds = ", ".join(f"{value:,.0f}" for value in row["images_per_s_all"])
        ratio = f"{row['images_per_s'] / base:.2f}" if base else "-"
        peaks = ", ".join(f"{value:,.0f}" for value in row["peak_mib"]) if row["peak_mib"] else "-"
        cells = [shown, changed, f"{row['images_per_s']:,.0f}", rounds, ratio, peaks, f"{row['host_mib']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} | {row['accuracy']:.1%} |")
    simulated = f"2 cards simulated on {document['cores']} CPU cores, which says nothing of real cards"
    where = simulated if document["gpu"] == "simulated" else f"{document['cards']} x {document['gpu']}"
    setup = (
        f"{where}; {document['task']}, torch {document['torch']}, Python {document['python']}; `{document['command']}`"
    )
    return "\n".join([*lines, "", setup])


def table(document: dict[str, Any]) -> str:
    """One file's rows, each way beside DDP and nn.DataParallel."""
    rows = document["rows"]
    if document.get("kind") == "patterns":
        return patterns_table(document)
    if any("said" in row for row in rows.values()):
        return script_table(document)
    speed = {way: row["samples_per_s"] for way, row in rows.items() if "samples_per_s" in row}
    lines = [
        "| way | samples/s | ms a step | every round, ms | ÷ ddp | ÷ torch_dp | peak MiB a card | losses beside ddp |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, row in rows.items():
        used = row["peak_mib"] if way != "single" else row["peak_mib"][:1]
        rounds = ", ".join(f"{value:.1f}" for value in row["step_ms_all"])
        difference = row["largest_loss_difference_to_ddp"]
        beside = [f"{speed[way] / speed[other]:.3f}" if other in speed else "-" for other in ("ddp", "torch_dp")]
        peaks = "-" if way in GRAPHED else ", ".join(f"{value:,.0f}" for value in used)
        shown = "-" if difference is None else f"{difference:.1e}"
        cells = [f"`{way}`", f"{speed[way]:,.0f}", f"{row['step_ms']:.2f}", rounds, *beside, peaks, shown]
        lines.append(f"| {' | '.join(cells)} |")
    setup = (
        f"{document['cards']} x {document['gpu']}, {document['per_card_batch']} a card, {document['precision']}, torch"
        f" {document['torch']}, NCCL {document['nccl']}, Python {document['python']}; `{document['command']}`"
    )
    return "\n".join([*lines, "", setup])


def rendered(text: str) -> str:
    """`text` with every marked table made anew."""

    def fill(match: re.Match[str]) -> str:
        document = json.loads((ROOT / "benchmarks" / "results" / match[1]).read_text())
        return f"<!-- results: {match[1]} -->\n{table(document)}\n<!-- end -->"

    return MARKED.sub(fill, text)


def main() -> int:
    """Rewrite the documents, or say whether they are up to date."""
    status = 0
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        made = rendered(text)
        if "--check" in sys.argv:
            status |= int(text != made)
        else:
            document.write_text(made, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
