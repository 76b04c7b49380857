"""One training of an ablation, in a process of its own: ``python -m manycard.benchmark.ablation.worker FOLDER``.

It behaves as `manycard.benchmark.worker` does, on an `AblationSpec`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from manycard.benchmark.ablation.plan import AblationSpec
from manycard.benchmark.ablation.training import measure_recipe
from manycard.benchmark.worker import run_worker

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the row in the folder named by the only argument."""
    folder = Path(arguments[0])
    spec = AblationSpec.from_json((folder / "row.json").read_text(encoding="utf-8"))
    return run_worker(folder, spec, lambda began: measure_recipe(spec, folder, began))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
