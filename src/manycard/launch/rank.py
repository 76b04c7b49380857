"""What one rank runs: ``python rank.py FOLDER LAUNCHER DEVICES SCRIPT [ARGS]...`` (or ``-m MODULE`` for SCRIPT).

Behaviour, in this order:
    1. The rank dies when its launcher (process LAUNCHER) does, however that dies.
    2. Its card becomes the current one before anything else touches CUDA, so that no rank makes a context on the
       first card. DEVICES names one device a rank, such as ``cuda:0,cuda:2``; CUDA_VISIBLE_DEVICES is left alone.
    3. The script runs as under ``python``, lines of output going out as they are written. RANK, WORLD_SIZE,
       LOCAL_RANK, MASTER_ADDR and MASTER_PORT are in its environment, and no argument is added.
    4. A failure is written to FOLDER, for the launcher to print the first one of all ranks; this process prints
       nothing. The exit status is the script's own.
    5. What Python does at exit is done: threads are waited for, exit handlers run, files are flushed, what the script
       holds is let go. The interpreter itself is not taken down: a gloo thread that lets go of a tensor meanwhile
       would abort the process (seen with torch 2.14), and a run that had ended well would count as failed.
    6. A thread tells the launcher whether the script makes progress, and where it is (`manycard.hangs`).
    7. When the script ends well in several ranks that never joined in a process group, rank 0 says so: each of them
       has then done all of the work by itself.

It is started by its path, not by ``-m``, so that nothing in the working folder can stand in for a module that is
imported here.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0] = "/dev/null"  # for this file's folder, which no script should see, until the script's comes here

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def _die_with(launcher: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)


def _use_card(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind == "cuda":
        import torch

        torch.cuda.set_device(int(index))


def _formatted(error: BaseException) -> str:
    """What python would print, by the script's own ``sys.excepthook`` where it has set one."""
    from manycard.launch.script import own_traceback

    error = error.with_traceback(own_traceback(error))
    hook = sys.excepthook
    # The hook that init_process_group sets only puts the rank before each line.
    if hook is not sys.__excepthook__ and not hook.__module__.startswith("torch.distributed"):
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), contextlib.suppress(Exception):
            hook(type(error), error, error.__traceback__)
        if printed.getvalue().strip():
            return printed.getvalue()
    return "".join(traceback.format_exception(error))


def _note_groups() -> list[bool]:
    """The list that is returned fills when the script joins its ranks in a process group."""
    import torch.distributed as dist

    joined: list[bool] = []
    init_process_group = dist.init_process_group

    @functools.wraps(init_process_group)
    def note_and_init(*args: Any, **settings: Any) -> None:
        joined.append(True)
        init_process_group(*args, **settings)

    dist.init_process_group = note_and_init
    return joined


def _answer_launcher(here: Any) -> None:
    """Let the launcher see whether this rank makes progress, and ask it where it stands."""
    from manycard.hangs import PULSE, answer_launcher, hang_settings

    if "MANYCARD_HANG_TIMEOUT" in os.environ:
        PULSE.ask_for(hang_settings(os.environ["MANYCARD_HANG_TIMEOUT"]))
    PULSE.follow_optimizers()
    answer_launcher(here.path, f"rank {os.environ['RANK']}")


def _main(folder: str, launcher: str, devices: str, *argv: str) -> int:
    _die_with(int(launcher))
    local_rank = os.environ["LOCAL_RANK"]
    package_root = str(Path(__file__).resolve().parents[2])
    if package_root not in sys.path:  # the launcher may have found manycard by a path of its own
        sys.path.append(package_root)
    # Imported only now: these import torch, which takes seconds in which the launcher may die.
    from manycard.launch.failures import follows_from_a_peer
    from manycard.launch.folder import Failure, RankFolder
    from manycard.launch.local_rank import fill_local_rank
    from manycard.launch.script import Script, exit_status

    here = RankFolder.of(Path(folder), int(local_rank))
    _answer_launcher(here)
    here.write_pid()
    _use_card(devices.split(",")[int(local_rank)])
    fill_local_rank(local_rank)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    joined = _note_groups()
    try:
        Script.parse(argv).run()
    except SystemExit as request:
        status, text = exit_status(request)
        if status != 0:
            here.write_failure(Failure(time.time(), status, text, follows=False))
            return status
    except BaseException as error:
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        failed_at = time.time()
        here.write_failure(Failure(failed_at, status, _formatted(error), follows_from_a_peer(error)))
        return status
    here.write_ended()
    if not joined and os.environ["RANK"] == "0" and int(os.environ["WORLD_SIZE"]) > 1:
        print(
            f"manycard: each of the {os.environ['WORLD_SIZE']} ranks ran the whole script by itself: it made no "
            "mc.Parallel and no process group",
            file=sys.stderr,
        )
    return 0


def _leave(status: int) -> NoReturn:
    """End this process as Python would, up to the point where it takes the interpreter down."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()  # first: a file that is collected together with what refers to it may lose what it has not written
    for name in ("__main__", "__mp_main__"):
        sys.modules.pop(name, None)
    gc.collect()  # what the script's names hold is finalized, with everything still in place
    _flush()
    os._exit(status)


def _flush() -> None:
    """Flush every file that is open in this process."""
    for file in gc.get_objects():
        # By type: what an object itself says it is may run anything.
        if issubclass(type(file), io.IOBase.__base__ or io.IOBase):
            with contextlib.suppress(Exception):
                file.flush()


if __name__ == "__main__":
    _leave(_main(*sys.argv[1:]))
