"""Headers are read as Pillow reads them, and files that are cut off are refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from manycard.data.image_files.header import BadImage, read_header
from tests.unit.data.image_files import odd


def encoded(image: Image.Image, **settings: object) -> bytes:
    with io.BytesIO() as written:
        image.save(written, "JPEG", **settings)
        return written.getvalue()


@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"subsampling": "4:4:4"}])
def test_size_of_plain_jpegs(settings: dict[str, object]) -> None:
    assert read_header(encoded(odd.photograph(), **settings)) == (640, 427, 1)
    assert read_header(encoded(odd.photograph().convert("L"), **settings)) == (640, 427, 1)


@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int, order: str) -> None:
    exif = Image.Exif()
    exif.endian = "<" if order == "II" else ">"
    exif[0x010E] = "a description before it"
    exif[0x0112] = orientation
    data = encoded(odd.photograph(), exif=exif)
    assert order.encode() in data[:40]
    header = read_header(data)
    assert header is not None
    assert header.orientation == orientation
    assert header.upright == ((640, 427) if orientation < 5 else (427, 640))


def test_an_orientation_that_makes_no_sense_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    header = read_header(encoded(odd.photograph(), exif=exif))
    assert header is not None
    assert header.orientation == 1


@pytest.mark.parametrize("kind", ["cmyk", "rgb-jpeg", "png", "png16-rgb", "webp"])
def test_other_images_have_none(kind: str, tmp_path: Path) -> None:
    path, _ = odd.write(kind, tmp_path)
    assert read_header(Path(path).read_bytes()) is None


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.9, 0.9999])
def test_cut_off_files_are_refused(share: float) -> None:
    # A thumbnail in the header has an end of its own, which must not pass for the image's.
    thumbnail = encoded(odd.photograph().resize((64, 43)))
    exif = Image.Exif()
    exif[0x010E] = "x"
    data = encoded(odd.photograph(), exif=exif.tobytes() + thumbnail)
    assert data.find(b"\xff\xd9") < len(data) // 2
    assert read_header(data) == (640, 427, 1)
    with pytest.raises(BadImage):
        read_header(data[: int(len(data) * share)])


def test_damaged_header_is_refused() -> None:
    data = bytearray(encoded(odd.photograph()))
    data[2] = 0
    with pytest.raises(BadImage, match="damaged"):
        read_header(bytes(data))


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xd8", b"no image at all"])
def test_what_is_no_jpeg_has_none(data: bytes) -> None:
    assert read_header(data) is None
