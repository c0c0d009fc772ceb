"""What the contract tests run of data: dicts, streams, sentences, and examples that are broken."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import spartito as sp
from spartito.errors import CorruptSampleError
from tests.replicas import warns
from tests.strategies.jobs import blobs, make_strategy, mlp, weights


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor, label: Tensor) -> dict[str, Tensor]:
        out = self.net(features)
        return {"loss": nn.functional.cross_entropy(out, label), "output": out}


def dict_batches(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Batches that are dicts, and a model that returns its own loss."""
    strategy = make_strategy(name, **options)
    net = OwnLoss()
    trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    x, y = blobs(20)
    data = {"features": x, "label": y}
    history = trainer.fit(data, epochs=2, batch_size=7, validation_data=data, verbose=0)
    predicted = trainer.predict(data, batch_size=6)["output"]
    strategy.close()
    return {"history": history.history, "weights": {"out": predicted}}


class Faulty:
    """Eleven examples, of which two cannot be read."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in (2, 7):
            raise CorruptSampleError(f"example {index} is broken")
        x, y = blobs(11)
        return x[index], y[index]


@warns(r"skipped \(")
def corrupt_examples(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Examples that cannot be read keep their index with weight 0."""
    strategy = make_strategy(name, **options)
    net = mlp(0.5)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        deterministic=True,
    )
    history = trainer.fit(sp.data.as_dataset(Faulty(), 4).shuffle(), epochs=3, verbose=0)
    result = {
        "history": history.history,
        "weights": weights(strategy, net),
    }
    strategy.close()
    return result


def streams(name: str, options: dict[str, Any], kind: str) -> dict[str, Any]:
    """An IterableDataset, a DataLoader, and a DataLoader with a sampler of its own."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    x, y = blobs(19)
    pairs = torch.utils.data.TensorDataset(x, y)

    class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(pairs)

    made: dict[str, Any] = {
        "iterable": lambda: Stream(),
        "dataset": lambda: pairs,
        "loader": lambda: torch.utils.data.DataLoader(pairs, batch_size=4, shuffle=True),
        "sampler": lambda: torch.utils.data.DataLoader(
            pairs, batch_sampler=[[0, 1, 2], [5, 4, 3, 9], [11]]
        ),
    }
    history = trainer.fit(made[kind](), epochs=2, batch_size=4, verbose=0)
    result = {
        "history": history.history,
        "weights": weights(strategy, net),
    }
    strategy.close()
    return result


def uneven_workers(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Each replica makes its own batches, and not equally many."""
    strategy = make_strategy(name, **options)
    net = mlp()

    def batches(context: sp.data.InputContext) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = blobs(30)
        mine = slice(context.data_shard[0], None, context.data_shard[1])
        for start in range(0, 4 * (context.data_shard[0] + 1), 4):
            yield x[mine][start : start + 4], y[mine][start : start + 4]

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    history = trainer.fit(sp.data.per_worker(batches), epochs=2, verbose=0)
    result = {"steps": trainer.step, "history": history.history}
    strategy.close()
    return result


class Lengths(torch.utils.data.Dataset[Tensor]):
    """Rows of these lengths, which `pad` makes equal in a data shard."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(1.0, self.lengths[index] + 1, dtype=torch.float64)


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def predict_lengths(name: str, options: dict[str, Any], lengths: list[int], batch: int) -> Any:
    """Predictions that are as long as their input, or the error."""
    strategy = make_strategy(name, **options)
    trainer = sp.Trainer(nn.Tanhshrink(), loss=nn.MSELoss(), strategy=strategy)
    loader = torch.utils.data.DataLoader(Lengths(lengths), batch_size=batch, collate_fn=pad)
    try:
        return trainer.predict(loader)
    except sp.UserError as error:
        return str(error)
    finally:
        strategy.close()


class Tagger(nn.Module):
    """As models of transformers: keywords in, a mapping out, its loss a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> UserDict[str, Any]:
        logits = self.head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return UserDict(loss=loss, logits=logits, num_items=(labels != -100).sum())


class Sentences(torch.utils.data.Dataset[Any]):
    """Lists of 1 to 5 tokens."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> UserDict[str, Any]:
        tokens = [(index * 5 + n) % 9 for n in range(1 + index % 5)]
        return UserDict(input_ids=tokens, labels=[token % 3 for token in tokens])


def padded(found: list[Any]) -> UserDict[str, Tensor]:
    """As long as the longest of them."""
    width = max(len(one["labels"]) for one in found)

    def column(name: str, filler: int) -> Tensor:
        return torch.tensor([one[name] + [filler] * (width - len(one[name])) for one in found])

    return UserDict(input_ids=column("input_ids", 0), labels=column("labels", -100))


@warns(r"\d+ tensors stay whole", "no tensor of the model is cut")
def tokens(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Sentences of unequal length, padded to the longest of each data shard."""
    strategy = make_strategy(name or None, **options)
    net = Tagger()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.5),
        metrics="accuracy",
        strategy=strategy,
    )
    loader = torch.utils.data.DataLoader(Sentences(), 4, collate_fn=padded)
    history = trainer.fit(loader, epochs=2, validation_data=loader, verbose=0)
    result = {"history": history.history, "weights": weights(strategy, net)}
    strategy.close()
    return result


