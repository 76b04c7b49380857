"""The page of all findings, made of the tests that plant them: ``python -m tests.unit.diagnosis.findings_page``.

The doctor's rows come from the tables of `test_planted`; the others name the tests that plant a cause, and those that
hold that nothing is said without it. What the page says of tests is checked by `test_findings_page`.
"""

# ruff: noqa: E501 (a finding a line)

from __future__ import annotations

import re
from pathlib import Path

from manycard.diagnosis import diagnose
from tests.unit.diagnosis.test_planted import PLANTED, VARIABLES, variables

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "findings.md"
PROFILE = "unit/diagnosis/profile/test_breakdown.py"
GPU = "gpu/test_profile.py"
SPLIT, GROWTH = "unit/diagnosis/memory_use/test_split.py", "unit/diagnosis/memory_use/test_growth.py"
FRAGMENTS = "unit/diagnosis/memory_use/test_fragments.py"
RANKS, CARDS = "unit/diagnosis/lockstep/test_ranks.py", "unit/diagnosis/lockstep/test_cards.py"
VERDICT, HANGS = "unit/hangs/test_verdict.py", "unit/hangs/test_planted.py"
BENCH, LIVE = "unit/benchmark/test_findings.py", "unit/diagnosis/live/test_imbalance.py"
PROBES, DOCTOR = "unit/diagnosis/test_probes.py", "unit/diagnosis/test_planted.py"

COMPUTING = f"{PROFILE}::test_nothing_is_said_of_cards_that_compute"
EVEN = f"{SPLIT}::test_nothing_is_said_of_even_cards"
PLANTED_CAUSE = f"{RANKS}::test_a_planted_cause_is_named"
IN_LOCKSTEP = f"{RANKS}::test_nothing_is_said_of_ranks_in_lockstep"
NO_HANG = f"{VERDICT}::test_nobody_waits_or_somebody_debugs"
EVEN_USE = f"{LIVE}::test_small_differences_gaps_and_free_cards_are_none"
WELL = f"{DOCTOR}::test_a_machine_that_is_well_in_all_that_can_be_known_has_no_findings"
WELL_TOO = f"{PROBES}::test_a_machine_that_is_well_has_no_findings"

Row = tuple[str, str, str]
"""The cause, the test that plants it, and the one without it."""

