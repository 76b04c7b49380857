"""Memory on real cards: fragments that were planted are found and their remedies tried; usual training has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys, torch
from torch import nn

share = torch.cuda.get_device_properties(0).total_memory // 300
first, later = (int(float(word) * share) for word in sys.argv[1:3])
net = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
kept = [torch.empty(first, dtype=torch.uint8, device="cuda") for _ in range(80)]
del kept
for number in range(60):
    kept = [torch.empty(later, dtype=torch.uint8, device="cuda") for _ in range(60)]
    net(torch.ones(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del kept
"""


def profiled(tmp_path: Path, *sizes: str) -> tuple[dict[str, Any], str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["--cards", "0,", "--steps", "3", "--skip", "4", "--json", str(script), *sizes]
    kept = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    command = [sys.executable, "-m", "manycard.cli", "profile", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=kept)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.timeout(300)
def test_planted_fragments_are_found_and_the_remedy_was_measured(tmp_path: Path) -> None:
    document, said = profiled(tmp_path, "1", "1.5")
    (found,) = [each for each in document["growth"] if "fragmented" in each["cause"]]
    assert "trying remedies" in said
    assert found["fix"].startswith("start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; it was tried here")
    assert "the same steps with expandable segments: " in found["evidence"]
    assert "with emptying the cache once: " in found["evidence"]
    (reserve,) = document["reserves"]
    assert reserve["reserved"] > 1.5 * reserve["peak"]


@pytest.mark.timeout(300)
def test_steps_of_one_size_have_no_fragments_and_nothing_is_tried(tmp_path: Path) -> None:
    document, said = profiled(tmp_path, "1.5", "1.5")
    assert [each for each in document["growth"] if "fragmented" in each["cause"]] == []
    assert "trying remedies" not in said
