from __future__ import annotations

import pytest

from spartito.cluster import ClusterSpec, resolve

TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_nobody_said_anything() -> None:
    assert resolve({}) == ClusterSpec.alone()


def test_tf_config_comes_before_torchrun() -> None:
    assert resolve({"TF_CONFIG": TF_CONFIG, **TORCHRUN}).num_replicas == 2
    assert resolve(TORCHRUN).num_replicas == 3


def test_by_default_our_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    assert resolve().source == "TF_CONFIG"
