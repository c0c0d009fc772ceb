from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from spartito.cluster import ClusterSpec, resolve
from spartito.cluster.resolver import RESOLVERS, remarks, replicas_here
from spartito.errors import UserError
from tests.cluster.environments import SBATCH_SHELL, mpich, open_mpi, srun
from tests.cluster.orchestrated import TORCHRUN, indexed_job, pytorch_job, skypilot
from tests.cluster.tpu_hosts import gke

TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


def everything(folder: Path) -> list[dict[str, str]]:
    """An environment for each source, in the order of precedence."""
    path = folder / "cluster.yaml"
    path.write_text("worker: [a:1, b:1]")
    return [
        {"TF_CONFIG": TF_CONFIG},
        TORCHRUN,
        indexed_job(1),
        srun(1),
        mpich(1),
        skypilot(1),
        {"SPARTITO_CLUSTER": str(path), "SPARTITO_TASK": "worker 1"},
        {
            "SPARTITO_CLUSTER_DIR": str(folder / "shared"),
            "SPARTITO_TASK": "worker 0",
            "SPARTITO_WORKERS": "1",
        },
        gke(1),
    ]


def test_how_many_replicas_a_machine_has() -> None:
    here = '{"cluster": {"worker": ["a:1", "a:2"]}, "task": {"type": "worker", "index": 1}}'
    assert replicas_here({}) == 1
    assert replicas_here({"TF_CONFIG": TF_CONFIG}) == 1  # the other is elsewhere
    assert replicas_here({"TF_CONFIG": here}) == 2
    assert replicas_here({"TF_CONFIG": "{"}) == 1


def test_nobody_said_anything() -> None:
    assert resolve({}) == ClusterSpec.alone()
    assert remarks(resolve({}), {}) == ()


def test_each_source_is_heard_and_the_first_of_several_decides(tmp_path: Path) -> None:
    sources = everything(tmp_path)
    assert len(sources) == len(RESOLVERS)
    for resolver, env in zip(RESOLVERS, sources, strict=True):
        assert [r.name for r in RESOLVERS if r.applies(env)] == [resolver.name]
        spec = resolver.read(env)
        assert spec is not None
        assert resolve(env) == spec
        assert remarks(spec, env) == ()
    for first, second in pairwise(sources):
        if first != srun(1):
            assert resolve(second | first) == resolve(first)


def test_mpirun_under_slurm_is_mpis() -> None:
    assert resolve(srun(1) | mpich(1)).source == "MPICH"


@pytest.mark.parametrize("resolver", RESOLVERS, ids=lambda resolver: resolver.name)
def test_a_source_that_does_not_speak_reads_nothing(resolver: object) -> None:
    found = next(r for r in RESOLVERS if r is resolver)
    assert not found.applies({})
    assert found.read({}) is None


def test_sources_that_tell_otherwise_are_named() -> None:
    env = {"TF_CONFIG": TF_CONFIG} | TORCHRUN | srun(3)
    (said,) = remarks(resolve(env), env)
    assert said == "the cluster comes from TF_CONFIG; passed over: torchrun's variables, Slurm"


def test_a_source_that_tells_the_same_needs_no_remark() -> None:
    env = open_mpi(1) | TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}
    assert resolve(env).source == "torchrun's variables"
    assert remarks(resolve(env), env) == ()


def test_a_wrong_source_that_nobody_uses_is_no_error(tmp_path: Path) -> None:
    env = TORCHRUN | {"SPARTITO_CLUSTER": str(tmp_path / "none")}
    assert "passed over: SPARTITO_CLUSTER" in remarks(resolve(env), env)[0]
    with pytest.raises(UserError, match="none"):
        resolve({"SPARTITO_CLUSTER": str(tmp_path / "none")})


def test_a_remark_does_not_wait_for_tasks(tmp_path: Path) -> None:
    env = TORCHRUN | everything(tmp_path)[-2]
    assert "passed over: SPARTITO_CLUSTER_DIR" in remarks(resolve(env), env)[0]
    assert not (tmp_path / "shared").exists()


def test_a_batch_script_is_told_that_it_is_alone() -> None:
    assert resolve(SBATCH_SHELL) == ClusterSpec.alone()
    assert "srun" in remarks(ClusterSpec.alone(), SBATCH_SHELL)[0]
    assert remarks(resolve(SBATCH_SHELL | TORCHRUN), SBATCH_SHELL | TORCHRUN) == ()


def test_kubeflows_rank_of_a_pod_is_not_torchruns() -> None:
    assert resolve(pytorch_job(1)).source == "Kubeflow's PET_ variables"


def test_by_default_our_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    assert resolve().source == "TF_CONFIG"
