"""Finding the NCCL settings that are best on this machine, by measuring.

candidates  which settings are worth trying on which cards
sweep       trials interleaved with the default, and a decision beyond their noise
runner      one trial in a fresh process: NCCL reads its variables once
"""

from manycard.diagnosis.tuning.candidates import candidates_for
from manycard.diagnosis.tuning.runner import sizes_for, trial_runner
from manycard.diagnosis.tuning.sweep import Sweep, Trial, TrialFailed, sweep

__all__ = ["Sweep", "Trial", "TrialFailed", "candidates_for", "sizes_for", "sweep", "trial_runner"]
