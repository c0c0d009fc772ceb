from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.comparison.report.choose import MOST, sentences
from spartito.comparison.report.results import comparison
from spartito.report.lines import as_json
from tests.comparison.made_runs import (
    everything,
    failed,
    history,
    record,
    run,
    server,
    workers,
)

GOAL = ("val_accuracy", 0.94)


def say(*runs: dict[str, Any], goal: tuple[str, float] | None = None) -> list[str]:
    return sentences(comparison(record(*runs, goal=goal)))


def the(words: str, said: list[str]) -> str:
    """The one sentence with ``words``."""
    (found,) = [sentence for sentence in said if words in sentence]
    return found


def test_the_first_to_reach_the_goal_is_recommended() -> None:
    said = say(
        run("one_device", 1, history=history(rate=20_000)),
        run("mirrored", history=history(rate=40_000)),
        goal=GOAL,
    )
    # epoch 5 is the first with 94%, and each takes 8,000 / rate seconds
    assert said[0] == (
        "Choose mirrored: it is the first to reach validation accuracy 94.00%, after 1.0 s."
    )
    assert the("Training until", said).endswith("mirrored after 1.0 s, one_device after 2.0 s.")


def test_the_fastest_is_recommended_without_a_goal() -> None:
    said = say(
        run("one_device", 1, history=history(rate=20_000)),
        run("mirrored", history=history(rate=30_000)),
    )
    assert said[0].startswith("Choose mirrored: it is clearly the fastest (30,")
    assert "1.50 times as many as one_device" in the("times as many", said)


def test_of_equals_the_simplest_is_recommended() -> None:
    said = say(
        run("multi_worker_mirrored", history=history(rate=30_500)),
        run("mirrored", history=history(rate=30_000)),
    )
    assert said[0].startswith("Choose mirrored: no other strategy is clearly faster (30,")
    assert said[0].endswith(", and it is the simpler of the two that are about as fast.")
    assert "are equally fast: between 30,5" in the("equally fast", said)
    assert not any("times as many" in sentence for sentence in said)


@pytest.mark.parametrize(("jump", "doubted"), [(15_000, False), (25_000, True)])
def test_a_noisy_speed_is_no_difference(jump: int, doubted: bool) -> None:
    noisy = history(rate=40_000)
    for index, epoch in enumerate(noisy):
        epoch["examples_per_second"] = 40_000 + jump * (-1) ** index
    said = say(run("one_device", 1, history=history(rate=20_000)), run("mirrored", history=noisy))
    assert said[0].startswith("Choose one_device: no other strategy is clearly faster")
    assert ("the speed of mirrored varied by" in said[0]) == doubted
    assert not any("equal" in sentence for sentence in said)  # noise proves nothing equal
    words = the("Which is faster cannot be told", said)
    assert "one_device 20,0" in words
    assert "their epochs vary by up to " in words
    assert "--repeat 3" in words


def repeated(strategy: str, *rates: float) -> list[dict[str, Any]]:
    return [
        run(strategy, history=history(rate=rate), setting=strategy, run=f"{strategy} {number}",
            repeat=number)
        for number, rate in enumerate(rates, start=1)
    ]  # fmt: skip


def test_repeats_that_overlap_cannot_be_told_apart() -> None:
    said = say(
        *repeated("mirrored", 30_000, 40_000, 35_000),
        *repeated("multi_worker_mirrored", 39_000, 45_000, 46_000),
    )
    words = the("Which is faster cannot be told", said)
    assert words.endswith("(their repeats overlap).")
    apart = say(
        *repeated("mirrored", 30_000, 38_000, 35_000),
        *repeated("multi_worker_mirrored", 39_000, 45_000, 46_000),
    )
    assert apart[0].startswith("Choose multi_worker_mirrored: it is clearly the fastest (45,")


def test_a_repeat_that_failed_is_counted_and_left_out() -> None:
    good = repeated("mirrored", 30_000, 40_000)
    bad = {**failed("mirrored"), "setting": "mirrored", "run": "mirrored 3"}
    said = say(*good, bad, run("one_device", 1))
    assert said[-1] == "Some repeats failed and are left out: 1 of mirrored."


