"""Backends: who reads, decodes and augments. One file each; `choose` picks one."""

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.backends.choose import (
    BACKENDS,
    default_workers,
    installed,
    make_backend,
    measure,
    run_once,
)
from manycard.data.image_files.backends.inline import Inline

__all__ = [
    "BACKENDS",
    "Backend",
    "DecodedBatch",
    "Inline",
    "default_workers",
    "installed",
    "make_backend",
    "measure",
    "run_once",
]
