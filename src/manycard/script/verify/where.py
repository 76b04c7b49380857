"""Where a script is: the line of its own that is being run."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

__all__ = ["line_of_script"]

_NOT_THE_SCRIPTS = tuple(
    f"{Path(path).resolve()}{os.sep}"
    for path in (Path(torch.__file__).parent, Path(__file__).parents[2], sysconfig.get_path("stdlib"))
)


def line_of_script() -> str:
    """The script's line that is being run, as ``file:line``: the innermost that isn't a library's of this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<") and not os.path.realpath(name).startswith(_NOT_THE_SCRIPTS):
            shown = os.path.relpath(name)
            return f"{name if shown.startswith('..') else shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
