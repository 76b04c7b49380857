"""Measuring how fast images come from files: photographs to measure on, and rows over backends and workers."""

from manycard.benchmark.data.photographs import make_photographs
from manycard.benchmark.data.reading import ReadingSettings, measure_reading

__all__ = ["ReadingSettings", "make_photographs", "measure_reading"]
