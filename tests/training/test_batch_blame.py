"""An error inside of the model says what the model was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import spartito as sp
from spartito.training.fitting.batch_blame import described, name_of
from spartito.training.fitting.missing_operations import called_in, missing_in
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


class Inverts(nn.Module):
    def forward(self, x: Any) -> Any:
        return x @ torch.linalg.inv(torch.eye(2, dtype=x.dtype).to_sparse())


class Turns(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x.half() & x.half()).double()


@pytest.mark.parametrize(
    ("last", "operation", "help_"),
    [
        (Inverts(), "aten::linalg_inv_ex for the device SparseCPU", "on the CPU"),
        (Turns(), "bitwise_and_cpu for numbers of type Half", "in fp32"),
    ],
)
def test_an_operation_that_torch_lacks_is_named_with_its_module(
    last: nn.Module, operation: str, help_: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 2).double(), nn.Sequential(nn.Tanh(), last))
    with pytest.raises(NotImplementedError) as error:
        trainer(model=model).fit(data(), epochs=1, verbose=0)
    batch, missing = notes(error)
    assert "in step 1 of epoch 1" in batch
    assert f"torch has no {operation}. It was called in the model's module '1.1' (" in missing
    assert help_ in missing


def test_what_torch_says_of_other_devices() -> None:
    mac = "The operator 'aten::isin' is not currently implemented for the MPS device. If you"
    found = missing_in(NotImplementedError(mac))
    assert found is not None
    assert (found.operation, found.where) == ("aten::isin", "the device MPS")
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in found.help
    assert missing_in(NotImplementedError("mine")) is None
    assert "in the backward pass" in called_in(NotImplementedError(mac), nn.Linear(1, 1))


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
