"""Scripts of the corpus with one process a card: the log of one card, in every rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from manycard.cards import choose_cards
from manycard.launch import launch_script

from .corpus import CORPUS, Entry
from .logs import same_log
from .runs import ENVIRONMENT, Job, Runs

RANKS = 2
WORKER = Path(__file__).with_name("ranks_worker.py")
NAMES = {
    "batchnorm_cnn",
    "bigram_counts",
    "char_rnn",
    "checkpointed_blocks",
    "clip_features",
    "contrastive_in_batch",
    "counts_in_class",
    "ctc_speech",
    "dataclass_output",
    "dcgan_batchnorm",
    "detection_losses_per_image",
    "diffusion_inside",
    "dropout_mlp",
    "early_stopping",
    "ema_model",
    "fgsm_adversarial",
    "functional_training",
    "gan_two_optimizers",
    "gpt_tied_weights",
    "grad_accumulation",
    "gradual_unfreezing",
    "hf_padded_labels",
    "iterable_dataset",
    "lazy_modules",
    "lbfgs_closure",
    "mixup_inside",
    "nn_data_parallel",
    "prints_tensors",
    "rare_class_weighted",
    "returns_counts",
    "softmax_over_batch",
    "sparse_embeddings",
    "stateful_attribute",
    "trainer_class",
    "two_backwards",
    "uneven_batches",
    "whole_model_saved",
}
ENTRIES = [entry for entry in CORPUS if entry.name in NAMES]
NOT_DIFFERENTIATED_TWICE = [entry for entry in CORPUS if entry.name == "wgan_gradient_penalty"]

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Ended:
    """How one script ended in its ranks."""

    folder: Path

    def status(self) -> list[str]:
        """By rank."""
        return [(self.folder / f"{rank}.status").read_text() for rank in range(RANKS)]

    def log(self, rank: int, ending: str = "out") -> str:
        """What a rank printed."""
        return (self.folder / f"{rank}.{ending}").read_text()

    def reports(self) -> list[dict[str, Any]]:
        """What was spread."""
        found: list[dict[str, Any]] = json.loads((self.folder / "spread.json").read_text())
        return found


@pytest.fixture(scope="module")
def in_ranks(tmp_path_factory: pytest.TempPathFactory, runs: Runs) -> Path:
    """The folder of a launch in which every script was run."""
    root = tmp_path_factory.mktemp("ranks")
    jobs = []
    for entry in (*ENTRIES, *NOT_DIFFERENTIATED_TWICE):
        runs.expect(Job(entry.path))
        synced = entry.expect == "same_with_sync_batchnorm"
        jobs.append({"name": entry.name, "path": str(entry.path), "sync_batchnorm": synced})
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {name: ENVIRONMENT[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
    launch_script([str(WORKER), str(root)], choose_cards(f"cpu:{RANKS}").cards, environment)
    return root


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_rank_prints_the_log_of_one_card(in_ranks: Path, runs: Runs, entry: Entry) -> None:
    ended = Ended(in_ranks / entry.name)
    assert ended.status() == ["0"] * RANKS, ended.log(0, "err") + ended.log(1, "err")
    for rank in range(1, RANKS):
        assert same_log(ended.log(0), ended.log(rank), tolerance=0.0) is None
    if entry.expect != "differs":
        assert same_log(runs.result(Job(entry.path))["stdout"], ended.log(0)) is None, ended.log(0, "err")
    calls = sum(report["spread"] for report in ended.reports())
    assert calls > 0 or entry.expect == "one_card"
    assert "manycard: " in ended.log(0, "err").splitlines()[-1]


def test_all_are_there() -> None:
    assert len(ENTRIES) == len(NAMES)
    assert {entry.expect for entry in ENTRIES} == {entry.expect for entry in CORPUS}


@pytest.mark.parametrize("entry", NOT_DIFFERENTIATED_TWICE, ids=lambda entry: entry.name)
def test_gradients_of_gradients_are_refused_in_words(in_ranks: Path, entry: Entry) -> None:
    ended = Ended(in_ranks / entry.name)
    assert ended.status() == ["1"] * RANKS
    assert "create_graph=True doesn't go through a call that is spread over ranks" in ended.log(0, "err")
