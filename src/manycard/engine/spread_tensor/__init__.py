"""Outputs that stay on the cards that made them, behind one tensor that the script sees."""

from manycard.engine.spread_tensor import losses
from manycard.engine.spread_tensor.choosing import OUTPUTS, least_bytes
from manycard.engine.spread_tensor.held import Held, Home, Rows, sent
from manycard.engine.spread_tensor.tensor import SpreadTensor, plain

__all__ = ["OUTPUTS", "Held", "Home", "Rows", "SpreadTensor", "least_bytes", "losses", "plain", "sent"]
