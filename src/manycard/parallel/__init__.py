"""The user's face: `Parallel`, and what it is made of."""

from manycard.parallel.parallel import Parallel

__all__ = ["Parallel"]
