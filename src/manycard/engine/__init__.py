"""Data parallel in one process: split, replicas, buckets, reduce, step."""

from manycard.engine.engine import Engine

__all__ = ["Engine"]