class Sequences(nn.Module):
    """Of sequences, padded or packed, time first; or of a tuple of such, its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.LSTM(2, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x: Any, y: Any = None) -> Any:
        if isinstance(x, tuple) and not isinstance(x, PackedSequence):
            each = [self(part[:, None])[0] - target for part, target in zip(x, y, strict=True)]
            return {"loss": torch.stack(each).square()}
        return self.last(self.first(x)[1][0][-1])


def _sequences(count: int = 9) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(3 + n % 3, 2, generator=generator).double() for n in range(count)]
    return [(x, torch.full((1,), n / 4).double()) for n, x in enumerate(drawn)]


def _columns(examples: list[Any]) -> Any:
    return tuple(zip(*examples, strict=True))


def _packed(examples: list[Any]) -> Any:
    x, y = _columns(examples)
    return pack_sequence(x, enforce_sorted=False), torch.stack(y)


def _time_first(examples: list[Any]) -> Any:
    x, y = _columns(examples)
    return torch.stack([part[:3] for part in x], 1), torch.stack(y)


def _some_rows(examples: list[Any]) -> Any:
    """Rows of the examples without two of them."""
    x, y = _time_first([(x, y) for x, y in examples if float(y) not in (0.25, 1.5)])
    return x.movedim(1, 0).flatten(1), y


OWN_FORMS: dict[str, Any] = {
    "columns": _columns, "packed": _packed, "time_first": _time_first, "some_rows": _some_rows,
}  # fmt: skip
"""Batches whose examples are no rows, and those of which some were left out."""


def _own_form(form: str) -> tuple[nn.Module, Any, Any]:
    """A model, its loss and a loader."""
    net = Sequences()
    if form == "some_rows":
        torch.manual_seed(3)
        net = nn.Linear(6, 1).double()  # type: ignore[assignment]
    loader: Any = torch.utils.data.DataLoader(_sequences(), 4, collate_fn=OWN_FORMS[form])  # type: ignore[arg-type]
    return net, None if form == "columns" else nn.MSELoss(), loader


def own_forms(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Losses, weights and an evaluation by each form."""
    found: dict[str, Any] = {}
    for form in OWN_FORMS:
        strategy = make_strategy(name, **options)
        net, loss, loader = _own_form(form)
        trainer = sp.Trainer(
            net, optimizer=torch.optim.SGD(net.parameters(), 0.05), loss=loss, strategy=strategy
        )
        history = trainer.fit(loader, epochs=2, verbose=0)
        last = trainer.evaluate(loader)["loss"]
        found[form] = {"loss": history.history["loss"], "weights": weights(strategy, net),
                       "last": last}  # fmt: skip
        strategy.close()
    return found


def own_forms_by_torch() -> dict[str, Any]:
    """The same in a loop by hand."""
    found: dict[str, Any] = {}
    for form in OWN_FORMS:
        net, loss, loader = _own_form(form)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        losses: list[float] = []
        for learns in (True, True, False):
            total, count = 0.0, 0
            for x, y in loader:
                value = net(x, y)["loss"].mean() if loss is None else loss(net(x), y)
                total, count = total + value.item() * len(y), count + len(y)
                if learns:
                    optimizer.zero_grad()
                    value.backward()
                    optimizer.step()
            losses.append(total / count)
        found[form] = {"loss": losses[:2], "weights": net.state_dict(), "last": losses[2]}
    return found


def left_out_with_dropout(name: str, options: dict[str, Any], predicts: bool = False) -> None:
    """A deterministic training whose collate function leaves out an example."""
    strategy = make_strategy(name, **options)
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    trainer = sp.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), 0.05), loss=nn.MSELoss(),
        strategy=strategy, deterministic=True,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(_sequences(4), 4, collate_fn=_some_rows)  # type: ignore[arg-type]
    trainer.predict(loader) if predicts else trainer.fit(loader, verbose=0)
    strategy.close()


class TimeFirst(nn.Module):
    """A mean over time, which comes first, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(2, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x)).mean(0))
        return found


def time_first_in_stages(name: str, options: dict[str, Any]) -> list[float]:
    """The losses of a model in stages whose batches have time first."""
    strategy = make_strategy(name, **options)
    net = TimeFirst()
    trainer = sp.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), 0.05), loss=nn.MSELoss(), strategy=strategy
    )
    loader: Any = torch.utils.data.DataLoader(_sequences(8), 4, collate_fn=_time_first)  # type: ignore[arg-type]
    history = trainer.fit(loader, epochs=2, verbose=0)
    strategy.close()
    return history.history["loss"]
