"""Data: the order of global batches, each process's part of them, and what a step must know about a batch."""

from manycard.data.feed import BatchInfo, Feed
from manycard.data.image_files import CentreCrop, RandomResizedCrop, dali_pipeline, image_folder, images
from manycard.data.loader import GlobalLoader
from manycard.data.prints import content_print
from manycard.data.sampler import GlobalBatchSampler
from manycard.data.text import TokenBlocks, tokens

__all__ = [
    "BatchInfo",
    "CentreCrop",
    "Feed",
    "GlobalBatchSampler",
    "GlobalLoader",
    "RandomResizedCrop",
    "TokenBlocks",
    "content_print",
    "dali_pipeline",
    "image_folder",
    "images",
    "tokens",
]
