"""Starting one process a card, through torchrun's own agent (`torch.distributed.launcher`).

Behaviour:
    * Success: `launch_script` returns when every rank has ended with status 0. Rank 0's output goes straight
      through; the other ranks' goes to files that are removed.
    * Failure: every rank has ended within seconds, and `RankFailed` is raised for the first that failed, with its
      traceback. What other ranks wrote is kept, and the error says where, unless they wrote nothing.
    * Ctrl-C: every rank gets SIGINT and a few seconds to save; then KeyboardInterrupt is raised. SIGTERM likewise,
      and then takes its usual course.
    * However it ends, SIGKILL to this process included, no process and no other file stays behind. Processes that
      ranks started end with them; one that is to live on needs a session of its own (``start_new_session=True``).

The store through which ranks find each other is opened on port 0 by the agent and shared with the ranks, so there
is no port to choose and none to lose to another process in between. Everything stays on the loopback interface.

Source: https://docs.pytorch.org/docs/stable/elastic/agent.html
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from manycard.cards.card import Card
from manycard.errors import HangError, LaunchError, RankFailed, SettingError
from manycard.hangs.collectives import RECORDER_ENVIRONMENT
from manycard.launch.failures import first_failure, rank_failed
from manycard.launch.folder import RankFolder
from manycard.launch.script import Script
from manycard.launch.watch import RankWatch

__all__ = ["cards_setting", "launch_script"]

_LOOPBACK = "127.0.0.1"
_RANK = str(Path(__file__).with_name("rank.py"))
_GUARDIAN = str(Path(__file__).with_name("guardian.py"))

_SET_BY_AGENT = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class _Running:
    """How many runs this process has at once, and what the agent's variable was before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before: str | None = None


_running = _Running()


def launch_script(
    argv: Sequence[str], cards: Sequence[Card], env: dict[str, str] | None = None, *, own_card: bool = False
) -> None:
    """Run a script once per card, each in a process of its own.

    Args:
        argv: ``[script, *arguments]``, or ``["-m", module, *arguments]``.
        cards: rank i uses ``cards[i]``.
        env: variables to set in every rank, besides those that torchrun sets, MANYCARD_CARDS, OMP_NUM_THREADS and
            MANYCARD_RANK_FOLDER (a folder for the time of the run).
        own_card: let each rank see its own GPU alone, as ``cuda:0``, for scripts that name it so.

    Raises:
        SettingError: there is nothing to run, or no card to run it on.
        RankFailed: a rank failed; this is the first one.
        HangError: ranks waited for one another; says who waits where.
        LaunchError: the ranks could not be started.
        KeyboardInterrupt: this process was interrupted; every rank has ended.

    Example:
        >>> launch_script(["train.py", "--lr", "0.1"], choose_cards("cpu:2").cards)  # doctest: +SKIP
    """
    script = Script.parse(argv)
    script.check()
    if not cards:
        raise SettingError("cards", [], "ranks need at least one card", fix="choose a card, or cpu:1")
    run = Path(tempfile.mkdtemp(prefix="manycard-"))
    watch = RankWatch(run, len(cards))
    with watch.signals():
        try:
            with _guarded(run), contextlib.closing(watch):
                watch.start()
                visible = [card.uuid for card in cards] if own_card and not cards[0].simulated else []
                devices = ["cuda:0"] * len(cards) if visible else [str(card.device) for card in cards]
                variables = _rank_environment(len(cards), "0," if visible else cards_setting(cards), env or {})
                _run_agent(script, devices, _RankOutput(run, variables, visible), run, watch)
        except (SignalException, LaunchError):
            if watch.stopped_by is None:
                raise
        finally:
            _remove(run, keep_output=isinstance(sys.exc_info()[1], RankFailed | HangError))
    if watch.stopped_by is not None:
        _stop_by(watch.stopped_by)


def cards_setting(cards: Sequence[Card]) -> str:
    """What chooses `cards` again, in the words of ``--cards``.

    Example:
        >>> cards_setting([Card(0, torch.device("cuda:2"))]), cards_setting([Card(0, torch.device("cpu"))])
        ('2,', 'cpu:1')
    """
    if cards[0].simulated:
        return f"cpu:{len(cards)}"
    return ",".join(str(card.device.index) for card in cards) + ("," if len(cards) == 1 else "")


