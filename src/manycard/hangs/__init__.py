"""Noticing that a run makes no progress, and saying who waits where.

``pulse`` is what the process tells of itself as it works, ``stacks`` and ``collectives`` are what can be seen of it
from another thread, ``verdict`` (pure) makes words of that, ``watch`` is the thread that looks. Ranks of one run are
looked at together, by their launcher (`manycard.launch.hangs`).
"""

from manycard.hangs.pulse import PULSE, HangSettings, Pulse, hang_settings
from manycard.hangs.watch import answer_launcher, watch_this_process

__all__ = ["PULSE", "HangSettings", "Pulse", "answer_launcher", "hang_settings", "watch_this_process"]
