"""Choosing a strategy: facts and measurements in, a plan out. Touches no card.

facts        what is known
candidates   what could be done
reducing, step_time, memory   what each would take
forks        the questions of the decision tree
decide       the plan
card_models  figures of data sheets, for cards that aren't here
cache        plans that were made before
"""

from manycard.planner.candidates import Candidate, candidates
from manycard.planner.decide import make_plan, worth_a_trial
from manycard.planner.facts import WRITTEN, CardFacts, Facts, LinkFacts, ModelFacts, StepFacts, StepPoint
from manycard.planner.plan import Branch, Fork, Measured, Plan, Prediction

__all__ = [
    "WRITTEN",
    "Branch",
    "Candidate",
    "CardFacts",
    "Facts",
    "Fork",
    "LinkFacts",
    "Measured",
    "ModelFacts",
    "Plan",
    "Prediction",
    "StepFacts",
    "StepPoint",
    "candidates",
    "make_plan",
    "worth_a_trial",
]
