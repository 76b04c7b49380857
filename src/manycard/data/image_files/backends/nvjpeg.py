"""nvJPEG, the card's JPEG decoder, on a stream of our choice.

Behaviour:
    * Plain JPEGs of a batch go to the card's JPEG engine in one call; on a card without an engine, to nvJPEG's kernels.
      What the batched decoder doesn't take (progressive ones) is decoded one by one.
    * What nvJPEG queues comes before what is queued on the current stream afterwards. It does not wait for what was
      queued there before: memory that earlier work still reads or writes must not be given to it, nor may a second
      batch begin before the first has been decoded.
    * A JPEG that nvJPEG can't decode raises, and doesn't say which one it was.
    * One thread at a time.

The library is that which torchvision carries, or of the package ``nvidia-nvjpeg``, or of the CUDA toolkit.

Source: https://docs.nvidia.com/cuda/nvjpeg/
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manycard.data.image_files.backends.files import Encoded

__all__ = ["NvJpeg", "find_library"]

_DEFAULT, _GPU_HYBRID, _HARDWARE = 0, 2, 3
_RGB = 3
"""Three planes."""
_COMPONENTS = 4
"""What the library has room for: an image is the addresses of so many planes, then the bytes of a row in each."""
_OUT_OF_MEMORY = 5
_REASONS = {
    1: "it is not initialised",
    2: "it was given a wrong argument",
    3: "the JPEG is damaged",
    4: "this kind of JPEG is not supported",
    6: "its kernels failed",
    7: "the card is not supported",
    8: "it failed inside",
    9: "it is not implemented",
    10: "the JPEG is cut short",
}
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "nvjpegCreateEx": (c_int, c_void_p, c_void_p, ctypes.c_uint, c_void_p),
    "nvjpegDestroy": (c_void_p,),
    "nvjpegJpegStateCreate": (c_void_p, c_void_p),
    "nvjpegJpegStateDestroy": (c_void_p,),
    "nvjpegJpegStreamCreate": (c_void_p, c_void_p),
    "nvjpegJpegStreamDestroy": (c_void_p,),
    "nvjpegJpegStreamParseHeader": (c_void_p, c_void_p, c_size_t, c_void_p),
    "nvjpegGetImageInfo": (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p),
    "nvjpegDecodeBatchedSupported": (c_void_p, c_void_p, c_void_p),
    "nvjpegDecodeBatchedInitialize": (c_void_p, c_void_p, c_int, c_int, c_int),
    "nvjpegDecodeBatched": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "nvjpegDecode": (c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
}


@functools.cache
def find_library() -> str | None:
    """The file of nvJPEG's library; None where there is none."""
    return next((str(path) for path in _places() if path.is_file()), None) or ctypes.util.find_library("nvjpeg")


