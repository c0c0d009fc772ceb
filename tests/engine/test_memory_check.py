from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from spartito.engine.devices.memory_check import check_memory, state_copies
from spartito.errors import UserError
from spartito.system import anonymous_memory
from spartito.system.capacity import cgroup_memory, memory_limit

MIB = 1 << 20


def parameter(mebibytes: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(mebibytes * MIB // 4))


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (Adam, 2),
        (AdamW, 2),
        (lambda p: SGD(p, 0.1), 0),
        (lambda p: SGD(p, 0.1, momentum=0.9), 1),
        (RMSprop, 0),  # not known: nothing is refused for it
    ],
)
def test_what_an_optimizer_will_keep(make: Callable[..., Optimizer], copies: int) -> None:
    own = parameter(1)
    optimizer = make([own])
    assert state_copies(optimizer) == copies
    own.grad = torch.zeros_like(own)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[own].values() if torch.is_tensor(value))
    assert kept >= copies * own.nbytes


@given(used=st.integers(0, 64), fraction=st.sampled_from([0.0, 0.5, 1.0]), spare=st.integers(-1, 1))
def test_it_is_refused_when_the_least_does_not_fit(used: int, fraction: float, spare: int) -> None:
    own = parameter(4)
    needed = (used + 4 * (1 + 2 * fraction)) * MIB
    given = [own], Adam([own]), fraction, needed + spare, used * MIB
    if spare >= 0:
        check_memory(*given)
        return
    with pytest.raises(UserError, match="1,048,576 parameters that learn need"):
        check_memory(*given)


def test_a_parameter_without_a_size_yet_counts_nothing() -> None:
    lazy = torch.nn.LazyLinear(4)
    check_memory(list(lazy.parameters()), SGD([parameter(1)], 0.1), limit=1.0, used=0)


def test_this_process() -> None:
    assert 0 < anonymous_memory() < memory_limit()
    assert memory_limit() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    for name, text in {"memory.max": "5000", "memory.current": "3000"}.items():
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "job" / "memory.stat").write_text("inactive_file 1000\n")
    assert cgroup_memory(tmp_path, own) == [(5000, 2000)]
