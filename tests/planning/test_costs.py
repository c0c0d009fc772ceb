"""What strategies cost, as pure functions: what must hold for any cluster, and what is counted."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.declared import parse
from spartito.errors import UserError
from spartito.launch.lines.line import Link
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.compute import crowding, disturbed, own_step, passes, slowest_of
from spartito.planning.costs.exchange import FRAMES, between, in_memory
from spartito.planning.costs.failures import checkpointed
from spartito.planning.costs.memory import BUFFERS, OPTIMIZER, PARAMETERS
from spartito.planning.costs.parts import (
    COMPUTE,
    INPUT,
    LINK,
    MEMORY,
    OTHERS,
    SERVERS,
    STAGES,
    Situation,
)
from spartito.planning.costs.pipeline import balanced
from spartito.planning.costs.servers import queueing, sharing
from spartito.planning.profile import Line, Part
from spartito.planning.search import predict, search
from tests.planning.jobs import sent
from tests.planning.made import MACHINE, PROFILE, cluster, situation, without_variation
from tests.replicas import Replicas

OF_A_TASK = ("mirrored", "multi_worker_mirrored", "sharded(zero=1)", "sharded(zero=3)")


@settings(max_examples=25)
@given(
    machines=st.sampled_from([2, 3, 8, 100]),
    workers=st.sampled_from([1, 2, 4]),
    rates=st.tuples(st.floats(1e6, 1e11), st.floats(1e6, 1e11)),
    delays=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_better_line_is_never_slower(
    machines: int, workers: int, rates: tuple[float, float], delays: tuple[float, float]
) -> None:
    lines = Link(max(rates), min(delays)), Link(min(rates), max(delays))
    found = []
    for line in lines:
        own = replace(cluster(machines, workers), link=line)
        outcome = search(Situation(PROFILE, own, 2048))
        found.append({str(each.strategy): each.cost.step for each in outcome.choices})
    better, worse = found
    assert set(better) == set(worse)
    assert all(better[name] <= worse[name] * (1 + 1e-9) for name in better)


@settings(max_examples=25)
@given(st.floats(4e8, 1e10), st.floats(4e8, 1e10), st.sampled_from([1, 4]))
def test_more_memory_never_leaves_fewer_choices(one: float, other: float, machines: int) -> None:
    low, high = (
        {str(c.strategy) for c in search(situation(machines=machines), limit=limit).choices}
        for limit in sorted((one, other))
    )
    assert low <= high


@pytest.mark.parametrize("text", OF_A_TASK)
def test_one_worker_exchanges_nothing_and_is_one_device(text: str) -> None:
    alone = replace(situation(workers=1), profile=without_variation())
    seconds = predict(parse(text), alone).cost.seconds
    assert seconds[MEMORY] == seconds[LINK] == seconds[OTHERS] == 0
    device = predict(parse("one_device"), alone).cost
    assert sum(seconds.values()) == pytest.approx(device.step)


@pytest.mark.parametrize("text", [*OF_A_TASK, "central_storage", "local_sgd", "parameter_server"])
def test_what_a_step_is_made_of_is_never_negative(text: str) -> None:
    for workers, batch in itertools.product((1, 2, 4, 8), (8, 512)):
        if text == "local_sgd" and workers == 1:
            continue
        cost = predict(parse(text), situation(workers=workers, batch=batch)).cost
        assert all(value >= 0 for value in (*cost.seconds.values(), *cost.memory.values()))
        assert 0 < cost.efficiency <= 1
        assert cost.seconds[INPUT] > 0


@pytest.mark.parametrize(
    ("text", "tasks", "per_machine", "width"),
    [
        ("multi_worker_mirrored", 2, 1, 20_000),
        ("multi_worker_mirrored", 3, 1, 20_000),
        ("multi_worker_mirrored", 3, 1, 10),  # so small that each sends all of it to all
        ('multi_worker_mirrored(compress="8bit")', 3, 1, 20_000),
        ("sharded(zero=1)", 3, 1, 20_000),
        ("sharded(zero=2)", 4, 2, 20_000),
    ],
)
def test_bytes_are_those_that_are_sent(
    replicas: Replicas, text: str, tasks: int, per_machine: int, width: int
) -> None:
    found = replicas(sent, tasks, text, width, per_machine)
    nbytes, counted = max(found)
    model = replace(PROFILE.model, gradients=nbytes, parameters=nbytes)
    profile = replace(PROFILE, model=model, parts=())
    own = cluster(tasks // per_machine, per_machine)
    predicted = predict(parse(text), Situation(profile, own, 512)).cost.sent
    # Figures of the step ride along: 40 bytes for each other task of a sum, and its messages.
    assert predicted * 0.999 <= counted <= predicted * 1.001 + 400


@pytest.mark.parametrize(
    ("text", "machines", "parameters", "optimizer", "exchange"),
    [
        ("mirrored", 1, 1.0, 1 / 4, 1.0),  # one machine has the optimizer's state once
        ("central_storage", 1, 1 / 4, 1 / 4, 1.0),
        ("multi_worker_mirrored", 2, 1.0, 1.0, 1.0),
        ('multi_worker_mirrored(compress="8bit")', 2, 1.0, 1.0, 5.0),
    ],
)
def test_what_each_replica_has_in_memory(
    text: str, machines: int, parameters: float, optimizer: float, exchange: float
) -> None:
    own = situation(machines=machines, workers=4)
    memory, model = predict(parse(text), own).cost.memory, PROFILE.model
    assert memory[PARAMETERS] == model.parameters * parameters + model.buffers
    assert memory[OPTIMIZER] == model.optimizer * optimizer
    assert memory[BUFFERS] == model.gradients * exchange


def test_two_tasks_of_a_model_share_what_is_cut() -> None:
    """A pass of one takes 0.55 of what a whole model takes; metrics are no part of it."""
    own = situation(workers=2)
    seconds = predict(parse("mesh(model=2)"), own).cost.seconds
    whole = passes(own, "forward", 512) + passes(own, "backward", 512)
    assert seconds[COMPUTE] == pytest.approx(own_step(own, 512)[COMPUTE] - whole * 0.45)


def test_each_microbatch_adds_its_gradients_to_those_that_wait() -> None:
    own = situation(workers=2, link=None)
    without = replace(own, profile=replace(own.profile, adding=0.0))
    took, alone = (predict(parse("pipeline(microbatches=4)"), one).cost for one in (own, without))
    assert took.seconds[COMPUTE] - alone.seconds[COMPUTE] == pytest.approx(4 * 1e-3 / 2)


def test_parts_that_nobody_knows_are_no_block_of_a_sharded_model() -> None:
    profile = replace(PROFILE, parts=PROFILE.parts[:1])
    assert profile.largest_part == profile.model.largest_tensor
    assert PROFILE.largest_part == 1_000_000


def test_a_sum_of_two_takes_what_was_measured() -> None:
    nbytes = 10_000_000.0
    assert in_memory(MACHINE, nbytes, 2, cores=4) == pytest.approx(MACHINE.shared.at(nbytes))
    by_line = between(MACHINE, Link(1e9), nbytes, 2)
    on_line, work = nbytes * FRAMES * 8 / 1e9, MACHINE.sockets.each * nbytes
    assert by_line.link == pytest.approx(on_line + work / 2 + 2 * MACHINE.sockets.start)
    turns = between(MACHINE, Link(1e9), nbytes, 2, turns=2.0)
    assert turns.link - by_line.link == pytest.approx(work / 2 + 2 * MACHINE.sockets.start)


def test_more_tasks_than_cores_take_turns() -> None:
    half, full = (predict(parse("mirrored"), situation(workers=n)).cost for n in (4, 8))
    assert full.seconds[MEMORY] > half.seconds[MEMORY]
    assert full.step > half.step * 0.9


def test_crowds_of_tasks_are_as_measured() -> None:
    """Between what was measured, and in proportion beyond; on other machines they take turns."""
    machine = replace(MACHINE, crowds={5: 2.5, 8: 3.5})
    measured = replace(PROFILE, machine=machine)

    def factor(tasks: int, cores: int = 4) -> float:
        kind = Kind("machine", 1, cores, 8e9)
        return crowding(Situation(measured, Cluster((kind,), tasks), 512))

    assert factor(4) == disturbed(situation(workers=4))
    assert [factor(5), factor(8), factor(16)] == [2.5, 3.5, 7.0]
    assert factor(6) == pytest.approx(2.5 + 1 / 3)
    assert factor(4, cores=2) == 2 * (1 + MACHINE.contention)


@given(st.integers(2, 200))
def test_the_slowest_of_many_is_later_the_more_there_are(tasks: int) -> None:
    assert 0 < slowest_of(tasks, 0.1) < slowest_of(tasks + 1, 0.1)
    assert slowest_of(1, 0.1) == 0
    assert slowest_of(tasks, 0.1) < 0.1 * NormalDist().inv_cdf(1 - 1e-3 / tasks)


@given(st.integers(1, 50), st.floats(1e-3, 10), st.floats(1e-4, 1))
def test_servers_serve_what_they_can(tasks: int, cycle: float, served: float) -> None:
    response = queueing(tasks, cycle, served)
    assert response >= served
    assert tasks / (cycle + response) == pytest.approx(min(1 / served, tasks / (cycle + served)))


@given(st.integers(1, 50), st.floats(1e-3, 10), st.floats(1e-4, 1), st.floats(1e-4, 1))
def test_a_line_carries_no_more_than_it_can(
    tasks: int, between: float, push: float, pull: float
) -> None:
    more = sharing(tasks, between, (push, pull))
    assert more >= -1e-12
    rate = tasks / (between + push + pull + more)
    assert rate <= min(1 / max(push, pull), tasks / (between + push + pull)) * (1 + 1e-9)
    assert sharing(1, between, (push, pull)) == pytest.approx(0)


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=7), st.integers(1, 7))
def test_stages_are_cut_as_evenly_as_can_be(times: list[float], stages: int) -> None:
    stages = min(stages, len(times))
    parts = [Part(str(n), seconds, 1, 1.0) for n, seconds in enumerate(times)]
    cut = balanced(parts, stages)
    assert [part for stage in cut for part in stage] == parts
    assert len(cut) == stages
    assert all(cut)
    best = min(
        max(sum(times[a:b]) for a, b in itertools.pairwise([0, *ends, len(times)]))
        for ends in itertools.combinations(range(1, len(times)), stages - 1)
    )
    slowest = max(sum(part.seconds for part in stage) for stage in cut)
    assert slowest == pytest.approx(best, rel=1e-6)


def test_stages_wait_while_a_pipeline_fills_and_empties() -> None:
    """Two equal stages and 8 microbatches: one stage's time of one of them is idle."""
    parts = tuple(replace(part, output=0.0) for part in PROFILE.parts)
    profile = replace(PROFILE, parts=parts, adding=0.0, slowdowns={})
    own = replace(situation(workers=2), profile=profile)
    seconds = predict(parse('pipeline(schedule="gpipe")'), own).cost.seconds
    assert seconds[STAGES] == pytest.approx(seconds[COMPUTE] / 8, rel=0.02)
    slower = replace(own, profile=replace(profile, slowdowns={1: 1.25, 2: 1.5, 4: 2.0}))
    costs = [predict(parse('pipeline(schedule="gpipe")'), each).cost for each in (slower, own)]
    assert costs[0].seconds[COMPUTE] == pytest.approx(1.5 * costs[1].seconds[COMPUTE])


