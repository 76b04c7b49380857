"""A model cut into stages, one a card, with micro-batches in flight on all of them: in one process.

schedule    the order in which a stage works (pure)
balance     where to cut (pure)
probe       what a model is made of, and what its parts cost
planning    from those to a plan
attributes  tensors that are no parameters
stages      a plan put on cards
checkpoints activations that are computed again
cutting     a batch as micro-batches (pure)
copies      moving tensors between neighbours
carriers    forward passes that stop half-way
passage     one micro-batch on its way, and what crosses from stage to stage
flight      one batch under way
gradients   of replicas, summed
timeline    where the cards' time went
engine      all of it, with replicas side by side
"""

from manycard.pipeline.engine import PipelineEngine, PipelineSettings
from manycard.pipeline.timeline import Span, Timeline

__all__ = ["PipelineEngine", "PipelineSettings", "Span", "Timeline"]
