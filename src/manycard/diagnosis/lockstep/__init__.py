"""Lockstep: do cards and ranks hold the same, what differs, since when and why."""

from manycard.diagnosis.lockstep.check import LockstepReport, check_lockstep
from manycard.diagnosis.lockstep.watch import LockstepWatch

__all__ = ["LockstepReport", "LockstepWatch", "check_lockstep"]
