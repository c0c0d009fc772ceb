"""An error inside of the model says what the model was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import spartito as sp
from spartito.training.batch_blame import described, name_of
from tests.training.jobs import data, trainer


def notes(error: pytest.ExceptionInfo[Exception]) -> list[str]:
    return getattr(error.value, "__notes__", [])


def test_a_shape_error_has_a_note_with_the_batch() -> None:
    x, y = data()
    made = trainer(model=nn.Linear(4, 2).double())
    with pytest.raises(RuntimeError, match="cannot be multiplied") as fitted:
        made.fit(TensorDataset(x, y), epochs=1, batch_size=5, verbose=0)
    rows = "a batch of TensorDataset with 5 of 5 rows here: (float64 (5, 3), int64 (5,))"
    assert notes(fitted) == [f"spartito: in step 1 of epoch 1, {rows}"]
    with pytest.raises(RuntimeError, match="cannot be multiplied") as evaluated:
        made.evaluate(TensorDataset(x, y), batch_size=5)
    assert notes(evaluated) == [f"spartito: in evaluation step 1, {rows}"]
    with pytest.raises(RuntimeError, match="cannot be multiplied") as predicted:
        made.predict(x, batch_size=5)
    given = "a batch of arrays with 5 of 5 rows here: float64 (5, 3)"
    assert notes(predicted) == [f"spartito: in prediction step 1, {given}"]


def test_the_note_is_of_the_step_that_fails() -> None:
    calls = list[int]()

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2).double()

        def forward(self, x: Any) -> Any:
            calls.append(1)
            if len(calls) == 6:
                raise IndexError("mine")
            return self.inner(x)

    with pytest.raises(IndexError, match="mine") as error:
        trainer(model=Fails()).fit(data(), epochs=2, batch_size=5, verbose=0)
    assert len(notes(error)) == 1
    assert "in step 2 of epoch 2, a batch of arrays" in notes(error)[0]


def test_errors_of_ours_have_none() -> None:
    made = trainer(loss=lambda output, target: output.sum().detach())
    with pytest.raises(sp.UserError) as error:
        made.fit(data(), epochs=1, verbose=0)
    assert not notes(error)


def test_what_is_said_of_data() -> None:
    x, y = data()
    subset = Subset(TensorDataset(x, y), [0, 1])
    assert name_of(sp.data.as_dataset(subset)) == "Subset of TensorDataset"
    assert name_of(sp.data.as_dataset(DataLoader(subset))) == "Subset of TensorDataset"
    assert name_of(sp.data.as_dataset(iter([x]))) == "list_iterator"
    given = {"a": [x, "text"], "b": torch.zeros((), dtype=torch.bool)}
    assert described(given) == "{'a': [float64 (20, 3), str], 'b': bool ()}"
    assert described([1] * 9).endswith("int, ...]")
