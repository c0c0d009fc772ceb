"""The text of a strategy in the files of every launcher: who reads one finds what was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from spartito.declared import Declared, parse
from spartito.launch.clouds.dstack import dstack_file
from spartito.launch.clouds.launcher import Dstack, Sky
from spartito.launch.clouds.sky import sky_file
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.launcher import Compose
from spartito.launch.job import JobSpec, Program
from spartito.launch.kubernetes.file import job_file
from spartito.launch.kubernetes.launcher import Kubernetes
from spartito.launch.kubernetes.plan import KINDS
from spartito.launch.slurm.file import batch_file
from spartito.launch.slurm.launcher import Slurm
from spartito.names import ENV_STRATEGY
from tests.launch.jobs import asked
from tests.launch.played_slurm import played

RECIPE = Program("mnist", kind="recipe")
ODD = [
    "$HOME",
    "$(TF_CONFIG)",
    "$$(X)$",
    "a'b\"c",
    "\\",
    "`id`",
    "# no",
    ": x",
    "{{x}}",
    "\n\t",
    "é\u2028",
]


def held(value: Any) -> list[str]:
    """The strategies that a document says to tasks, wherever they stand in it."""
    if isinstance(value, dict):
        named = value.get("value") if value.get("name") == ENV_STRATEGY else value.get(ENV_STRATEGY)
        return [named] if named is not None else [one for v in value.values() for one in held(v)]
    if isinstance(value, list):
        return [one for v in value for one in held(v)]
    if isinstance(value, str) and value.startswith(f"{ENV_STRATEGY}="):
        return [value.partition("=")[2]]
    return []


def in_compose(job: JobSpec) -> list[str]:
    document = yaml.safe_load(compose_file(Compose().plan(job)))
    return [text.replace("$$", "$") for text in held(document["services"])]


def in_kubernetes(kind: str) -> Callable[[JobSpec], list[str]]:
    def read(job: JobSpec) -> list[str]:
        text = job_file(Kubernetes(kind=kind).plan(job))
        found = [one for document in yaml.safe_load_all(text) for one in held(document)]
        assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", one) for one in found)  # no variable
        return [one.replace("$$", "$") for one in found]

    return read


def in_slurm(job: JobSpec) -> list[str]:
    return [played(batch_file(Slurm().plan(job)))[1][ENV_STRATEGY]]


def in_sky(job: JobSpec) -> list[str]:
    return held(yaml.safe_load(sky_file(Sky().plan(job)))["envs"])


def in_dstack(job: JobSpec) -> list[str]:
    launcher, of_file = asked(
        Dstack, RECIPE, out=Path("/mnt/runs"), strategy=job.strategy, workers=2
    )
    return held(yaml.safe_load(dstack_file(launcher.plan(of_file)))["env"])


READERS = {
    "compose": in_compose,
    **{kind: in_kubernetes(kind) for kind in KINDS},
    "slurm": in_slurm,
    "sky": in_sky,
    "dstack": in_dstack,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("job"))
        yield


@pytest.mark.parametrize("kind", READERS)
def test_every_file_keeps_the_strategy(kind: str) -> None:
    read = READERS[kind]

    @settings(max_examples=15)
    @given(st.text(), st.booleans())
    @example("".join(ODD), True)
    def check(word: str, is_nested: bool) -> None:
        options: dict[str, Any] = {"weights": word, "sites": [[0, 1], [2]], "outer": {"lr": 0.7}}
        nested = {"inside": Declared("sharded", {"zero": 2})} if is_nested else {}
        strategy = Declared("local_sgd", {**options, **nested})
        assume(kind != "dstack" or "${{" not in str(strategy))  # dstack would put a value in
        found = read(JobSpec(program=RECIPE, strategy=str(strategy), workers=2))
        assert found
        assert {parse(text) for text in found} == {strategy}

    check()


@pytest.mark.parametrize("kind", READERS)
def test_a_name_stays_a_name(kind: str) -> None:
    (found,) = set(READERS[kind](JobSpec(program=RECIPE, strategy="sharded()", workers=2)))
    assert found == "sharded"