SECTIONS: dict[str, tuple[str, list[Row]]] = {
    "Where the time goes": (
        "`manycard profile`, `parallel.profile()`, and `manycard bench` for rows of an efficiency under 0.9.",
        [
            ("the cards wait for data", f"{GPU}::test_a_slow_loader_is_told_as_such", f"{GPU}::test_a_loader_that_keeps_up_is_not_named"),
            ("one card holds the others back: the loss outside of the model runs there", f"{GPU}::test_a_first_card_that_has_the_loss_to_itself_is_named", f"{GPU}::test_even_cards_hold_nobody_back"),
            ("one card holds the others back: another process computes there too", f"{GPU}::test_a_card_that_another_process_holds_back_is_named", f"{GPU}::test_even_cards_hold_nobody_back"),
            ("one card holds the others back: it has more to do", f"{PROFILE}::test_a_first_card_that_has_the_loss_to_itself", COMPUTING),
            ("adding up gradients holds the cards up", f"{GPU}::test_reducing_that_nothing_hides_is_named_and_little_of_it_is_not", COMPUTING),
            ("`nn.DataParallel` sends the model to every card in each step", f"{PROFILE}::test_nn_data_parallel_that_sends_its_model_in_each_step", COMPUTING),
            ("the host can't launch kernels fast enough", f"{GPU}::test_a_host_bound_model_is_told_as_such", f"{GPU}::test_parts_add_up_and_cards_that_compute_have_no_finding"),
            ("the script's own code between the steps takes long", f"{GPU}::test_code_between_steps_is_told_as_such", COMPUTING),
            ("the script waits for the card in each step", f"{PROFILE}::test_waits_of_the_host_are_counted", COMPUTING),
            ("the optimizer takes more time than its fused kernels would", f"{PROFILE}::test_reducing_that_nothing_hides_and_an_unfused_optimizer", COMPUTING),
            ("copies to the cards hold computing up", f"{PROFILE}::test_copies_that_hold_computing_up", COMPUTING),
            ("the stages of a pipeline take unequal time", f"{BENCH}::test_a_pipeline_that_waits_or_is_uneven_says_so", f"{BENCH}::test_a_pipeline_that_waits_or_is_uneven_says_so"),
            ("the cards of a pipeline wait for micro-batches", f"{BENCH}::test_a_pipeline_that_waits_or_is_uneven_says_so", f"{BENCH}::test_a_pipeline_that_waits_or_is_uneven_says_so"),
            ("a row of a benchmark loses time between cards whose links are slow", f"{BENCH}::test_links_are_measured_once_where_rows_lose_time_between_cards", f"{BENCH}::test_links_are_left_alone_where_no_real_row_loses_time_between_cards"),
        ],
    ),
    "Memory": (
        "`manycard profile --memory`, `parallel.memory()`, `parallel.watch_memory()`.",
        [
            *((f"one card holds more than the others: {why}", f"{SPLIT}::test_a_card_that_holds_more_is_named_with_the_reason", EVEN) for why in ("outputs and the loss", "the optimizer's state", "gradients", "a module", "buffers", "a checkpoint or other tensors")),
            ("others use a card: contexts of other ranks, or other processes", f"{SPLIT}::test_contexts_of_other_ranks_on_the_first_card", EVEN),
            ("memory is fragmented", "gpu/test_memory.py::test_planted_fragments_are_found_and_the_remedy_was_measured", f"{FRAGMENTS}::test_memory_that_is_of_use_is_not_fragmented"),
            ("memory grows: losses are kept with their graphs", f"{GROWTH}::test_kept_losses_with_their_graphs_are_found", f"{GROWTH}::test_nothing_is_said_of_memory_that_only_moves"),
            ("memory grows: a sum whose graph grows", f"{GROWTH}::test_a_sum_of_losses_whose_graph_grows_is_found", f"{GROWTH}::test_nothing_is_said_of_memory_that_only_moves"),
            ("memory grows: an attribute keeps tensors of every step", f"{GROWTH}::test_a_megabyte_a_step_in_an_attribute_of_an_object", f"{GROWTH}::test_nothing_is_said_of_memory_that_only_moves"),
            ("memory grows: a list or dict keeps tensors of every step", f"{GPU}::test_memory_of_each_card_and_a_leak_with_its_snapshot", f"{GPU}::test_memory_that_only_moves_is_no_leak"),
        ],
    ),
    "Lockstep": (
        "`mc.check_lockstep`, `Parallel(check_every=N)`.",
        [
            *((cause, PLANTED_CAUSE, IN_LOCKSTEP) for cause in (
                "the forward pass never went through the wrapper",
                "a backward pass went round the wrapper",
                "parameters were added or unfrozen after wrapping",
                "the newest backward pass ran inside `no_sync`",
                "parameters are registered in another order on another rank",
                "the model has other parameters on another rank",
                "gradients share a bucket with a parameter that backward didn't reach",
                "gradients are averaged by nobody: there is no wrapper",
                "the optimizer trains parameters that are not the model's",
                "parameters differ between ranks",
                "inf or NaN on one rank only",
            )),
            ("parameters differ between cards", f"{CARDS}::test_a_parameter_that_one_card_has_otherwise_is_named", f"{CARDS}::test_nothing_is_said_of_cards_in_lockstep"),
            ("the loss of one card was the first that is no number", f"{CARDS}::test_the_card_whose_loss_was_nan_first_is_named", f"{CARDS}::test_nothing_is_said_of_cards_in_lockstep"),
            ("running statistics of BatchNorm differ, by design", f"{RANKS}::test_running_statistics_differ_by_design", IN_LOCKSTEP),
            ("other buffers differ", f"{RANKS}::test_other_buffers_are_a_warning", IN_LOCKSTEP),
        ],
    ),
    "Hangs": (
        "Every run: see [hangs](diagnosis.md#hangs).",
        [
            ("a rank never came to a collective", f"{HANGS}::test_a_rank_that_stands_in_its_own_code_is_named", NO_HANG),
            ("ranks wait in different collectives", f"{HANGS}::test_a_collective_that_one_rank_leaves_out_is_named", NO_HANG),
            ("ranks wait for one another in different places", f"{VERDICT}::test_ranks_that_wait_in_different_places", NO_HANG),
            ("a rank's script has ended", f"{VERDICT}::test_a_rank_that_has_ended", NO_HANG),
            ("a rank has not started, or ranks can't find one another", f"{VERDICT}::test_a_rank_that_has_not_started", NO_HANG),
            ("all wait in one collective: the connection gives no answer", f"{VERDICT}::test_different_collectives_and_the_same_one", NO_HANG),
            ("a rank is busy outside Python", f"{VERDICT}::test_a_rank_that_gives_no_answer", NO_HANG),
            ("the loader yields no batch", f"{HANGS}::test_a_loader_that_yields_nothing_is_named", f"{HANGS}::test_nothing_is_said_of_what_only_takes_long"),
            ("a card has not ended its part", f"{HANGS}::test_a_card_that_stands_in_loss_fn_is_named_with_its_line", f"{HANGS}::test_nothing_is_said_of_what_only_takes_long"),
            ("a card doesn't finish what it was given", f"{VERDICT}::test_one_process_whose_cards_do_not_answer", NO_HANG),
        ],
    ),
    "The cards live": (
        "`manycard monitor`.",
        [
            *((cause, f"{LIVE}::test_each_inequality_is_named", EVEN_USE) for cause in (
                "a card is used less than another",
                "a card draws less power than another",
                "a card holds more memory than another",
                "a card is held back by heat or power",
            )),
            ("a card of the run has nothing to do", f"{LIVE}::test_a_card_of_the_run_that_does_nothing", EVEN_USE),
            ("a card also holds memory of other ranks", f"{LIVE}::test_ranks_that_touched_the_first_card", EVEN_USE),
            ("ranks on the CPU use it unequally", f"{LIVE}::test_ranks_on_the_cpu", f"{LIVE}::test_no_work_at_all"),
        ],
    ),
}  # fmt: skip

