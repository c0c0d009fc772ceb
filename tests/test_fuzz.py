"""The quick part of the mutated inputs, and those that once ended a task by a Python error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spartito.checkpoint.manager import STATE, read_sections, write_checkpoint
from spartito.cluster.store.protocol import BrokenRequestError, request_of
from spartito.errors import UserError
from tests.fuzz import MOST_MEMORY, TARGETS, fuzz, target_of


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_end_as_they_should(name: str) -> None:
    inputs = 500 if name == "checkpoint" else 5000
    with target_of(name) as target:
        found = fuzz(target, inputs, seed=1)
    assert sum(found.ends.values()) == inputs
    assert len(found.ends) > 1  # refused ones, and ones that were read
    assert found.memory < MOST_MEMORY


def test_text_that_is_none_is_no_request_of_a_store() -> None:
    """It ended the thread of the store, for all tasks (input 14 of seed 13)."""
    with pytest.raises(BrokenRequestError, match="no request"):
        request_of(b"\x93\xa3S\xdf\x01x")


@pytest.mark.parametrize(
    "text", ["{", "[1]", '"x"', json.dumps({"x" * 300: 1}), '{"../model": 1}', "[" * 100_000]
)
def test_a_state_that_is_none_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    """It was one of Python's where the checksum held (inputs 5 and 3474 of seed 13)."""
    path = tmp_path / "checkpoint"
    write_checkpoint(path, {"model": {"weight": torch.ones(2)}})
    (path / STATE).write_text(text)
    with pytest.raises(UserError, match=STATE):
        read_sections(path)
