"""Running unmodified single-card scripts on all the cards."""

from manycard.script.calls import Interception
from manycard.script.loaders import FedLoaders
from manycard.script.spreading import ModuleReport, ScriptSpreading, SpreadSettings

__all__ = ["FedLoaders", "Interception", "ModuleReport", "ScriptSpreading", "SpreadSettings"]
