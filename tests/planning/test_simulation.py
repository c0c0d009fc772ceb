"""Steps simulated task by task, beside closed forms; failures beside what they are said to cost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.declared import parse
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.failures import PAUSE, checkpointed
from spartito.planning.costs.parts import OTHERS, SERVERS, Situation
from spartito.planning.search import Choice, predict
from spartito.planning.simulation import simulate
from tests.planning.made import PROFILE, cluster, situation, without_variation

SYNCHRONOUS = (
    "mirrored",
    "central_storage",
    "sharded(zero=2)",
    "mesh(model=2)",
    "pipeline(stages=2)",
    "local_sgd(groups=2, every=20)",
)


def steady(text: str, own: Cluster, batch: int = 512) -> Choice:
    return predict(parse(text), Situation(without_variation(), own, batch))


@pytest.mark.parametrize("text", ["one_device", *SYNCHRONOUS])
def test_where_nothing_varies_it_is_the_closed_form(text: str) -> None:
    choice = steady(text, cluster(workers=4))
    found = simulate(choice)
    assert found.rate == pytest.approx(choice.cost.rate)
    assert found.waiting == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("text", SYNCHRONOUS)
def test_who_varies_is_waited_for(text: str) -> None:
    choice = predict(parse(text), situation(workers=4))
    found = simulate(choice)
    assert found.rate == pytest.approx(choice.cost.rate, rel=0.02)
    expected = choice.cost.seconds[OTHERS] / choice.cost.step
    assert found.waiting == pytest.approx(expected, rel=0.35)
    assert simulate(choice) == found
    assert simulate(choice, seed=1) != found


@pytest.mark.parametrize("text", ["", "(groups=4, every=20)"])
def test_a_push_alone_waits_for_its_own_service(text: str) -> None:
    own = cluster(machines=4, workers=1)
    choice = steady(f"parameter_server{text}", own)
    served = choice.cost.rhythm.served
    alone = replace(choice, cost=replace(choice.cost, examples=choice.cost.examples / 4))
    one = replace(alone, situation=replace(choice.situation, cluster=cluster(workers=1)))
    moved = sum(s for n, s in choice.cost.seconds.items() if n != SERVERS)
    found = simulate(one)
    assert found.rate == pytest.approx(
        one.cost.examples / (moved + served / choice.cost.rhythm.every), rel=0.02
    )


def test_servers_that_are_full_serve_one_push_after_the_other() -> None:
    choice = steady("parameter_server", cluster(machines=200, workers=1), batch=2000)
    occupied = choice.cost.rhythm.occupied
    found = simulate(choice)
    assert found.rate == pytest.approx(10 / occupied, rel=0.05)
    assert found.rate == pytest.approx(choice.cost.rate, rel=0.05)
    assert found.waiting > 0.5


def test_only_who_meets_goes_at_the_speed_of_the_slowest() -> None:
    kinds = (Kind("fast", 3, 4, 8e9), Kind("slow", 1, 4, 8e9, speed=0.25))
    own = replace(cluster(machines=4, workers=1, link="10gbit"), kinds=kinds)
    meets = steady("multi_worker_mirrored", own)
    assert simulate(meets).rate == pytest.approx(meets.cost.rate)
    assert simulate(meets).waiting > 0.4  # three of four wait for three quarters of a step
    apart = steady("parameter_server", own)
    assert simulate(apart).rate > 1.7 * simulate(meets).rate
    assert simulate(apart).waiting < 0.6 * simulate(meets).waiting


def test_many_tasks_are_simulated_in_fewer_steps() -> None:
    choice = predict(parse("multi_worker_mirrored"), situation(machines=2000, batch=40_000))
    found = simulate(choice)
    assert found.rate == pytest.approx(choice.cost.rate, rel=0.05)
    assert {span.task for span in found.spans} == set(range(8))


def fails(save: float, rate: float, restart: float, every: float, random: Random) -> float:
    """What is lost of the time by a job that begins anew from its last checkpoint."""
    clock = kept = 0.0
    failure = random.expovariate(rate)
    while clock < 3000 / rate:
        if failure > clock + every + save:
            clock, kept = clock + every + save, kept + every
            continue
        clock = failure
        while True:
            failure = clock + random.expovariate(rate)
            if failure > clock + restart:
                clock += restart
                break
            clock = failure
    return 1 - kept / clock


@settings(max_examples=15)
@given(
    save=st.floats(0.1, 30.0),
    rate=st.floats(1e-4, 1e-2),
    restart=st.floats(1.0, 60.0),
    other=st.floats(0.3, 3.0),
    seed=st.integers(0, 1000),
)
def test_failures_cost_what_they_are_said_to(
    save: float, rate: float, restart: float, other: float, seed: int
) -> None:
    found = checkpointed(save, rate, restart)
    lost = fails(save, rate, restart, found.every, Random(seed))
    assert lost == pytest.approx(found.fraction, abs=0.06)
    worse = fails(save, rate, restart, found.every * other, Random(seed))
    assert worse > lost - 0.06


def test_who_can_replace_a_lost_task_does_not_begin_anew() -> None:
    rate = 1 / 86400
    many = situation(machines=1000, workers=1, batch=8000)
    found = predict(parse("multi_worker_mirrored"), many, rate)
    away = 1000 * rate * (PROFILE.machine.start + PAUSE)
    assert found.loss.recovers
    assert found.loss.fraction == pytest.approx(away / (1 + away))
    whole = predict(parse("pipeline(stages=8)"), situation(machines=8, workers=1, batch=64), rate)
    assert not whole.loss.recovers  # one line of stages: nobody else has what is lost
    assert not predict(parse("mirrored"), situation(), rate).loss.recovers  # one machine