@given(st.floats(0.01, 100), st.floats(1e-7, 1e-4), st.floats(0.1, 100))
def test_checkpoints_at_the_best_interval_lose_the_least(
    save: float, rate: float, restart: float
) -> None:
    best = checkpointed(save, rate, restart)
    for other in (best.every / 2, best.every * 2):
        assert best.fraction <= save / other + rate * (other / 2 + restart)
    assert best.fraction <= checkpointed(save, rate * 2, restart).fraction <= 1
    assert checkpointed(save, 0, restart).fraction == 0


@given(st.floats(0, 1), st.floats(1e-6, 1), st.lists(st.integers(1, 512), min_size=2, unique=True))
def test_a_line_goes_through_what_lies_on_one(start: float, each: float, xs: list[int]) -> None:
    line = Line.through([(x, start + each * x) for x in xs])
    for x in xs:
        assert line.at(x) == pytest.approx(start + each * x, rel=1e-3)
    falling = Line.through([(16, 2.0), (64, 1.0)])
    assert falling.each == 0
    assert Line.through([(16, 2.0)]).at(32) == pytest.approx(4.0)


def test_threads_between_and_beyond_the_measured_ones() -> None:
    times = [PROFILE.seconds("forward", 64, threads) for threads in (1, 2, 4, 8, 64)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(1e-2)
    assert times[2] == pytest.approx(4e-3)
    assert times[-1] > 0


def test_ten_thousand_workers_are_planned() -> None:
    outcome = search(situation(batch=100_000, machines=10_000, workers=1, link="50mbit,80ms"))
    names = {choice.strategy.name for choice in outcome.choices}
    assert {"local_sgd", "parameter_server", "multi_worker_mirrored", "pipeline"} <= names
    assert all(math.isfinite(choice.cost.step) for choice in outcome.choices)
    assert {each.strategy for each in outcome.refusals} >= {"mirrored", "central_storage"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mesh(model=3)", "model=3 in a job of 4 tasks"),
        ("mesh(model=1)", "the layout cuts this model for 2, 4 of tasks"),
        ("pipeline(stages=3)", "stages=3 in a job of 4 tasks"),
        ('pipeline(schedule="interleaved")', "several stages for each task"),
        ("sharded(zero=4)", "zero=4"),
        ("local_sgd(groups=9)", "9 groups of 4 workers"),
        ("local_sgd(groups=3)", "3 groups of 4 workers"),
        ('local_sgd(compress="topk")', "does not know what compress='topk' costs"),
        ('local_sgd(compress="4bit")', "no sum leaves it"),
        ("multi_worker_mirrored(bucket_bytes=9)", "does not know what bucket_bytes=9 costs"),
        ("mirrored(find_unused_parameters=True)", "does not know what find_unused"),
        ("tpu", "tpu: a plan does not know what it costs"),
    ],
)
def test_what_has_no_cost_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        search(situation(workers=4), text)


