"""Where the time of a step goes, from a trace of torch.profiler, and what to do about it.

``trace`` reads it, ``breakdown`` and ``findings`` are pure, ``recording`` makes one.
"""

from manycard.diagnosis.profile.breakdown import PARTS, CardTime
from manycard.diagnosis.profile.findings import Opportunity, Setup, find_opportunities
from manycard.diagnosis.profile.per_card import split_by_card
from manycard.diagnosis.profile.recording import ProfileSettings, Recording
from manycard.diagnosis.profile.result import Profile, merged

__all__ = [
    "PARTS",
    "CardTime",
    "Opportunity",
    "Profile",
    "ProfileSettings",
    "Recording",
    "Setup",
    "find_opportunities",
    "merged",
    "split_by_card",
]
