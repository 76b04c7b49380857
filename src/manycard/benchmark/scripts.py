"""One row of a user's script, measured from inside.

Behaviour:
    * The script runs unmodified, in this process or in each rank. Its first `Parallel` is the one that is measured; the
      row's strategy, cards, precision and settings take the place of the script's own.
    * A step is a call of its train step; in an explicit loop it is a step of the optimizer after ``parallel.backward``.
      Samples are those of the batches that the loader has handed out, or that the train step was called with.
    * When enough steps are measured, the script ends there: `Measured` leaves the step's call, `finally` blocks run,
      and nothing of the script that follows does. It derives from BaseException, so that ``except Exception`` does
      not hold it up.
    * Where the steps are slower than was expected of them, the script goes on for a few more, which are profiled.
    * What happens between epochs (evaluation, checkpoints) isn't timed. A script that ends by itself before enough
      steps were steady gives what there is, and the row says so.
    * A script without a step gives an error that says what a step is.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from manycard.benchmark.axes import compile_argument, ddp_options
from manycard.benchmark.energy import EnergyMeter
from manycard.benchmark.measurement import Measurement, finite, found_by
from manycard.benchmark.meter import Figures, StepMeter
from manycard.benchmark.profiled import Expected, Look
from manycard.benchmark.progress_file import ProgressFile
from manycard.benchmark.results import write_json
from manycard.benchmark.row import RowSpec
from manycard.benchmark.training import MOST_LOSSES, make_meter
from manycard.data import GlobalLoader
from manycard.engine.batches.batch import count_samples
from manycard.errors import ManycardError, SettingError
from manycard.launch import Script, exit_status
from manycard.parallel import Parallel
from manycard.parallel.settings import seed_all
from manycard.strategies.train_step import TrainStep

__all__ = ["Measured", "ScriptWatch", "measure_script"]


class Measured(BaseException):
    """Enough is known: the script ends here."""


def measure_script(spec: RowSpec, folder: Path, began: float, expected: Expected | None = None) -> Measurement | None:
    """Run the row's script and measure it; None in ranks, where rank 0 has written the result."""
    seed_all(spec.seed)  # so that rows of a script that sets no seed start alike
    with ScriptWatch(spec, folder, began, expected) as watch:
        try:
            Script.parse(spec.script).run()
        except Measured:
            return None
        except SystemExit as request:
            status, text = exit_status(request)
            if status != 0 and not watch.finished:
                raise ManycardError(
                    f"the script ended with exit status {status} before enough steps were measured {text.strip()}"
                ) from None
        watch.end()
    if watch.finished or (watch.parallel is not None and not watch.parallel.is_primary):
        return None
    raise ManycardError(
        "the script made no training step that could be timed",
        fix="train with parallel.train_step, or with parallel.backward(loss) and the step of an optimizer that "
        "parallel.setup was given, for two steps at least",
    )


