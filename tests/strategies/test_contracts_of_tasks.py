"""What every strategy promises of its tasks: who decides, who ends, what they load and leave."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spartito.system import shares_memory
from tests.replicas import Replicas
from tests.strategies import data_jobs, task_jobs
from tests.strategies.test_contracts import (
    SYNCHRONOUS,
    Case,
    crossed,
    every_first,
    every_flat,
    every_strategy,
    every_synchronous,
    is_coupled,
    run,
    same_as_one_device,
)


@every_flat
def test_replicas_with_uneven_data_end_together(replicas: Replicas, case: Case) -> None:
    result = run(replicas, case, data_jobs.uneven_workers)
    assert result["steps"] == 2 * case[1]


@every_strategy
def test_one_replica_can_stop_all(replicas: Replicas, case: Case) -> None:
    meeting = "groups" in case[2]  # the groups agree on it when they meet, after every third update
    assert run(replicas, case, task_jobs.stop_by_one) == 5 + meeting


@every_flat
def test_facts_and_reductions(replicas: Replicas, case: Case) -> None:
    name, world_size, options = case
    ranks = range(1, world_size + 1)
    for rank, result in enumerate(replicas(task_jobs.facts, world_size, name, options)):
        count, is_chief, task, reduced = result
        assert (count, is_chief, task) == (world_size, rank == 0, f"worker {rank}")
        assert reduced == [sum(ranks), sum(ranks) / world_size, world_size, 1]


@every_first
def test_the_run_folder(replicas: Replicas, case: Case, tmp_path: Path) -> None:
    run(replicas, case, task_jobs.write_model, folder=str(tmp_path))
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "report.html").exists()
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


@every_first
def test_the_best_weights_come_back_and_rates_follow_epochs(replicas: Replicas, case: Case) -> None:
    result = run(replicas, case, task_jobs.best_weights)
    assert len(result["val_loss"]) == 3  # the first was the best
    assert result["evaluated"] == pytest.approx(result["val_loss"][0], abs=1e-12)
    assert result["lr"] == 0.01 / 2**3
    assert result["begun"] == 4  # no optimizer lost its state


@every_flat
@pytest.mark.parametrize("act", ["evaluate", "save"])
def test_what_the_chief_does_alone_ends_the_job(
    replicas: Replicas, case: Case, act: str, tmp_path: Path
) -> None:
    name, world_size, options = case
    if world_size == 1:
        return
    texts = replicas(
        task_jobs.chief_alone, world_size, name, options, act=act, folder=str(tmp_path / "saved")
    )
    for text in texts:
        alone = "MismatchedCallsError: the replicas make different calls: worker 0 "
        assert re.match(rf"{alone}.* is at .*\[{act}\], worker [12] .*at .*\[step\]\n", text), text


@every_flat
def test_all_load_what_was_saved_or_none_does(
    replicas: Replicas, case: Case, tmp_path: Path
) -> None:
    name, world_size, options = case
    results = replicas(task_jobs.save_and_load, world_size, name, options, folder=str(tmp_path))
    for rank, (found, refused, missing) in enumerate(results):
        assert found == [1.0, 2.0, 3.0]  # at once what was saved last
        if world_size > 1:
            last = world_size - 1
            assert "the replicas have read different checkpoints: worker 0 " in refused
            assert f"worker {last} {tmp_path}/2.0 (" in refused
            assert missing.startswith("" if rank == last else f"worker {last}: ")
            assert f"{tmp_path}/none has no manifest.json" in missing


@every_flat
def test_outputs_of_different_lengths_are_refused(replicas: Replicas, case: Case) -> None:
    same_as_one_device(replicas, case, data_jobs.predict_lengths, lengths=[4] * 7, batch=6)
    name, world_size, options = case
    growing = replicas(data_jobs.predict_lengths, world_size, name, options, [1, 2, 3, 4, 5, 6], 6)
    for found in growing if world_size > 1 else ():
        assert "rows of different kinds cannot be gathered: (" in found
        assert f"({6 // world_size}, 6) float64 on worker {world_size - 1}\n" in found
    for found in replicas(
        data_jobs.predict_lengths, world_size, name, options, [3] * 6 + [4] * 6, 6
    ):
        assert found.startswith("outputs of (6, 3) for batch 0, of (6, 4) for batch 1")


def _are_apart(options: Mapping[str, Any]) -> bool:
    """Whether replicas have shards of parameters in memory of their own."""
    is_apart = "communication" in options or not shares_memory()
    return is_apart and options.get("zero", 3) == 3


@every_flat
def test_replicas_that_drift_are_named_at_the_end_of_the_epoch(
    replicas: Replicas, case: Case
) -> None:
    name, world_size, options = case
    last = world_size - 1
    drifts = {"value": "parameters than", "frozen": "that learn than"}
    drifts |= dict.fromkeys(("seed", "stream", "batches", "later"), "in another order")
    for what, text in drifts.items():
        for step, error in replicas(task_jobs.drift, world_size, name, options, what):
            if options.get("communication") == "ddp" and what == "frozen":
                assert "the replicas make different calls" in error  # at once: DDP is set up anew
            elif name == "sharded" and what == "value" and _are_apart(options):
                assert "parameter without its module" in error  # nobody else asks for it
            elif world_size > 1:
                once = name == "sharded" and what == "value"  # noticed by the next update
                once = once or (is_coupled(case) and what == "value")  # by the next meeting
                by_torch = options.get("communication") == "fsdp"
                once = once or (by_torch and what == "frozen")  # before torch's own calls
                first = what in ("seed", "stream", "batches")  # noticed by the first update
                expected = 8 if what == "later" else 0 if first else 2 if once else 4
                assert step == expected, error
                assert error.startswith(f"the replicas have drifted apart: worker {last} has ")
                assert text in error
            else:
                assert (step, error) == (8, "")


@every_flat
def test_replicas_with_other_examples_are_named_after_a_loop_of_ones_own(
    replicas: Replicas, case: Case
) -> None:
    name, world_size, options = case
    found = replicas(task_jobs.other_order_in_a_loop, world_size, name, options)
    named = sum("in another order" in error for error in found)
    assert named >= 2 if world_size > 1 else not named  # another group may go on


@pytest.mark.parametrize("what", ["stream", "loop"])
def test_workers_of_servers_with_other_examples_are_named(replicas: Replicas, what: str) -> None:
    given = "parameter_server", {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}
    if what == "loop":
        error = replicas(task_jobs.other_order_in_a_loop, 2, *given, servers=1)[0]
    else:
        error = replicas(task_jobs.drift, 2, *given, what, servers=1)[0][1]
    assert "in another order, than worker " in error


@every_flat
def test_a_part_of_an_optimizers_state_is_neither_saved_nor_loaded(
    replicas: Replicas, case: Case
) -> None:
    """As another task would go on with it: what a script may save is whole."""
    name, world_size, options = case
    for errors in replicas(task_jobs.optimizer_state, world_size, name, options):
        if errors != ["", ""]:
            assert world_size > 1
            assert "state_dict() of an Adam under" in errors[0]
            assert "load_state_dict() of an Adam under" in errors[1]
            assert all("each task has a part of its state" in error for error in errors)
        else:
            assert name not in ("central_storage", "pipeline") or world_size == 1


@crossed("closes", {"closed": True, "dropped": False}, SYNCHRONOUS)
def test_a_strategy_goes_with_its_model_and_memory(
    replicas: Replicas, case: Case, closes: bool
) -> None:
    name, world_size, options = case
    for folds in replicas(task_jobs.folds, world_size, name, options, closes):
        assert [fold[:2] for fold in folds] == [(True, True)] * 3
        assert folds[2][2] == folds[0][2]


@every_synchronous
def test_a_closed_strategy_leaves_its_address_to_the_next(replicas: Replicas, case: Case) -> None:
    name, world_size, options = case
    for steps in replicas(task_jobs.one_after_the_other, world_size, name, options):
        assert steps == [2, 2, 2]
