"""What the contract tests run of data: dicts, streams, sentences, and examples that are broken."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