class ScriptWatch:
    """While it is entered, `Parallel` takes the row's settings, and its steps are timed.

    Args:
        spec: the row.
        folder: where progress and the result are written.
        began: ``time.time()`` when the row began.
        expected: what its speed is compared with.
    """

    def __init__(self, spec: RowSpec, folder: Path, began: float, expected: Expected | None = None) -> None:
        self._spec = spec
        self._folder = folder
        self._began = began
        self._cleanup = ExitStack()
        self.parallel: Parallel | None = None
        self.finished = False
        """Whether the result is written."""
        self._expected = expected
        self._look: Look | None = None
        """Once the timed steps are over, and were slower than expected."""
        self._row: Measurement | None = None
        """What they have shown."""
        self._meter: StepMeter | None = None
        self._model: Any = None
        self._optimizers: list[Optimizer] = []
        self._leader: Any = None
        """The train step, or the optimizer, whose steps are counted."""
        self._leading_loader: Any = None
        self._newest_loader: Any = None
        self._losses: list[Any] = []
        self._samples = 0
        self._seen: Any = None
        """What the feed said of the batch that was counted last."""

    # ---- taking the place of what the script calls ------------------------------------------------------------

    def __enter__(self) -> ScriptWatch:
        self._replace(Parallel, "__init__", self._make)
        self._replace(Parallel, "setup", self._set_up)
        self._replace(Parallel, "loader", self._make_loader)
        self._replace(Parallel, "train_step", self._make_step)
        self._replace(Parallel, "backward", self._backward)
        self._replace(Parallel, "close", self._close)
        self._replace(TrainStep, "__call__", self._step)
        self._replace(GlobalLoader, "__iter__", self._walk)
        return self

    def __exit__(self, *failure: object) -> None:
        self._cleanup.close()

    def _replace(self, kind: type[Any], name: str, call: Callable[..., Any]) -> None:
        original = getattr(kind, name)

        @functools.wraps(original)
        def instead(own: Any, *args: Any, **settings: Any) -> Any:
            return call(original, own, *args, **settings)

        setattr(kind, name, instead)
        self._cleanup.callback(setattr, kind, name, original)

    def _make(self, original: Any, own: Parallel, *args: Any, **settings: Any) -> None:
        bound = inspect.signature(original).bind(own, *args, **settings)
        bound.apply_defaults()
        given = dict(self._spec.settings)
        for name in ("accumulate", "sync_batchnorm"):
            if name in given:
                bound.arguments[name] = given[name]
        if "compile" in given:
            bound.arguments["compile"] = compile_argument(self._spec.settings)
        if options := ddp_options(self._spec.settings):
            bound.arguments["ddp_options"] = {**(bound.arguments["ddp_options"] or {}), **options}
        original(*bound.args, **bound.kwargs)
        if self.parallel is None:
            self.parallel = own
            progress = self._cleanup.enter_context(ProgressFile(self._folder / "progress" if own.is_primary else None))
            energy = self._cleanup.enter_context(EnergyMeter(own.cards if own.is_primary else []))
            self._meter = make_meter(self._spec, own, energy, self._began, progress.note)

    def _set_up(self, original: Any, own: Parallel, model: Any, *optimizers: Optimizer) -> Any:
        made = original(own, model, *optimizers)
        if own is self.parallel and optimizers:
            self._model = self._model if self._model is not None else made[0]
            self._optimizers += optimizers
        return made

    def _make_loader(self, original: Any, own: Parallel, dataset: Any, batch_size: Any = None, **settings: Any) -> Any:
        if self._spec.batch is not None:
            if batch_size is None or isinstance(dataset, DataLoader):
                raise SettingError(
                    "--batch" if self._spec.scaling == "strong" else "--per-card-batch",
                    self._spec.batch,
                    "the script's loader takes its batch size from a DataLoader",
                    fix="leave it out, or give batch_size to parallel.loader in the script",
                )
            batch_size = self._spec.batch
        return original(own, dataset, batch_size, **settings)

    def _make_step(self, original: Any, own: Parallel, *args: Any, **settings: Any) -> Any:
        if "graphs" in dict(self._spec.settings):
            settings["graphs"] = dict(self._spec.settings)["graphs"]
        return original(own, *args, **settings)

    def _close(self, original: Any, own: Parallel) -> None:
        if own is self.parallel:
            self.end()  # while ranks can still tell one another what they found
        original(own)

    def _walk(self, original: Any, own: GlobalLoader) -> Iterator[Any]:
        for batch in original(own):
            self._newest_loader = own
            if own is self._leading_loader and self._meter is not None:
                self._meter.resume()
            yield batch

    # ---- steps ------------------------------------------------------------------------------------------------

    def _step(self, original: Any, own: TrainStep, batch: Any) -> Any:
        if self.parallel is None or own._strategy is not self.parallel.strategy:
            return original(own, batch)
        self._lead(own)
        if own is self._leader and self._meter is not None:
            self._meter.resume()
        loss = original(own, batch)
        if own is self._leader:
            self._model = own._model
            held = count_samples(batch)
            feed = own._strategy.feed
            self._note(feed.samples(held), loss, ends_epoch=feed.ends_epoch(held))
        return loss

    def _backward(self, original: Any, own: Parallel, loss: Any) -> None:
        original(own, loss)
        if own is not self.parallel or (self._leader is not None and not isinstance(self._leader, Optimizer)):
            return
        if self._leader is None and self._optimizers:
            # Only now: a hook keeps an optimizer's updates out of CUDA graphs, and train steps have those.
            for optimizer in self._optimizers:
                handle = optimizer.register_step_post_hook(self._optimizer_stepped)
                self._cleanup.callback(handle.remove)
        feed = own.strategy.feed
        if feed.current is None:
            raise ManycardError(
                "the samples of a step can't be counted: its batch is not from parallel.loader",
                fix="load with parallel.loader, or train with parallel.train_step",
            )
        if feed.current is not self._seen:
            self._samples += feed.current.samples
            self._seen = feed.current
        if len(self._losses) < MOST_LOSSES:
            self._losses.append(loss.detach().mean())

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._lead(optimizer)
        if optimizer is self._leader and threading.current_thread() is threading.main_thread():
            samples, self._samples = self._samples, 0
            self._note(samples, None, ends_epoch=self._seen is not None and self._seen.last)

    def _lead(self, candidate: Any) -> None:
        if self._leader is None:
            self._leader, self._leading_loader = candidate, self._newest_loader

    def _note(self, samples: int, loss: Any, *, ends_epoch: bool) -> None:
        assert self._meter is not None, "there is a meter as soon as there is a Parallel"
        if self._look is not None:
            if self._look.done:
                self._finish_look()
                raise Measured
            return
        if loss is not None and len(self._losses) < MOST_LOSSES:
            self._losses.append(loss.detach())
        if self._meter.step(samples):
            if not self._finish(""):
                raise Measured
            return
        if ends_epoch and self._leading_loader is not None:
            self._meter.pause()

    # ---- the end ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Write what there is when the script ends by itself."""
        if self._look is not None:
            self._finish_look()
        elif not self.finished and self._meter is not None and self._meter.steps_done:
            self._finish(f"the script ended by itself after {self._meter.steps_done} steps", ended=True)

    def _finish_look(self) -> None:
        """Add what the steps after the timed ones have shown."""
        assert self._look is not None, "somebody looks"
        assert self._row is not None, "there is a row before anybody looks into it"
        look, self._look = self._look, None
        self._row = look.end(self._row)
        self._write()

    def _write(self) -> None:
        assert self._row is not None, "there is a row to write"
        assert self.parallel is not None, "steps are of a Parallel"
        if self.parallel.is_primary:
            write_json(self._folder / "result.json", self._row.to_row())

    def _finish(self, note: str, *, ended: bool = False) -> bool:
        """Write what the timed steps have shown; whether the steps that follow are looked into."""
        assert self.parallel is not None, "steps are of a Parallel"
        assert self._meter is not None, "there is a meter as soon as there is a Parallel"
        figures = self._meter.figures()
        if figures is None:
            return False
        if self._model is not None:
            self.parallel.check_lockstep(self._model)
        self.finished = True
        self._row = self._measured(figures, note)
        self._write()
        look = Look(self.parallel.strategy, self._expected)
        if ended or not look.begin(self._row.samples_per_s, self._row.step_ms, self._leading_loader):
            return False
        self._look = look
        self._cleanup.callback(look.close)
        return True

    def _measured(self, figures: Figures, note: str) -> Measurement:
        """The row that the timed steps make."""
        assert self.parallel is not None, "steps are of a Parallel"
        assert self._meter is not None, "there is a meter as soon as there is a Parallel"
        values = [finite(value) for value in torch.stack(self._losses).double().tolist()] if self._losses else []
        found = found_by(figures, simulated=self._spec.simulated)
        unread = [
            name for name, _ in self._spec.settings if name == "graphs" and not isinstance(self._leader, TrainStep)
        ]
        notes = [note] if note else []
        notes += [f"{name} is read by parallel.train_step only, which the script doesn't call" for name in unread]
        batch = max(round(block.samples / block.steps) for block in self._meter.blocks)
        row = self._spec.measurement(
            **found,
            batch=batch,
            losses=tuple(values),
            final_loss=values[-1] if values else None,
            note="; ".join(notes) or None,
        )
        return replace(row, precision=self.parallel.precision.name)
