"""The user's face: `Parallel` and `Pipeline`, and what they are made of."""

from manycard.parallel.parallel import Parallel
from manycard.parallel.pipeline import Pipeline

__all__ = ["Parallel", "Pipeline"]