def endless(known: Situation) -> Situation:
    """The same with epochs that never end, where groups meet as seldom as they are told to."""
    return replace(known, profile=replace(known.profile, steps_per_epoch=None))


def test_groups_meet_at_the_end_of_an_epoch_too() -> None:
    own = situation(machines=2, workers=1, batch=64)  # 100 steps an epoch
    for asked, every in ((20, 20), (100, 100), (75, 50), (1000, 100), (30, 25)):
        for text in (f"local_sgd(every={asked})", f"parameter_server(groups=2, every={asked})"):
            assert predict(parse(text), own).cost.rhythm.every == every


@pytest.mark.parametrize(("workers", "groups"), [(2, 2), (3, 3), (4, 2), (9, 3)])
def test_groups_that_are_planned_are_even(workers: int, groups: int) -> None:
    choices = search(situation(workers=workers, link=None)).choices
    found = {
        each.strategy.options["groups"] for each in choices if "groups" in each.strategy.options
    }
    assert found == {groups}


def test_groups_are_listed_once_where_an_epoch_is_short() -> None:
    found = [str(c.strategy) for c in search(situation(machines=2, batch=3200)).choices]
    assert "local_sgd(every=20, groups=2)" in found
    assert "local_sgd(every=100, groups=2)" not in found  # an epoch has two steps


