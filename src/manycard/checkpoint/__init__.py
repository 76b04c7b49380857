"""Checkpoints: files that are whole or not there, and the random state that belongs in them."""

from manycard.checkpoint.file import read_checkpoint, write_checkpoint
from manycard.checkpoint.rng import global_rng_state, load_global_rng_state

__all__ = ["global_rng_state", "load_global_rng_state", "read_checkpoint", "write_checkpoint"]
