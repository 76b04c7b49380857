"""The one place that talks to NVML, NVIDIA's management library, through nvidia-ml-py.

Behaviour:
    * `session` starts NVML and always shuts it down, also when its body raises. NVML counts its users, so
      sessions may be nested and may run beside another library's.
    * Without a driver, `session` yields None as `api` and the reason in words; nothing is raised.
    * One query that the card, the driver or the container doesn't answer is None, and never ends the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

__all__ = ["Session", "ask", "session"]

_MISMATCH: type[Exception] = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
"""What nvidia-ml-py raises, outside its own tree of errors, for a function that an old driver lacks."""


@dataclass(frozen=True)
class Session:
    """NVML, started, or the reason why it could not be."""

    api: Any
    """The module whose ``nvml...`` functions answer; None where there is no driver."""
    why_not: str = ""
    """Why `api` is None, in words; empty when it is there."""

    def ask(self, function: str, *args: Any) -> Any:
        """Call one NVML function by name; None where it isn't answered.

        Args:
            function: such as ``nvmlDeviceGetName``.
            args: its arguments, a device handle first for most.
        """
        return None if self.api is None else ask(self.api, function, *args)


@contextmanager
def session(api: Any = pynvml) -> Iterator[Session]:
    """Start NVML, and shut it down at the end.

    Args:
        api: the module to use; a test hands in its own.
    """
    try:
        api.nvmlInit()
    except (api.NVMLError, OSError) as failure:
        yield Session(None, _why(api, failure))
        return
    try:
        yield Session(api)
    finally:
        with suppress(api.NVMLError):
            api.nvmlShutdown()


def ask(api: Any, function: str, *args: Any) -> Any:
    """Call one NVML function; None where the card, the driver or the package doesn't have an answer."""
    try:
        return getattr(api, function)(*args)
    except (api.NVMLError, _MISMATCH, AttributeError):  # AttributeError: an older nvidia-ml-py without that function
        return None
    except (OSError, ValueError, TypeError, ctypes.ArgumentError):  # a driver that answers with something else
        return None


def _why(api: Any, failure: Exception) -> str:
    code = getattr(failure, "value", None)
    if code == api.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver is installed (its management library, libnvidia-ml, was not found)"
    if code == api.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but not loaded"
    if code == api.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated and the machine not restarted since (library and kernel module differ)"
    return f"NVIDIA's management library did not start: {failure}"
