"""Backends: who reads, decodes and augments. One file each; `choose` picks one."""

from manycard.data.images.backends.backend import Backend, DecodedBatch
from manycard.data.images.backends.choose import BACKENDS, default_workers, installed, make_backend, measure
from manycard.data.images.backends.inline import Inline

__all__ = [
    "BACKENDS",
    "Backend",
    "DecodedBatch",
    "Inline",
    "default_workers",
    "installed",
    "make_backend",
    "measure",
]
