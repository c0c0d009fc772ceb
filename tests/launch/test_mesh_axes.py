"""What ``--mesh`` says to a job: its strategy, its options, and how many tasks it has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spartito.errors import UserError
from spartito.launch import axes
from spartito.launch.job import JobSpec, Program
from spartito.mesh import layout
from spartito.names import ENV_STRATEGY

PROGRAM = Program("mnist", kind="recipe")


def test_a_mesh_says_how_many_tasks_there_are() -> None:
    job = JobSpec(program=PROGRAM, mesh="data=2, model=3", strategy_options='{"strict": true}')
    told = 'mesh(mesh={"data": 2, "model": 3}, strict=True)'
    assert job.environment({}) == {ENV_STRATEGY: told}
    assert (job.workers_on(1), job.workers_on(2), job.roles().workers) == (6, 3, 6)
    assert str(job.choose(job.roles())) == told
    assert JobSpec(program=PROGRAM, strategy=told).workers_on(1) == 6
    with pytest.raises(UserError, match="a mesh of 6 tasks on 4 machines"):
        job.workers_on(4)


def test_what_was_asked_for_besides_must_fit() -> None:
    job = JobSpec(program=PROGRAM, mesh="model=2", workers=4)
    assert job.workers_on(1) == 4
    with pytest.raises(UserError, match="a mesh of 2 tasks in a job of 4"):
        job.choose(job.roles())
    assert JobSpec(program=PROGRAM, strategy_options='{"model": 2}').workers_on(1) is None


def test_stages_say_how_many_tasks_there_are() -> None:
    job = JobSpec(program=PROGRAM, stages=4, microbatches=6)
    assert job.environment({}) == {ENV_STRATEGY: "pipeline(microbatches=6, stages=4)"}
    assert (job.workers_on(1), job.workers_on(2)) == (4, 2)
    with pytest.raises(UserError, match="a pipeline of 4 tasks on 3 machines"):
        job.workers_on(3)
    assert JobSpec(program=PROGRAM, stages=2, workers=4).workers_on(1) == 4
    options = {"schedule": "interleaved"}
    each = JobSpec(program=PROGRAM, stages=4, strategy_options=json.dumps(options))
    assert each.workers_on(1) == 2
    cube = JobSpec(program=PROGRAM, mesh="pipeline=2,model=2", stages=2)
    assert cube.strategy == 'pipeline(mesh={"pipeline": 2, "model": 2}, stages=2)'
    assert cube.workers_on(1) == 4
    assert JobSpec(program=PROGRAM, microbatches=2).workers_on(1) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": 2, "strategy": "sharded"}, "--stages 2 under --strategy sharded"),
        ({"microbatches": 2, "strategy": "mesh"}, "has no microbatches"),
        ({"stages": 2, "strategy_options": '{"stages": 3}'}, "Say once what stages is"),
    ],
)
def test_stages_are_those_of_a_pipeline(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        JobSpec(program=PROGRAM, **options)


def test_an_axis_that_nothing_is_about_is_refused_before_the_start() -> None:
    assert axes.AXES == layout.AXES
    with pytest.raises(UserError, match=r"axis 'modle' of mesh=.*\n.*mean 'model'"):
        JobSpec(program=PROGRAM, mesh="data=2,modle=2")
    options = {"layout": {"hidden": "modle", "batch": "data"}}
    told = JobSpec(program=PROGRAM, mesh="data=2,modle=2", strategy_options=json.dumps(options))
    assert told.workers_on(1) == 4


@pytest.mark.parametrize("text", ["", "model", "model=0", "model=2,model=2", "=2", "model=two"])
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no axis, or one twice"):
        JobSpec(program=PROGRAM, mesh=text)
