"""What every test must leave as it found it.

A test that changes one of these fails, and the state is put back so that only the guilty test does:
environment variables, the default process group, threads that would keep the process or a card alive, processes that
it started and didn't wait for, the default dtype, grad mode, TF32 flags, the handler of Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

# NCCL settings that were saved on this machine are no part of any test.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="manycard-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

# A parent that ignores these (nohup, a background job) hands that down to every process that a test starts and then
# interrupts.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

# Simulated cards of several ranks share this machine's cores; one thread each keeps small tests quick.
torch.set_num_threads(1)

SECONDS_TO_END = 5.0
"""How long threads of a dropped engine, and processes, may take to end."""
FOR_GOOD = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor")
"""What Python and PyTorch start once and keep for as long as this process lives."""


def _flags() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "TF32 in matrix products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 in convolutions": torch.backends.cudnn.allow_tf32,
        "handler of Ctrl-C": signal.getsignal(signal.SIGINT),
    }


def _put_back(flags: dict[str, Any]) -> None:
    torch.set_default_dtype(flags["default dtype"])
    torch.set_grad_enabled(flags["grad mode"])
    torch.use_deterministic_algorithms(flags["deterministic algorithms"])
    torch.backends.cuda.matmul.allow_tf32 = flags["TF32 in matrix products"]
    torch.backends.cudnn.allow_tf32 = flags["TF32 in convolutions"]
    signal.signal(signal.SIGINT, flags["handler of Ctrl-C"])


def _keeps_something(thread: threading.Thread) -> bool:
    """Whether a thread left behind keeps the process or a card: any of ours, and any that is no daemon."""
    return not thread.daemon or any(word in thread.name.lower() for word in ("card", "cpu:", "cuda:"))


def threads_left(before: set[threading.Thread], seconds: float = SECONDS_TO_END) -> list[threading.Thread]:
    """The threads that are new since `before` and still keep something after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        left = [thread for thread in set(threading.enumerate()) - before if _keeps_something(thread)]
        if not left or time.monotonic() > end:
            return left
        gc.collect()
        time.sleep(0.01)


def _children() -> set[int]:
    """Processes that this one has started and not waited for; none where the system has no list of them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # a thread may end meanwhile
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as listed:
                found.update(map(int, listed.read().split()))
    return found


def _command(process: int) -> str:
    try:
        with open(f"/proc/{process}/cmdline") as words:
            return words.read().replace("\0", " ").strip() or "has ended, and nobody has waited for it"
    except OSError:
        return "has ended"


def children_left(before: set[int], seconds: float = SECONDS_TO_END) -> list[str]:
    """The processes that are new since `before` and still there after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        new = [f"{child} ({_command(child)})" for child in sorted(_children() - before)]
        left = [child for child in new if not any(word in child for word in FOR_GOOD)]
        if not left or time.monotonic() > end:
            return left
        gc.collect()
        time.sleep(0.01)


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note which tests have failed: their traceback keeps what they made, threads included."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or bool(report.failed)
    return report


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaks, and mend what it leaked."""
    environment, flags, threads, children = dict(os.environ), _flags(), set(threading.enumerate()), _children()
    grouped = dist.is_available() and dist.is_initialized()
    yield
    leaks = []
    ignored = {
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_PTXAS_PATH",
    }  # PyTorch sets its own
    now = dict(os.environ)
    changed = sorted(key for key in {*now, *environment} - ignored if now.get(key) != environment.get(key))
    if changed:
        leaks.append(f"environment variables: {', '.join(changed)}")
        os.environ.clear()
        os.environ.update(environment)
    if dist.is_available() and dist.is_initialized() and not grouped:
        leaks.append("the default process group")
        dist.destroy_process_group()
    after = _flags()
    leaks.extend(f"{name}: {flags[name]} became {after[name]}" for name in flags if flags[name] != after[name])
    _put_back(flags)
    if not request.node.stash.get(_FAILED, False):
        leaks.extend(f"thread {thread.name}" for thread in threads_left(threads))
        leaks.extend(f"process {child}" for child in children_left(children))
    assert not leaks, f"the test left behind: {'; '.join(leaks)}"