def test_the_headline_says_who_was_slowed() -> None:
    slow = {"worker 1": 0.25}
    said = say(
        run("one_device", 1, history=history(rate=40_000)),
        run("mirrored", slow=slow, history=history(rate=10_000)),
    )
    assert said[0].endswith(
        "Note: worker 1 had 25% of its speed under mirrored; "
        "one_device had no task that was slowed."
    )
    assert "2 workers under mirrored, of which worker 1 had 25%" in the("One device is", said)
    both = say(
        run("central_storage", slow=slow, history=history(rate=40_000)),
        run("mirrored", slow=slow, history=history(rate=10_000)),
    )
    assert "slowed" not in both[0]


def test_faster_with_a_worse_model_is_not_recommended() -> None:
    said = say(
        run("mirrored", history=history(rate=20_000)),
        run("parameter_server", history=history(rate=50_000, accuracy=0.90)),
    )
    assert said[0].startswith("Choose mirrored (20,")
    assert "parameter_server is faster, but with a worse validation accuracy" in said[0]
    worse = the("noise of this difference", said)
    assert worse.startswith(
        "parameter_server ends at a worse validation accuracy: 90.09% against 95.09%"
    )


def test_a_difference_within_the_noise_is_none() -> None:
    said = say(
        run("mirrored", history=history(jump=0.004)),
        run("parameter_server", history=history(jump=0.004, accuracy=0.951)),
    )
    assert "does not differ beyond the noise" in the("final validation accuracy", said)
    assert not any("worse" in sentence for sentence in said)


def test_few_epochs_do_not_tell_noise_from_difference() -> None:
    said = say(
        run("mirrored", history=history(2)),
        run("parameter_server", history=history(2, accuracy=0.94)),
    )
    assert "with fewer than 5 epochs and no repeats nobody can tell" in the(
        "final validation", said
    )


def test_a_loss_is_better_when_it_is_less() -> None:
    def only_loss(limit: float) -> list[dict[str, Any]]:
        return [
            {"epoch": n, "step": n, "val_loss": limit + 0.7**n, "seconds": 1.0,
             "examples_per_second": 100.0}
            for n in range(1, 20)
        ]  # fmt: skip

    said = say(run("mirrored", history=only_loss(0.1)), run("one_device", 1, history=only_loss(3)))
    assert "one_device ends at a worse validation loss: 3.00" in the("worse", said)
    goal = say(run("mirrored", history=only_loss(0.1)), goal=("val_loss", 0.5))
    assert (
        the("Training until", goal)
        == "Training until validation loss 0.5000: mirrored after 3.0 s."
    )


def test_who_missed_the_goal_is_named() -> None:
    said = say(run("mirrored"), run("parameter_server", history=history(accuracy=0.92)), goal=GOAL)
    assert the("Training until", said).endswith("; parameter_server did not reach it.")
    said = say(run("mirrored"), run("one_device", 1), goal=("val_accuracy", 0.999))
    assert "No strategy reached validation accuracy 99.90%; mirrored came closest" in said[1]
    assert not said[0].startswith("Choose mirrored: it is the first")


def test_what_a_slow_worker_costs() -> None:
    slow = {"worker 1": 0.25}
    synchronous = run("mirrored", slow=slow, history=history(rate=10_000))
    asynchronous = run("parameter_server", slow=slow, history=history(rate=25_000))
    said = say(synchronous, asynchronous)
    assert the("wait for the slowest", said).startswith(
        "With worker 1 at 25% of its speed, parameter_server does 2.50 times the examples/s"
    )
    alone = say(synchronous, run("one_device", 1))
    assert "spend 10% of their time waiting" in the("With worker 1", alone)
    no_gain = say(synchronous, {**asynchronous, "history": history(rate=10_100)})
    assert "is still not faster than mirrored" in the("With worker 1", no_gain)


def test_where_one_device_is_enough() -> None:
    said = say(
        run("one_device", 1, history=history(rate=40_000)),
        run("mirrored", history=history(rate=30_000),
            tasks=workers(2, waited_for_tasks_seconds=4.0)),
    )  # fmt: skip
    words = the("One device is enough", said)
    assert "40% of their time goes into waiting for one another" in words
    assert said[0].startswith("Choose one_device")


@pytest.mark.parametrize(("central", "told"), [(300_000_000, True), (389_000_000, False)])
def test_the_memory_of_one_copy(central: int, told: bool) -> None:
    said = say(
        run("mirrored"),
        run("central_storage", tasks=workers(2, peak_memory_bytes=central)),
    )
    assert any("its largest task takes 300 MB, that of mirrored 390 MB" in s for s in said) == told