def _run_agent(script: Script, devices: Sequence[str], output: _RankOutput, run: Path, watch: RankWatch) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(devices),
        run_id=uuid.uuid4().hex,
        role="manycard",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",
        rdzv_configs={"is_host": True, "timeout": 900},
        local_addr=_LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=output,
        signals_to_handle="",  # RankWatch handles them: the agent's handlers would stay installed for good
    )
    words = [_RANK, str(run), str(os.getpid()), ",".join(devices), *script.argv]
    # The agent treats its arguments as templates: `$$` stands for `$`.
    words = [word.replace("$", "$$") for word in words]
    try:
        with _quiet_agent(), _kept_environment():
            elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        if watch.hang is not None:
            if _output_of_others(run):
                watch.hang.report += f"\nsee the output of the ranks from 1 on in {run}"
            raise watch.hang from None
        exit_codes = {number: failure.exitcode for number, failure in error.failures.items()}
        found = first_failure(watch.reports(), exit_codes, watch.deaths, killed=watch.killed)
        if found is None:
            raise LaunchError(f"the ranks failed with exit statuses {exit_codes}") from None
        failed = rank_failed(*found, fallback_trace=RankFolder.of(run, found[0]).stderr_tail())
        _tell_where_output_is(failed, run)
        raise failed from None
    except SignalException:
        raise
    except Exception as error:
        raise LaunchError(f"the ranks could not be started: {type(error).__name__}: {error}") from error


class _RankOutput(LogsSpecs):
    """Rank 0 writes straight through, the others to files; and every rank gets its environment."""

    def __init__(self, run: Path, env: dict[str, str], visible: Sequence[str] = ()) -> None:
        super().__init__(log_dir=str(run))
        self._run = run
        self._env = env
        self._visible = visible

    @property
    def root_log_dir(self) -> str:
        return str(self._run)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = LogsDest()
        for number, variables in envs.items():
            variables.update(self._env)
            folder = RankFolder.of(self._run, number)
            folder.path.mkdir()
            variables["MANYCARD_RANK_FOLDER"] = str(folder.path)
            if self._visible:
                variables["CUDA_VISIBLE_DEVICES"] = self._visible[number]
            destinations.stdouts[number] = "" if number == 0 else str(folder.stdout)
            destinations.stderrs[number] = "" if number == 0 else str(folder.stderr)
            # Where torch's own @record writes, in scripts that use it.
            variables["TORCHELASTIC_ERROR_FILE"] = str(folder.path / "torch_error.json")
            destinations.error_files[number] = variables["TORCHELASTIC_ERROR_FILE"]
        return destinations


def _rank_environment(ranks: int, cards: str, env: dict[str, str]) -> dict[str, str]:
    variables = {"MANYCARD_CARDS": cards, **RECORDER_ENVIRONMENT}
    interface = _loopback_interface()
    if interface:
        variables.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    if ranks > 1:
        cores = _cores()
        variables["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
        if "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in env:
            print(
                f"manycard: {ranks} ranks share {cores} CPU cores: OMP_NUM_THREADS="
                f"{variables['OMP_NUM_THREADS']} in each (set it yourself to choose another)",
                file=sys.stderr,
            )
    chosen_by_user = {name for name in variables if name in os.environ and name != "MANYCARD_CARDS"}
    return {name: value for name, value in variables.items() if name not in chosen_by_user} | env


def _cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _loopback_interface() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == _LOOPBACK for a in addresses):
            return str(name)
    return None


@contextlib.contextmanager
def _guarded(run: Path) -> Iterator[None]:
    """Have a small process beside this one that cleans up if this one is killed outright."""
    command = [sys.executable, "-I", "-S", _GUARDIAN, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.communicate(b"ended\n")


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's log of what it does, and its banner, off standard error."""
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    loggers = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False


@contextlib.contextmanager
def _kept_environment() -> Iterator[None]:
    """Take back, after the last of the runs at once, the one variable that torchrun's API sets in this process."""
    with _running.lock:
        if _running.count == 0:
            _running.before = os.environ.get(_SET_BY_AGENT)
        _running.count += 1
    try:
        yield
    finally:
        with _running.lock:
            _running.count -= 1
            if _running.count == 0:
                if _running.before is None:
                    os.environ.pop(_SET_BY_AGENT, None)
                else:
                    os.environ[_SET_BY_AGENT] = _running.before


def _output_of_others(run: Path) -> list[Path]:
    return sorted(file for file in run.glob("*/std*.log") if file.stat().st_size > 0)


def _tell_where_output_is(failed: RankFailed, run: Path) -> None:
    if _output_of_others(run):
        where = f"see the output of the ranks from 1 on in {run}"
        failed.fix = f"{failed.fix}; {where}" if failed.fix else where


def _remove(run: Path, *, keep_output: bool) -> None:
    if not keep_output or not _output_of_others(run):
        shutil.rmtree(run, ignore_errors=True)
        return
    kept = set(_output_of_others(run))
    for path in run.glob("*/*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path not in kept:
            path.unlink()
    for folder in run.iterdir():
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _stop_by(number: int) -> None:
    """Let the signal that ended the run take its usual course in this process."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(number)
    raise LaunchError(f"the run was stopped by {signal.Signals(number).name}")
