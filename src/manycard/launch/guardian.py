"""A small process that ends a run's ranks when the process that started them is killed outright.

Started as ``python guardian.py FOLDER`` with a pipe as its standard input. The launcher alone holds the other end:

    * a line in the pipe: the launcher has ended the run itself, and there is nothing to do;
    * the end of the pipe without a line: the launcher is gone (SIGKILL, a crash). Every rank's process group is
      killed, DataLoader workers and other children included, and FOLDER is removed.

Uses the standard library only and runs isolated from the environment, so it starts in milliseconds.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import sys


def _guard(folder: pathlib.Path) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.stdin.buffer.read():
        return
    for file in folder.glob("*/pid"):
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(pathlib.Path(sys.argv[1]))