def test_the_memory_of_models_in_parts() -> None:
    def said(mesh: int, pipeline: int) -> str:
        runs = [
            run(name, tasks=workers(2, peak_memory_bytes=peak * 1_000_000))
            for name, peak in {"mirrored": 800, "mesh": mesh, "pipeline": pipeline}.items()
        ]
        return the("that of mirrored", say(*runs))

    assert said(500, 600) == (
        "mesh keeps a shard of each large tensor on each task: its largest task takes 500 MB, "
        "that of mirrored 800 MB (pipeline 600 MB)."
    )
    assert said(810, 805) == (
        "This model is too small to save memory by dividing it: the largest task of pipeline takes "
        "805 MB, that of mirrored 800 MB."
    )


def test_the_staleness_of_updates() -> None:
    tasks = [*workers(2), server({0: 50, 1: 25, 3: 25})]
    said = say(run("mirrored"), run("parameter_server", tasks=tasks, ps=1))
    assert the("updates late", said) == (
        "Under parameter_server a gradient is 1.0 updates late on average, and 3 at most."
    )


def test_a_batch_that_is_too_large() -> None:
    large = run("mirrored", batch_size=8192, sweep="batch_size", history=history(accuracy=0.8))
    said = say(run("mirrored"), run("one_device", 1), large)
    assert the("too large", said).startswith("A batch of 8,192 is too large for this training")
    good = {**large, "history": history()}
    assert not any("too large" in s for s in say(run("mirrored"), run("one_device", 1), good))


def test_how_far_workers_carry() -> None:
    four = run("mirrored", 4, sweep="workers", history=history(rate=60_000))
    one = run("mirrored", 1, sweep="workers", history=history(rate=20_000))
    words = the("would be ideal", say(run("mirrored", history=history(rate=36_000)), four, one))
    assert words.startswith("From 1 to 4 workers mirrored goes from 20,")
    assert "3.00 times; 4 times would be ideal." in words


def test_a_failed_run_claims_nothing() -> None:
    fast = run("parameter_server", history=history(rate=900_000), error="killed", exit_code=69)
    said = say(run("mirrored"), run("one_device", 1), fast)
    assert [s for s in said if "parameter_server" in s] == [
        "parameter_server failed and says nothing here; the table has the reason."
    ]


def test_when_little_or_nothing_ended_well() -> None:
    assert say() == say(failed("mirrored"))[:1]
    assert say()[0].startswith("No run of this comparison ended well")
    assert say(run("mirrored"), failed("one_device"))[0].startswith("Only mirrored ended well")
    assert say(run("mirrored"))[0].startswith("Only mirrored was run")


def test_all_at_once_stays_short_and_has_figures() -> None:
    said = sentences(comparison(everything()))
    assert 3 <= len(said) <= MOST
    assert said[0].startswith("Choose parameter_server")
    assert said[-1].startswith("central_storage failed")
    assert all(re.search(r"\d", sentence) for sentence in said[:-1])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["one_device", "mirrored", "parameter_server", "central_storage"]),
            st.integers(0, 8),
            st.floats(1, 1e6),
            st.floats(0.1, 0.99),
            st.booleans(),
        ),
        max_size=5,
        unique_by=lambda row: row[0],
    ),
    st.sampled_from([None, GOAL, ("val_loss", 0.4), ("nothing", 1.0)]),
)
def test_any_figures_give_a_few_sentences(
    rows: list[tuple[str, int, float, float, bool]], goal: tuple[str, float] | None
) -> None:
    runs = [
        run(name, history=history(epochs, rate=rate, accuracy=accuracy), error="x" if bad else None)
        for name, epochs, rate, accuracy, bad in rows
    ]
    said = say(*runs, goal=goal)
    assert 1 <= len(said) <= MOST
    assert all(sentence.endswith(".") for sentence in said)
    well = {name for name, epochs, _, _, bad in rows if epochs and not bad}
    assert said[0].split()[1].rstrip(":") in (well or {"run"})


def spoilt(figure: str, first: int, **changes: Any) -> list[dict[str, Any]]:
    """A history whose ``figure`` is not a number from an epoch on."""
    lines = history(**changes)
    for line in lines[first - 1 :]:
        line[figure] = math.nan
    return lines


