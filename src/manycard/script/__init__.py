"""Running unmodified single-card scripts on all the cards."""

from manycard.script.calls import Interception
from manycard.script.spreading import ModuleReport, ScriptSpreading, SpreadSettings

__all__ = ["Interception", "ModuleReport", "ScriptSpreading", "SpreadSettings"]
