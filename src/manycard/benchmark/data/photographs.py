"""Realistic JPEGs without a download: parts of the photographs that scikit-learn and scikit-image ship.

Behaviour:
    * 500 x 375 pixels, ImageNet's most frequent size, 4:2:0 as cameras write. The quality is chosen for each
      photograph so that its files have about the wanted size: at 110 KB, ImageNet's mean, decoding costs about
      what it does there; at 50 KB it is a third faster.
    * The same number and size give the same files. Ten classes, named ``class-0`` to ``class-9``.
    * What is not installed is left out; with neither package there is nothing to write.
"""

from __future__ import annotations

import importlib.util
import io
import random
from pathlib import Path
from typing import Any

from manycard.errors import MissingExtraError, SettingError

__all__ = ["make_photographs"]

_WIDTH, _HEIGHT = 500, 375
_SHIPPED = {
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "skimage": ("data/astronaut.png", "data/coffee.png", "data/chelsea.png", "data/rocket.jpg", "data/retina.jpg"),
}
_CLASSES = 10


def make_photographs(folder: Path, number: int, kilobytes: float = 110) -> dict[str, Any]:
    """Write `number` JPEGs below `folder`.

    Args:
        folder: made where it isn't there.
        number: of files.
        kilobytes: mean size of a file, in units of 1,000 bytes; reached within about a tenth.

    Returns:
        ``{"folder": ..., "images": number, "mean_kilobytes": ...}``.

    Raises:
        MissingExtraError: Pillow, or both packages with photographs, are not installed.
        SettingError: the folder can't be written.
    """
    photographs = _open_shipped()
    draw = random.Random(0)
    qualities: dict[int, int] = {}
    written = 0
    try:
        for index in range(number):
            which = index % len(photographs)
            image = _part(photographs[which], draw)
            if which not in qualities:
                qualities[which] = _quality(image, kilobytes)
            data = _encoded(image, qualities[which])
            # The next part of the same photograph may be busier; move towards the wanted size.
            step = 1 if len(data) < 950 * kilobytes else -1 if len(data) > 1050 * kilobytes else 0
            qualities[which] = min(max(qualities[which] + step, 30), 100)
            path = folder / f"class-{index % _CLASSES}" / f"{index:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            written += len(data)
    except OSError as error:
        raise SettingError("PATH", str(folder), f"files can't be written there ({error.strerror})") from error
    return {"folder": str(folder), "images": number, "mean_kilobytes": round(written / number / 1000, 1)}


def _open_shipped() -> list[Any]:
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError("Pillow", "vision", "writing JPEGs")
    from PIL import Image

    found = []
    for package, names in _SHIPPED.items():
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or [] if spec is not None else []:
            found += [Image.open(Path(root) / name).convert("RGB") for name in names if (Path(root) / name).exists()]
    if not found:
        raise MissingExtraError("scikit-learn or scikit-image", "demo", "photographs to write")
    return found


def _part(photograph: Any, draw: random.Random) -> Any:
    """A part of a photograph in the wanted shape, resized."""
    from PIL import Image

    width = min(photograph.width, photograph.height * _WIDTH / _HEIGHT) * draw.uniform(0.6, 1)
    height = width * _HEIGHT / _WIDTH
    left, top = draw.uniform(0, photograph.width - width), draw.uniform(0, photograph.height - height)
    box = (left, top, left + width, top + height)
    return photograph.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS, box=box)


def _encoded(image: Any, quality: int) -> bytes:
    with io.BytesIO() as written:
        image.save(written, "JPEG", quality=quality, subsampling="4:2:0")
        return written.getvalue()


def _quality(image: Any, kilobytes: float) -> int:
    """The smallest quality at which `image` has the wanted size."""
    low, high = 30, 100
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_encoded(image, middle)) >= 1000 * kilobytes else (middle + 1, high)
    return low
