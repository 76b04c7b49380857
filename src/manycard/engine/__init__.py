"""Data parallel in one process.

driving        a thread a card, and what goes with its work: the caller's context, random states, times
batches        batches cut for the cards, and outputs joined
replicas       copies of a module and of its optimizer on every card, kept alike
recording      CUDA graphs of what a card does
spread_tensor  outputs that stay on the cards that made them
calls          one call of a module, spread, as a node of the script's graph
steps          a train step: forward and backward passes, losses, updates
engine         one module on several cards: all of that together
data_parallel  the drop-in for ``nn.DataParallel``
split_calls    calls cut and joined by functions of the script's
graphs         what is replayed as CUDA graphs, and why something isn't
"""

from manycard.engine.engine import Engine

__all__ = ["Engine"]
