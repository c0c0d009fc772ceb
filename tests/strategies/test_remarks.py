from __future__ import annotations

import logging

import pytest

import spartito as sp


def test_the_chief_says_which_sources_were_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", one)
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, logger="spartito"):
        sp.strategy("one_device").close()
    assert caplog.messages == [
        "one_device, 1 replica (TF_CONFIG)",
        "the cluster comes from TF_CONFIG; passed over: torchrun's variables",
    ]
