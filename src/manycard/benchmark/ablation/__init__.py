"""What each setting of a training is worth: alone and together, from plain `nn.DataParallel` to manycard.

A `Recipe` is what one training is made of; a `Step` is a small change of it. `plan_rows` makes rows of them, `training`
runs one, and `run_ablation` all.
"""

from __future__ import annotations

from manycard.benchmark.ablation.plan import AblationSettings
from manycard.benchmark.ablation.running import run_ablation
from manycard.benchmark.ablation.steps import STEPS

__all__ = ["STEPS", "AblationSettings", "run_ablation"]