def _places() -> Iterator[Path]:
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is not None and torchvision.origin is not None:
        yield from Path(torchvision.origin).parent.parent.glob("torchvision.libs/libnvjpeg*.so*")
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or ()) if nvidia is not None else ():
        yield from Path(folder).glob("*/lib/libnvjpeg.so*")
    yield from Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")).glob("lib64/libnvjpeg.so*")


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The library twice: for calls that leave the interpreter to other threads, and for short ones that don't.

    A call of a microsecond that lets go of the interpreter waits for it again as long as other threads compute.
    """
    path = find_library()
    assert path is not None, "the backend was not to be made without nvJPEG"
    long, short = ctypes.CDLL(path), ctypes.PyDLL(path)
    for library in (long, short):
        for name, kinds in _ARGUMENTS.items():
            getattr(library, name).argtypes = kinds
    return long, short


def _check(status: int) -> None:
    if status == _OUT_OF_MEMORY:
        raise torch.cuda.OutOfMemoryError("nvJPEG could not get the card's memory it needs to decode")
    if status:
        raise RuntimeError(f"nvJPEG: {_REASONS.get(status, f'status {status}')}")


class NvJpeg:
    """nvJPEG on one card.

    Args:
        device: the card.

    Raises:
        RuntimeError: nvJPEG doesn't work on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._long, self._short = _libraries()
        self._batched, self._single = c_void_p(), c_void_p()
        self._batch_state, self._state, self._parsed = c_void_p(), c_void_p(), c_void_p()
        self._batch = 0
        """Images that the batched decoder is set up for."""
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the card's context this thread's
            if self._long.nvjpegCreateEx(_HARDWARE, None, None, 0, byref(self._batched)):
                _check(self._long.nvjpegCreateEx(_GPU_HYBRID, None, None, 0, byref(self._batched)))
            _check(self._long.nvjpegCreateEx(_DEFAULT, None, None, 0, byref(self._single)))
            _check(self._long.nvjpegJpegStateCreate(self._single, byref(self._state)))
            _check(self._long.nvjpegJpegStreamCreate(self._batched, byref(self._parsed)))

    def decode(self, encoded: Sequence[Encoded]) -> list[Tensor]:
        """Decode JPEGs; they are there for what is queued on the card's current stream from now on.

        Args:
            encoded: plain JPEGs, in memory that stays as it is until then; pinned, so that the host doesn't wait.

        Returns:
            uint8 ``[3, height, width]`` on the card.

        Raises:
            RuntimeError: one of them can't be decoded.
        """
        with torch.cuda.device(self.device):
            told = [self._read_header(each) for each in encoded]
            sizes = np.array([size for size, _ in told])
            planes = 3 * sizes[:, 0] * sizes[:, 1]
            room = torch.empty(int(planes.sum()), dtype=torch.uint8, device=self.device)
            images = _images(room.data_ptr() + planes.cumsum() - planes, sizes)
            stream = torch.cuda.current_stream().cuda_stream
            batched = [row for row, (_, taken) in enumerate(told) if taken]
            if batched:
                self._decode_batch([encoded[row] for row in batched], images[batched], stream)
            for row in sorted(set(range(len(encoded))) - set(batched)):
                each, image = encoded[row], images[row]
                _check(
                    self._long.nvjpegDecode(
                        self._single, self._state, each.address, each.length, _RGB, image.ctypes.data, stream
                    )
                )
        parts = torch.split(room, planes.tolist())
        return [part.view(3, *size) for part, (size, _) in zip(parts, told, strict=True)]

    def _read_header(self, encoded: Encoded) -> tuple[tuple[int, int], bool]:
        """Height and width of an image, and whether the batched decoder takes it."""
        components, subsampling, unsupported = c_int(), c_int(), c_int(1)
        widths, heights = (c_int * _COMPONENTS)(), (c_int * _COMPONENTS)()
        address, length = encoded.address, encoded.length
        _check(
            self._short.nvjpegGetImageInfo(
                self._single, address, length, byref(components), byref(subsampling), byref(widths), byref(heights)
            )
        )
        failed = (
            self._short.nvjpegJpegStreamParseHeader(self._batched, address, length, self._parsed)
            or self._short.nvjpegDecodeBatchedSupported(self._batched, self._parsed, byref(unsupported))
            or unsupported.value
        )
        return (heights[0], widths[0]), not failed

    def _decode_batch(self, encoded: Sequence[Encoded], images: Any, stream: int) -> None:
        count = len(encoded)
        if count != self._batch:
            if not self._batch_state:
                _check(self._long.nvjpegJpegStateCreate(self._batched, byref(self._batch_state)))
            self._batch = 0
            _check(self._long.nvjpegDecodeBatchedInitialize(self._batched, self._batch_state, count, 1, _RGB))
            self._batch = count
        addresses = np.array([each.address for each in encoded], np.uint64)
        lengths = np.array([each.length for each in encoded], np.uint64)
        status = self._long.nvjpegDecodeBatched(
            self._batched, self._batch_state, addresses.ctypes.data, lengths.ctypes.data, images.ctypes.data, stream
        )
        if status:
            # What a failed call leaves of its state is not told.
            self._long.nvjpegJpegStateDestroy(self._batch_state)
            self._batch_state, self._batch = c_void_p(), 0
        _check(status)

    def close(self) -> None:
        """Give back nvJPEG's memory, when the card has done what it was given."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self._long.nvjpegJpegStreamDestroy(self._parsed)
            for state in (self._batch_state, self._state):
                if state:
                    self._long.nvjpegJpegStateDestroy(state)
            for handle in (self._batched, self._single):
                self._long.nvjpegDestroy(handle)


def _images(addresses: Any, sizes: Any) -> Any:
    """Where decoded images go, as the library is told: uint64 ``[n, 8]``.

    Args:
        addresses: of the first plane of each, ``[n]``.
        sizes: height and width of each, ``[n, 2]``.
    """
    images = np.zeros((len(sizes), 2 * _COMPONENTS), np.uint64)
    for plane in range(3):
        images[:, plane] = addresses + plane * sizes[:, 0] * sizes[:, 1]
        images[:, _COMPONENTS + plane] = sizes[:, 1]
    return images
