"""What memory is for, card by card; what grows, and who keeps it."""

from manycard.diagnosis.memory_use.growth import GrowthWatch
from manycard.diagnosis.memory_use.split import CardMemory, Held, held_by, judge_memory, read_memory

__all__ = ["CardMemory", "GrowthWatch", "Held", "held_by", "judge_memory", "read_memory"]