def test_a_group_that_is_lost_is_missing_until_it_is_back() -> None:
    many = endless(situation(machines=100, batch=6400))
    rate = 1 / 86400
    groups = predict(parse("local_sgd(groups=100, every=20)"), many, rate)
    assert groups.loss.recovers
    away = many.profile.machine.start + 10 * groups.cost.step
    assert groups.loss.fraction == pytest.approx(rate * away + 100 * rate * 2.0)
    pairs = predict(parse("local_sgd(groups=50, every=20)"), many, rate)
    assert pairs.loss.fraction > groups.loss.fraction  # either of two machines may fail
    together = predict(parse("multi_worker_mirrored"), many, rate)
    assert together.loss.fraction > 2 * groups.loss.fraction
    coded = predict(parse('local_sgd(groups=100, compress="4bit")'), many, rate)
    assert not coded.loss.recovers
    assert coded.loss.every < math.inf
    assert not predict(parse("local_sgd(groups=100)"), many).loss.recovers


def test_groups_over_servers_push_seldom() -> None:
    many = endless(situation(machines=16, workers=1, batch=1600))
    each, apart = (
        predict(parse(name), many).cost
        for name in ("parameter_server", "parameter_server(groups=16, every=100)")
    )
    assert apart.seconds[SERVERS] < each.seconds[SERVERS] / 50
    assert apart.sent < each.sent / 20
    often = predict(parse("parameter_server(groups=16, every=20)"), many).cost
    assert often.seconds[LINK] == pytest.approx(5 * apart.seconds[LINK])
    with pytest.raises(UserError, match="17 groups of 16"):
        predict(parse("parameter_server(groups=17)"), many)
