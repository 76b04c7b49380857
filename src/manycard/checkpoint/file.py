"""A checkpoint file: written whole or not at all, read without running code from it.

Behaviour:
    * Writing goes to a temporary file in the same folder, which takes the path's place once every byte is on the
      disk. Whatever happens before that (a full disk, an exception, the process killed, power lost), the path holds
      the checkpoint it held before. Several processes may write to one path; each time one whole file wins.
    * A failed write leaves no temporary file. One left by a killed process is removed by the next write to the path.
    * Folders above the path are made, by whichever process comes first.
    * Only values that can be read back safely are written: tensors, numbers, strings, bytes, None, and tuples, lists,
      sets and dicts of them, and what `torch.serialization.add_safe_globals` allows. Anything else is refused by
      name before the disk is touched, not found out when the run is to be resumed.
    * Reading puts every tensor on the CPU, memory-mapped where the file system can, so that no rank puts its copy on
      the first card.

Source: https://pytorch.org/docs/stable/notes/serialization.html (weights_only, mmap).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from manycard.checkpoint.values import check_values
from manycard.errors import CheckpointError

__all__ = ["FORMAT", "VERSION", "read_checkpoint", "write_checkpoint"]

FORMAT = "manycard checkpoint"
"""What the key ``format`` of every file holds."""
VERSION = 1
"""What the key ``version`` holds; raised when an older manycard could not read what a newer one writes."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_writes = itertools.count()


def write_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path`, in place of what was there.

    Args:
        path: the file; folders above it are made.
        state: what `read_checkpoint` will give back.

    Raises:
        CheckpointError: a value can't be read back safely, or the file can't be written; what was at `path` is still
            there.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_checkpoint(folder / "run" / "last.pt", {"epoch": 3})
        >>> read_checkpoint(folder / "run" / "last.pt")
        {'epoch': 3}
    """
    check_values(state)
    # A link keeps pointing where it points; the file behind it is replaced.
    target = Path(os.path.realpath(path))
    if os.path.isdir(target):
        raise CheckpointError(
            f"the checkpoint can't be written to {path}: it is a directory", fix="give the path of a file in it"
        )
    temporary = target.with_name(f"{_prefix(target)}{os.getpid()}.{next(_writes)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        with _removed_on_failure(temporary):
            _write(temporary, {"format": FORMAT, "version": VERSION, "state": state})
            os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _unwritten(path, target, error) from error


def _prefix(target: Path) -> str:
    # The host is in the name because process ids mean nothing on another one that shares the folder.
    # Cut short, so that the whole stays under the 255 bytes a name may have.
    return f".{target.name[:80]}.{socket.gethostname()[:64]}."


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of processes of this host that have ended."""
    prefix = _prefix(target)
    for entry in os.scandir(target.parent):
        if entry.name.startswith(prefix) and entry.name.endswith(".tmp"):
            process = entry.name[len(prefix) :].split(".")[0]
            if process.isdigit() and not psutil.pid_exists(int(process)):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


@contextlib.contextmanager
def _removed_on_failure(temporary: Path) -> Any:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write(temporary: Path, content: dict[str, Any]) -> None:
    with open(temporary, "wb") as file:
        sink = _Sink(file)
        try:
            torch.save(content, sink)  # type: ignore[arg-type]
        except RuntimeError:
            # PyTorch's writer turns whatever stopped it, a full disk or Ctrl-C, into "unexpected pos".
            if sink.failure is not None:
                raise sink.failure from None
            raise
        file.flush()
        os.fsync(file.fileno())


class _Sink:
    """Hands bytes on to a file and remembers the failure that stopped it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk as well; file systems that can't do that for folders keep it anyway."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritten(path: str | os.PathLike[str], target: Path, error: OSError) -> CheckpointError:
    problem = f"the checkpoint can't be written to {path}: {error.strerror or error}"
    if error.errno in _FULL:
        with contextlib.suppress(OSError):
            problem += f"; {shutil.disk_usage(target.parent).free / 2**20:.0f} MiB are free there"
        fix = "free space, raise the limit on file sizes, or save to another folder; the checkpoint there is intact"
    elif error.errno in _FORBIDDEN:
        fix = f"make {target.parent} writable for this user, or save to another folder"
    elif error.errno in {errno.ENOTDIR, errno.EEXIST}:
        fix = "one of the folders in that path is a file: choose another path"
    else:
        fix = "save to another folder"
    return CheckpointError(problem, fix=fix)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote; tensors are on the CPU.

    Args:
        path: the file.

    Returns:
        The state that was written.

    Raises:
        CheckpointError: there is no such file, it is damaged, it is something else, or a newer manycard wrote it.
    """
    source = Path(path)
    content = _load(source)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a manycard checkpoint",
            fix="give a file that Parallel.save wrote; load weights alone with torch.load and model.load_state_dict",
        )
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"a newer manycard wrote {path}: its format is version {version}, and this one reads up to {VERSION}",
            fix="pip install --upgrade manycard",
        )
    state: dict[str, Any] = content["state"]
    return state


def _whats_there(source: Path) -> str:
    """The fix for a missing file: the names of its neighbours, where it has any."""
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(source.parent) if not entry.name.startswith("."))
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            return f"give one of the files in {source.parent}: {', '.join(names[:5])}{more}"
        return f"look for it elsewhere; {source.parent} is empty"
    return f"look for it elsewhere; there is no folder {source.parent}"


def _load(source: Path) -> Any:
    try:
        with open(source, "rb") as file:
            is_archive = file.read(4) == b"PK\x03\x04"
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"there is no checkpoint at {source}", fix=_whats_there(source)) from error
    except IsADirectoryError as error:
        raise CheckpointError(
            f"{source} is a directory, not a checkpoint", fix="give the path of a file in it"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{source} can't be read: {error.strerror or error}", fix="make it readable for this user"
        ) from error
    if not is_archive:
        empty = source.stat().st_size == 0
        raise CheckpointError(
            f"{source} is {'empty' if empty else 'not a manycard checkpoint'}",
            fix="give a file that Parallel.save wrote",
        )
    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            raise
        except (RuntimeError, OSError):
            # Some file systems can't map files; a damaged file fails here once more.
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} is not a manycard checkpoint: it holds objects that would run code when read",
            fix="give a file that Parallel.save wrote",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source} is damaged: it was cut short or changed after it was written ({_first_line(error)})",
            fix="resume from an older checkpoint, or copy the file again",
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
