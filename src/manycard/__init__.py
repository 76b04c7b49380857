"""manycard: PyTorch training that works on one card, on all the cards of the machine.

>>> import manycard as mc
>>> mc.__version__
'0.1.0'
"""

from manycard.importing import without_collector

with without_collector():
    from manycard import errors
    from manycard.cards import Card, CardChoice, choose_cards
    from manycard.diagnosis.lockstep import LockstepReport, check_lockstep
    from manycard.engine.data_parallel import DataParallel
    from manycard.parallel import Parallel, Pipeline
    from manycard.script.session import load_ipython_extension, spread, unload_ipython_extension
    from manycard.version import __version__

__all__ = [
    "Card",
    "CardChoice",
    "DataParallel",
    "LockstepReport",
    "Parallel",
    "Pipeline",
    "__version__",
    "check_lockstep",
    "choose_cards",
    "errors",
    "load_ipython_extension",
    "spread",
    "unload_ipython_extension",
]