def test_a_run_that_diverged_is_named_and_never_chosen() -> None:
    for figure, words in (("loss", "loss"), ("val_accuracy", "validation accuracy")):
        bad = run("mirrored", history=spoilt(figure, 7, rate=90_000))
        said = say(run("one_device", 1), run("parameter_server", ps=1), bad, goal=GOAL)
        assert not said[0].startswith("Choose mirrored")
        assert not any("mirrored" in sentence for sentence in said[:-1])
        assert said[-1] == (
            f"mirrored (its {words} is NaN from epoch 7 of 10 on) diverged and cannot be chosen."
        )


def test_the_record_on_disk_says_the_same_of_a_divergence() -> None:
    made = record(run("one_device", 1), run("mirrored", history=spoilt("loss", 1, rate=90_000)))
    read = json.loads(json.dumps(as_json(made)))  # JSON has null for what is not a number
    assert sentences(comparison(read)) == sentences(comparison(made))
    assert "cannot be chosen" in sentences(comparison(read))[-1]


def test_a_loss_that_is_finite_again_did_not_diverge() -> None:
    lines = history(rate=90_000)
    lines[2]["loss"] = math.inf
    assert say(run("one_device", 1), run("mirrored", history=lines))[0].startswith(
        "Choose mirrored"
    )


def test_all_that_diverged_leave_nothing_to_choose() -> None:
    bad = [run(name, history=spoilt("loss", 1)) for name in ("one_device", "mirrored")]
    said = say(*bad)
    assert said[0].startswith("All runs diverged, so there is nothing to choose from.")
    assert "one_device (its loss is NaN from epoch 1 of 10 on) and mirrored (" in said[1]


def test_one_repeat_that_diverged_is_enough() -> None:
    good = repeated("mirrored", 90_000, 90_000)
    good[1]["history"] = spoilt("loss", 4, rate=90_000)
    said = say(*good, run("one_device", 1))
    assert said[0].startswith("Only one_device ended well")
    assert "in 1 of 2 repeats its loss is NaN from epoch 4" in said[-1]


def test_a_training_stopped_for_what_was_not_finite_diverged() -> None:
    bad = ends("mirrored", 4, 10, "not finite")
    assert "loss or gradients were not finite in epoch 4" in say(run("one_device", 1), bad)[-1]


def ends(strategy: str, after: int, told: int, end: str | None) -> dict[str, Any]:
    """A fast run that ended early."""
    made = run(strategy, history=history(after, rate=90_000))
    made["config"]["fit"] |= {"epochs": told, "end": end}
    return made


def test_a_run_that_did_not_finish_is_named_and_never_chosen() -> None:
    said = say(run("one_device", 1), run("parameter_server"), ends("mirrored", 2, 6, None))
    assert not any("mirrored" in sentence for sentence in said[:-1])
    assert said[-1] == (
        "mirrored (it ended after 2 of 6 epochs without an error) did not finish and cannot be "
        "chosen."
    )


def test_who_stopped_early_may_be_chosen_and_is_said() -> None:
    said = say(run("one_device", 1), ends("mirrored", 6, 10, "stopped"))
    assert said[0].startswith("Choose mirrored")
    assert said[0].endswith("Note: mirrored trained 6 epochs, and the longest run 10.")


def test_a_sweep_that_diverged_is_named() -> None:
    bad = run("mirrored", batch_size=8192, sweep="batch_size", history=spoilt("loss", 2))
    said = say(run("mirrored"), run("one_device", 1), bad)
    assert said[-1].startswith("mirrored with batch size 8,192 (its loss is NaN from epoch 2")


def loaded(strategy: str, others: float, count: int = 2, **changes: Any) -> dict[str, Any]:
    return run(strategy, count, load={"others": others, "pressure": 0.5}, **changes)


def test_speeds_beside_other_programs_are_undecided() -> None:
    said = say(
        loaded("one_device", 0.43, 1, history=history(rate=1_000)),
        loaded("mirrored", 0.02, history=history(rate=24_000)),
        goal=GOAL,
    )
    assert said[0] == (
        "Undecided: other programs took a part of the cores (43% while one_device ran), so no "
        "speed here can be relied on. Compare again on a machine that does nothing else."
    )
    assert not any("times as many" in sentence or " after " in sentence for sentence in said)
    quiet = say(
        loaded("one_device", 0.05, 1, history=history(rate=1_000)),
        loaded("mirrored", 0.02, history=history(rate=24_000)),
    )
    assert quiet[0].startswith("Choose mirrored")


