"""Replicas that meet in different calls are told so, on both sides, with both calls."""

from __future__ import annotations

import pytest
import torch

from spartito.collectives.calls import (
    DTYPES,
    OPERATIONS,
    PURPOSES,
    CurrentCall,
    describe,
    encode,
    waiting_in,
)
from tests.collectives import jobs
from tests.collectives.group import running
from tests.commands import free_ports

WAYS = {"auto": 2, "process_group": 3, "sockets": 3, "on aab": 3, "on abb": 3}


@pytest.mark.parametrize(("way", "world_size"), WAYS.items(), ids=WAYS)
def test_calls_that_do_not_match_are_named_on_all_replicas(way: str, world_size: int) -> None:
    ports = free_ports(len(jobs.MISMATCHES))
    with running() as group:
        for rank in range(world_size):
            group.start(rank, jobs.mismatched_calls, world_size, ports, way)
        results = [group.result(rank) for rank in range(world_size)]
    for number, (_, _, chiefs, others) in enumerate(jobs.MISMATCHES):
        for result in results:
            kind, text = result[number]
            text = text.replace("new reducer", "reduce")  # where it needs no meeting, its use does
            assert kind == "MismatchedCallsError", (chiefs, text)
            assert f"worker 0 is at {chiefs}, worker " in text
            assert f"at {others}\n" in text


def test_a_call_is_its_number() -> None:
    for operation in OPERATIONS[1:7]:
        for dtype in DTYPES:
            word = encode(operation, 269322, dtype, 1)
            assert describe(word).startswith(
                f"{operation} of 269322 {str(dtype).removeprefix('torch.')}"
            )
    assert describe(encode("barrier", 0, None)) == "barrier"
    assert describe(encode("reduce", 1 << 50, torch.complex32)).endswith("elements")
    doing = CurrentCall()
    for purpose in PURPOSES[1:]:
        with doing.during(purpose), doing.during("step"), doing.call(encode("barrier", 0, None)):
            assert doing.tag < 1 << 63
            with doing.call(encode("all_reduce", 1, torch.float32)):  # a part of the barrier
                assert describe(doing.tag) == f"barrier [{purpose}]"
    assert doing == CurrentCall()


def test_who_waits_in_vain_says_in_which_call() -> None:
    doing, tag = CurrentCall(), encode("gather of bytes", 0, None)
    assert waiting_in(0) == ""
    with doing.during("save"), doing.call(tag):
        assert waiting_in(doing.tag) == (
            "This task is at gather of bytes [save]. All tasks call save, not the chief alone. "
        )
    with doing.during("step"), doing.call(tag):
        assert waiting_in(doing.tag) == "This task is at gather of bytes [step]. "
