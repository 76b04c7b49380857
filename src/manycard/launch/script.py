"""A Python script or module, run as ``python`` itself would run it, in this process.

Behaviour:
    * The code sees what it sees under ``python SCRIPT`` or ``python -m MODULE``: `__main__` (which classes can be
      pickled from), ``sys.argv``, ``sys.path[0]``, relative imports, the working folder. `__main__` stays in place
      when the code has ended, so that exit handlers and threads still find it.
    * What the code raises leaves `Script.run` unchanged, SystemExit and KeyboardInterrupt included. `own_traceback`
      cuts the frames that are manycard's off the front.
    * What can't be run (no such file, a folder, no Python) is refused by `Script.check`, which runs nothing.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
import tokenize
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

from manycard.errors import SettingError

__all__ = ["Script", "exit_status", "own_traceback"]

_LAUNCHERS = (__file__, runpy.__file__, "<frozen runpy>")


@dataclass(frozen=True)
class Script:
    """What is to be run.

    Example:
        >>> Script.parse(["train.py", "--lr", "0.1"])
        Script(name='train.py', arguments=('--lr', '0.1'), is_module=False)
        >>> Script.parse(["-m", "project.train"]).argv
        ['-m', 'project.train']
    """

    name: str
    """A path, or a dotted module name."""
    arguments: tuple[str, ...] = ()
    """What the code finds in ``sys.argv[1:]``."""
    is_module: bool = False
    """Whether `name` is a module's, as in ``python -m``."""

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Script:
        """Read ``[script, *arguments]`` or ``["-m", module, *arguments]``."""
        is_module = bool(argv) and argv[0] == "-m"
        words = argv[1:] if is_module else argv
        if not words:
            raise SettingError("argv", list(argv), "it names nothing to run", fix="give a script, or -m and a module")
        return cls(words[0], tuple(words[1:]), is_module)

    @property
    def argv(self) -> list[str]:
        """The words that `parse` reads."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def check(self) -> None:
        """Refuse what can't be run, without running any of it.

        Raises:
            SettingError: there is no such file or module, or it is not Python.
        """
        if self.is_module:
            if not _module_exists(self.name):
                fix = "start from the folder that holds it, or give the script's path without -m"
                raise SettingError("MODULE", self.name, "there is no such module", fix=fix)
            return
        if os.path.isdir(self.name):
            raise SettingError("SCRIPT", self.name, "it is a folder", fix="give the path of a Python script in it")
        if not os.path.exists(self.name):
            raise SettingError("SCRIPT", self.name, "there is no such file", fix="check the path")
        try:
            source = _read(self.name)
        except OSError as error:
            raise SettingError("SCRIPT", self.name, f"it can't be read ({error.strerror})") from error
        # A .py file with a syntax error is a script, and Python's own message shows the line.
        if not self.name.endswith((".py", ".pyw")) and not _is_python(source):
            raise SettingError("SCRIPT", self.name, "it is not Python", fix="give a Python script")

    def run(self) -> None:
        """Run the code to its end; whatever it raises leaves as it is."""
        sys.argv = [self.name, *self.arguments]
        _set_first_path(os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name)))
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        if "__mp_main__" in sys.modules:  # multiprocessing's second name for it, under which workers pickle
            sys.modules["__mp_main__"] = main
        if self.is_module:
            # What `python -m` calls itself; runpy.run_module would take `__main__` away again at the end.
            runpy._run_module_as_main(self.name)  # type: ignore[attr-defined]
            return
        path = os.path.abspath(self.name)
        main.__dict__.update(
            __builtins__=builtins, __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path)
        )
        main.__dict__["__package__"] = None
        exec(compile(_read(path), path, "exec", dont_inherit=True), main.__dict__)


def own_traceback(error: BaseException) -> types.TracebackType | None:
    """The traceback of `error` from the script's first frame on; None if none of its lines had run."""
    trace, following = None, error.__traceback__
    while following is not None:
        if following.tb_frame.f_code is Script.run.__code__:  # the innermost: one script may run another
            trace = following
        following = following.tb_next
    if trace is None:  # not raised under Script.run
        return error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _LAUNCHERS:
        trace = trace.tb_next
    return trace


def exit_status(exit_request: SystemExit) -> tuple[int, str]:
    """The exit status that Python gives for a SystemExit, and what it writes to standard error."""
    code = exit_request.code
    if code is None:
        return 0, ""
    if isinstance(code, int):
        return code & 0xFF, ""
    return 1, f"{code}\n"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_python(source: bytes) -> bool:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        compile(source.decode(encoding), "<script>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, LookupError):
        return False
    return True


def _module_exists(name: str) -> bool:
    """Look for a module without importing the packages above it, which could run anything."""
    first, *rest = name.split(".")
    full = first
    sys.path.insert(0, os.getcwd())
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(first)
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return False
            full = f"{full}.{part}"
            spec = PathFinder.find_spec(full, list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)
    return spec is not None


def _set_first_path(folder: str) -> None:
    """Put `folder` where Python puts the script's, in place of the one manycard itself was started from."""
    if getattr(sys.flags, "safe_path", False):
        return
    sys.path[:1] = [folder]
