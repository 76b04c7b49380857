"""Images from files: decoded, augmented and normalised in batches, by whichever backend is fastest here.

view       the part of an image that a sample shows
augment    which view: from the sample's seed and the image's size
header     what a JPEG says before it is decoded
decode     bytes -> view, on the host
batched    whole images -> views, in one pass on any device
backends   threads, processes, DALI, a card; and choosing one
dataset    files and labels, as a loader takes them
folder     finding files, and the two functions for users
places     which devices a process decodes on
pipeline   a DALI pipeline of the user's own
"""

from manycard.data.image_files.augment import Augment, CentreCrop, RandomResizedCrop
from manycard.data.image_files.dataset import ImageFiles, ImageSample
from manycard.data.image_files.folder import image_folder, images
from manycard.data.image_files.pipeline import dali_pipeline

__all__ = [
    "Augment",
    "CentreCrop",
    "ImageFiles",
    "ImageSample",
    "RandomResizedCrop",
    "dali_pipeline",
    "image_folder",
    "images",
]
