"""What memory is for, card by card; what grows, and who keeps it."""

from manycard.diagnosis.memory_use.fragments import REMEDIES, Reserve, Tried, judge_fragments, reserves_of_process
from manycard.diagnosis.memory_use.growth import GrowthWatch
from manycard.diagnosis.memory_use.split import CardMemory, Held, held_by, judge_memory, read_memory

__all__ = [
    "REMEDIES",
    "CardMemory",
    "GrowthWatch",
    "Held",
    "Reserve",
    "Tried",
    "held_by",
    "judge_fragments",
    "judge_memory",
    "read_memory",
    "reserves_of_process",
]