OF_PROBES: list[Row] = [
    ("there is no GPU", f"{PROBES}::test_no_gpu_is_a_note", WELL_TOO),
    ("a card is lost", f"{PROBES}::test_a_lost_card", WELL_TOO),
    ("others compute on a card", f"{PROBES}::test_other_people_on_a_card", WELL_TOO),
    ("a card has too little free memory", f"{PROBES}::test_too_little_memory", WELL_TOO),
    ("memory of a card is held by nobody in sight", f"{PROBES}::test_memory_that_nobody_in_sight_holds", WELL_TOO),
    ("torch was built for the CPU", f"{PROBES}::test_torch_for_the_cpu_beside_gpus", f"{PROBES}::test_torch_for_the_cpu_without_gpus_is_fine"),
    ("the driver is too old for torch", f"{PROBES}::test_a_driver_of_an_older_major_version", f"{PROBES}::test_a_newer_driver_is_fine"),
    ("CUDA doesn't start", f"{PROBES}::test_cuda_that_does_not_start", f"{PROBES}::test_cards_hidden_on_purpose_are_no_broken_cuda"),
    ("torch has no NCCL", f"{PROBES}::test_no_nccl", WELL_TOO),
    ("torch is too old", f"{PROBES}::test_an_old_torch", WELL_TOO),
    ("torch has no kernels for a card", f"{PROBES}::test_a_card_without_kernels", f"{PROBES}::test_what_runs_where"),
    ("NCCL is too old for a card", f"{DOCTOR}::test_a_card_too_new_for_its_nccl", WELL),
    ("an entry of CUDA_VISIBLE_DEVICES is ignored", f"{PROBES}::test_an_entry_that_is_ignored", WELL_TOO),
    ("cards are hidden", f"{PROBES}::test_hidden_cards_are_a_note", WELL_TOO),
    ("cards can't read each other's memory (P2P)", f"{PROBES}::test_no_p2p", f"{PROBES}::test_unknown_links_are_no_finding"),
    ("cards are joined by unequal links", f"{PROBES}::test_unequal_links", f"{PROBES}::test_unknown_links_are_no_finding"),
    ("some pairs are slower than others that are joined alike", f"{DOCTOR}::test_pairs_of_one_kind_that_differ", WELL),
    ("cards differ", f"{PROBES}::test_unequal_cards", WELL_TOO),
    ("cards are slices (MIG)", f"{PROBES}::test_slices", f"{PROBES}::test_mig_mode_without_slices"),
    ("there are few cores for the cards", f"{PROBES}::test_few_cores", WELL_TOO),
    ("shared memory is small", f"{PROBES}::test_small_shared_memory", WELL_TOO),
    ("the host's own name has no address", f"{DOCTOR}::test_a_name_that_does_not_resolve", WELL),
    ("a card has not joined its NVSwitches", f"{DOCTOR}::test_cards_that_have_not_joined_their_switches", WELL),
    ("ranks hold memory on another card than theirs", f"{DOCTOR}::test_ranks_that_touched_another_card_than_theirs", WELL),
]  # fmt: skip


def doctor_rows() -> list[Row]:
    """Of the doctor: each cause once, as it was said of the planted fault."""
    fault = f"{DOCTOR}::test_a_planted_fault_is_the_one_that_is_found"
    variable = f"{DOCTOR}::test_a_variable_that_is_set_is_explained"
    fine = f"{DOCTOR}::test_variables_that_are_fine_say_nothing_worse_than_what_they_do"
    rows = [(diagnose(make())[0].cause, fault, WELL) for _, make, *_ in PLANTED]
    rows += [(diagnose(variables(**environment))[0].cause, variable, fine) for environment, *_ in VARIABLES]
    return [*{row[0]: row for row in rows}.values(), *OF_PROBES]


def sections() -> dict[str, tuple[str, list[Row]]]:
    """All of them."""
    return {"The machine": ("`manycard doctor`.", doctor_rows()), **SECTIONS}


def page() -> str:
    """The page as Markdown."""
    number = sum(len(rows) for _, rows in sections().values())
    lines = [
        "# Findings",
        "",
        f"{number} causes that manycard names, with the test that plants each, and one without the cause, in which nothing is",
        "said. Figures and card names are those of the tests. What a finding says besides is its evidence and its fix: see",
        "[the doctor](doctor.md) and [diagnosis](diagnosis.md).",
        "",
        "This page is made by `python -m tests.unit.diagnosis.findings_page`.",
    ]
    for title, (where, rows) in sections().items():
        lines += ["", f"## {title}", "", f"{where} {len(rows)} causes.", "", "| cause | planted by | silent in |"]
        lines += ["|---|---|---|"]
        lines += [f"| {_cell(cause)} | {_link(planted)} | {_link(silent)} |" for cause, planted, silent in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"([|*_<>])", r"\\\1", text) if "`" not in text else text


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name}`](../tests/{path})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