def test_repeats_beside_other_programs_do_not_count_for_speed() -> None:
    first, second, third = repeated("mirrored", 90_000, 20_000, 21_000)
    first["load"] = {"others": 0.5, "pressure": 0.1}
    said = say(first, second, third, loaded("one_device", 0.0, 1, history=history(rate=40_000)))
    assert said[0].startswith("Choose one_device")
    (found,) = (r for r in comparison(record(first, second, third)).runs)
    assert found.rate == pytest.approx(20_500, rel=0.01)


def test_the_same_engine_is_not_ranked_by_one_run_of_each() -> None:
    pair = [
        run("multi_worker_mirrored", history=history(rate=38_000)),
        run("mirrored", history=history(rate=30_000)),
    ]
    said = say(*pair)
    assert said[0].startswith("Choose mirrored: no other strategy is clearly faster")
    assert the("is noise", said) == (
        "multi_worker_mirrored and mirrored do the same on one machine; that they differ by 21% "
        "here is noise, so smaller differences say nothing."
    )
    # What two runs of one engine differ by tells of no others either.
    third = run("central_storage", history=history(rate=33_000))
    assert any("two runs of the same engine by 21%" in s for s in say(*pair, third))
    far = run("central_storage", history=history(rate=80_000))
    assert say(*pair, far)[0].startswith("Choose central_storage: it is clearly the fastest")
    goal = say(*pair, goal=GOAL)
    assert goal[0].startswith("Choose mirrored: no other strategy reaches")
    ranked = say(*repeated("multi_worker_mirrored", 38_000, 38_100), *repeated("mirrored", 30_000,
                 30_100))  # fmt: skip
    assert ranked[0].startswith("Choose multi_worker_mirrored")


def test_one_device_with_as_few_threads_is_another_run() -> None:
    said = say(
        run("one_device", 1, history=history(rate=1_000)),
        run("one_device", 1, history=history(rate=20_000), threads=1, setting="t"),
        run("mirrored", history=history(rate=24_000)),
    )
    assert "1.20 times as many as one_device (1 thread)" in the("times as many", said)


def on_line(*runs: dict[str, Any], link: str = "100 Mbit/s") -> list[str]:
    return sentences(comparison({**record(*runs), "link": link}))


def busy(strategy: str, rate: float, waiting: float, sent: int, **changes: Any) -> dict[str, Any]:
    """A run of 1,250 steps whose two tasks wait for so many of their ten seconds."""
    told = {"waited_for_tasks_seconds": waiting, "bytes_sent": sent, "bytes_received": sent}
    return run(strategy, history=history(rate=rate), tasks=workers(2, **told), **changes)


def test_what_a_thin_line_costs_and_who_does_without() -> None:
    said = on_line(
        busy("multi_worker_mirrored", 600, 9.5, 1_347_000_000),
        busy("local_sgd", 4_000, 4.0, 75_000_000),
        busy('local_sgd(compress="4bit")', 6_000, 1.3, 9_000_000),
    )
    assert said[0].startswith('Choose local_sgd(compress="4bit"): it is clearly the fastest')
    assert said[1] == (
        "On a line of 100 Mbit/s multi_worker_mirrored spends 95% of its time sending and waiting "
        '(2.2 MB a step); local_sgd(compress="4bit") spends 13% of its time sending and waiting '
        "(14.4 kB a step), and does 10.0 times the examples/s."
    )


def test_a_line_that_holds_up_nobody() -> None:
    said = on_line(
        busy("multi_worker_mirrored", 4_000, 1.0, 1_347_000_000),
        busy("parameter_server", 4_000, 0.5, 1_347_000_000),
        link="10 Gbit/s",
    )
    assert the("10 Gbit/s", said) == (
        "On a line of 10 Gbit/s nobody is held up: multi_worker_mirrored spends 10% of its time "
        "sending and waiting (2.2 MB a step), which is the most."
    )


def test_a_line_on_which_all_send_all_the_time() -> None:
    alone = run("one_device", 1, history=history(rate=5_000))
    said = on_line(alone, busy("multi_worker_mirrored", 600, 9.5, 1_347_000_000))
    assert the("once in so many updates", said).startswith("On a line of 100 Mbit/s multi_worker")
    assert "under multi_worker_mirrored on a line of 100 Mbit/s do no more" in the("enough", said)
    assert not [one for one in say(alone, busy("mirrored", 600, 9.5, 9)) if "line" in one]
