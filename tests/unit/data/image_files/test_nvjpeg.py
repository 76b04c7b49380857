"""What nvJPEG is told, and where it is found; decoding itself needs a card (tests/gpu/test_images.py)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from manycard.data.image_files.backends import nvjpeg


def test_images_are_laid_out_as_the_library_reads_them() -> None:
    """nvjpegImage_t of nvjpeg.h: four addresses of planes, then four lengths of rows."""

    class Image(ctypes.Structure):
        _fields_ = [("channel", ctypes.c_void_p * 4), ("pitch", ctypes.c_size_t * 4)]

    sizes = np.array([(2, 3), (5, 4)])
    told = nvjpeg._images(np.array([1000, 2000]), sizes)
    read = (Image * 2).from_buffer_copy(told.tobytes())
    assert [list(image.channel)[:3] for image in read] == [[1000, 1006, 1012], [2000, 2020, 2040]]
    assert [list(image.pitch)[:3] for image in read] == [[3, 3, 3], [4, 4, 4]]
    assert read[0].channel[3] is None


def test_every_function_is_in_the_library() -> None:
    path = nvjpeg.find_library()
    if path is None:
        pytest.skip("this PyTorch brings no nvJPEG, as builds for the CPU")
    assert Path(path).is_file()
    long, short = nvjpeg._libraries()
    for name in nvjpeg._ARGUMENTS:
        assert getattr(long, name).argtypes == getattr(short, name).argtypes


def test_what_went_wrong_is_said() -> None:
    nvjpeg._check(0)
    with pytest.raises(RuntimeError, match="nvJPEG: the JPEG is damaged"):
        nvjpeg._check(3)
    with pytest.raises(RuntimeError, match="nvJPEG: status 77"):
        nvjpeg._check(77)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        nvjpeg._check(5)
