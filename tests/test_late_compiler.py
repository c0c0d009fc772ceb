"""Torch's compiler comes when somebody uses it, and then is what it would have been."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartito.late_compiler import MARK, NAME, StandIn, put_off
from tests.commands import LEAN, Commands, commands_in

PROGRAM = """
import sys
import spartito
from tests import test_late_compiler as tests
tests.a_step()
assert type(sys.modules["torch._dynamo"]).__name__ == "StandIn"
tests.FORMS[sys.argv[1]]()
tests.is_torchs_own()
print("as torch has it")
"""


def a_step() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def a_module_of_it() -> None:
    """Torch has one such module: who sets an option there sets the compiler's."""
    import torch._dynamo.config as config

    found: ModuleType = torch._dynamo.config
    assert found is config is sys.modules[config.__name__]
    assert config.__spec__ is not None
    assert config.__spec__.origin == config.__file__
    with pytest.raises(ModuleNotFoundError, match="nothing_here"):
        __import__("torch._dynamo.nothing_here")


def a_decorator_of_it() -> None:
    def sine(x: Tensor) -> Tensor:
        return x.sin()

    alone: Any = torch.compiler.disable(sine)
    assert len(graphs_of(lambda: alone(torch.ones(3) * 2) + 1)) == 2


FORMS: dict[str, Callable[[], None]] = {"module": a_module_of_it, "decorator": a_decorator_of_it}


def graphs_of(function: Callable[[], Any]) -> list[Any]:
    """The graphs that torch makes of a function."""
    found: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compile(function, backend=backend)()
    return found


def is_torchs_own() -> None:
    """The compiler is torch's, and leaves the methods of optimizers alone, as torch wants it."""
    compiler = sys.modules[NAME]
    assert type(compiler) is ModuleType
    assert torch._dynamo is compiler
    model, optimizer = a_step()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 3)).sum()
        return loss

    assert len(graphs_of(step)) == 1
    plain: Any = torch.optim.Optimizer.zero_grad
    assert plain.__wrapped__.__dynamo_disable is not plain.__wrapped__


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_who_asks_for_it_gets_torchs_own(commands: Commands, form: str) -> None:
    commands.write("uses.py", PROGRAM)
    path = os.pathsep.join((str(LEAN), str(Path(__file__).parents[1])))
    ended = commands.python("uses.py", form, env={"PYTHONPATH": path})
    assert ended.code == 0, ended.text
    assert ended.out == "as torch has it\n"


def test_an_optimizer_asks_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    put_off()
    stand_in = sys.modules[NAME]
    assert isinstance(stand_in, StandIn)
    a_step()
    assert find_spec(NAME) is not None
    assert sys.modules[NAME] is stand_in
    for function in stand_in._marked:  # the process goes on with another
        delattr(function, MARK)


def test_what_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, os)
    before = list(sys.meta_path)
    put_off()
    assert sys.modules[NAME] is os
    assert sys.meta_path == before
