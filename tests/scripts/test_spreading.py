"""Every script of the corpus on 1, 2, 3 and 4 cards: the log of one card, or refused or warned of in words."""

from __future__ import annotations

import pytest

from .corpus import CORPUS, Entry
from .logs import same_log
from .runs import Job, Runs

COUNTS = (1, 2, 3, 4)
LEFT_SPREAD = (
    *("causal_lm_padded", "digits_mlp", "gan_two_optimizers", "gpt_tied_weights", "grad_scaler_on", "hf_model_output"),
    *("knowledge_distillation", "lbfgs_closure", "maml_sinusoid", "segmentation_unet", "vae", "weighted_ignore_loss"),
)
"""Scripts that are run with all outputs left spread: losses outside, several modules, second derivatives."""
every_script = pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True, scope="module")
def all_at_once(request: pytest.FixtureRequest, runs: Runs) -> None:
    """Start what the tests of this module will ask for, so that no core waits."""
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and "entry" in values:
            entry, cards = values["entry"], values.get("cards", 2)
            runs.expect(Job(entry.path))
            runs.expect(_job(entry, cards))
            if entry.expect == "same_with_sync_batchnorm":
                runs.expect(Job(entry.path, cards))


def _job(entry: Entry, cards: int) -> Job:
    return Job(entry.path, cards, entry.expect == "same_with_sync_batchnorm")


@every_script
@pytest.mark.parametrize("cards", COUNTS)
def test_a_script_trains_as_on_one_card_or_says_why_not(runs: Runs, entry: Entry, cards: int) -> None:
    plain, spread = runs.result(Job(entry.path)), runs.result(_job(entry, cards))
    assert spread["status"] == 0, spread["stderr"]
    reports = spread["reports"]
    calls = sum(report["spread"] for report in reports)
    if cards == 1:
        assert same_log(plain["stdout"], spread["stdout"], tolerance=0.0) is None
        assert calls == 0
        return
    if entry.expect != "differs":
        assert same_log(plain["stdout"], spread["stdout"]) is None, spread["stderr"]
    if entry.expect == "one_card":
        assert not reports or any(report["whole"] for report in reports)
        return
    assert calls > 0, spread["stderr"]
    said = [why for report in reports for why in report["differs"]]
    assert bool(said) == (entry.expect == "differs")


@pytest.mark.parametrize("entry", [e for e in CORPUS if e.name in LEFT_SPREAD], ids=lambda e: e.name)
def test_outputs_left_on_their_cards_give_the_same_log(runs: Runs, entry: Entry) -> None:
    job = Job(entry.path, 3, entry.expect == "same_with_sync_batchnorm", outputs="spread")
    plain, spread = runs.result(Job(entry.path)), runs.result(job)
    assert spread["status"] == 0, spread["stderr"]
    assert same_log(plain["stdout"], spread["stdout"]) is None, spread["stderr"]
    assert sum(report["spread"] for report in spread["reports"]) > 0


@pytest.mark.parametrize("entry", [e for e in CORPUS if e.expect == "same_with_sync_batchnorm"], ids=lambda e: e.name)
@pytest.mark.parametrize("cards", COUNTS[1:])
def test_statistics_of_each_cards_part_are_said(runs: Runs, entry: Entry, cards: int) -> None:
    spread = runs.result(Job(entry.path, cards))
    assert spread["status"] == 0, spread["stderr"]
    assert any("BatchNorm" in why for report in spread["reports"] for why in report["differs"])
    assert "--sync-batchnorm" in spread["stderr"]
