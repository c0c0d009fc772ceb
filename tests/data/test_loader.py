"""What replicas read together is what one would read, from any position on."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, arrays, as_dataset, per_worker
from spartito.data.images.transforms import RandomTransform
from spartito.data.reading.collate import count_rows
from spartito.data.reading.loader import Loader, check_divides
from spartito.data.source import BatchStream, ExampleStream, InputContext
from spartito.errors import CorruptSampleError, UserError


class Numbers:
    """Examples ``(n, -n)`` that are read one by one; some of them cannot be."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.broken:
            raise CorruptSampleError(f"number {index} is broken")
        return torch.tensor([float(index)]), -index


class Shake(RandomTransform):
    """Adds something random to a number."""

    def transform(self, image: Tensor, generator: np.random.Generator) -> Tensor:
        return image + generator.random()


def whole(parts: list[Batch]) -> tuple[Any, ...]:
    """One global batch from its local ones, in a form to compare."""
    sizes = [part.size for part in parts]
    taking_part = [size for size in sizes if size]
    assert max(taking_part) - min(taking_part) <= 1
    assert min(taking_part) > 1 or len(taking_part) == 1 or sum(sizes) >= len(sizes)
    assert sum(sizes) == parts[0].global_size
    assert len({(part.global_size, part.epoch, part.step) for part in parts}) == 1
    offsets = torch.cat([part.offsets for part in parts])
    assert offsets.tolist() == list(range(sum(sizes)))
    for part in parts:
        assert part.x.shape[0] == part.y.shape[0] == part.size
        assert (part.spare is None) == (part.size > 0)
        if part.spare is not None:
            assert 1 <= len(part.spare[0]) == len(part.spare[1]) <= 2
            assert part.spare[0].shape[1:] == part.x.shape[1:]
    data = [torch.cat([getattr(part, name) for part in parts]).tolist() for name in ("x", "y")]
    return (parts[0].epoch, parts[0].step, *data)


def together(
    chain: Dataset, world_size: int, state: dict[str, int] | None = None, endless: bool = False
) -> Iterator[tuple[tuple[Any, ...], dict[str, int]]]:
    """The global batches of one epoch that so many replicas read, and the state after each."""
    loaders = [Loader(chain, (rank, world_size), seed=5) for rank in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    batches = [loader.endless() if endless else iter(loader) for loader in loaders]
    for parts in zip(*batches, strict=True):
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        yield whole(list(parts)), states[0]


chains = st.builds(
    lambda count, batch, shuffled, drop, repeat, gather, shake, ahead: _chain(
        count, min(batch, count) if drop else batch, shuffled, drop, repeat, gather, shake, ahead
    ),
    count=st.integers(1, 40),
    batch=st.integers(5, 12),
    shuffled=st.booleans(),
    drop=st.booleans(),
    repeat=st.integers(1, 3),
    gather=st.booleans(),
    shake=st.booleans(),
    ahead=st.sampled_from([0, 0, 2]),
)


def _chain(
    count: int,
    batch: int,
    shuffled: bool,
    drop: bool,
    repeat: int,
    gather: bool,
    shake: bool,
    ahead: int,
) -> Dataset:
    x = torch.arange(float(count))[:, None]
    chain = arrays(x, -torch.arange(count)) if gather else Dataset(Numbers(count))
    chain = chain.shuffle() if shuffled else chain
    chain = chain.map(Shake()).map(lambda x, y: (x * 2, y)) if shake else chain
    return chain.batch(batch, drop).repeat(repeat).prefetch(ahead)


@settings(max_examples=80)
@given(chain=chains, world_size=st.integers(1, 5))
def test_any_number_of_replicas_reads_the_same(chain: Dataset, world_size: int) -> None:
    world_size = min(world_size, chain.batch_size or 1)
    alone = [batch for batch, _ in together(chain, 1)]
    assert len(alone) == len(chain) == chain.steps_per_epoch
    assert [batch for batch, _ in together(chain, world_size)] == alone
    assert chain.steps_per_pass is not None
    for epoch, batches in enumerate(_passes(alone, chain.steps_per_pass)):
        labels = [label for _, _, _, y in batches for label in y]
        assert {batch[0] for batch in batches} == {epoch}
        assert len(set(labels)) == len(labels)  # no example twice
        if not chain.drop_remainder:
            assert len(labels) == chain.examples  # and none left out


def _passes(batches: list[Any], steps: int) -> list[list[Any]]:
    return [batches[start : start + steps] for start in range(0, len(batches), steps)]


@settings(max_examples=30)
@given(chain=chains, before=st.integers(1, 3), after=st.integers(1, 3), first=st.integers(0, 7))
def test_resuming_at_any_step(chain: Dataset, before: int, after: int, first: int) -> None:
    before, after = min(before, chain.batch_size or 1), min(after, chain.batch_size or 1)
    two_epochs = list(islice(together(chain, before, endless=True), 2 * len(chain)))
    stride = 1 + len(two_epochs) // 8  # a few offsets of many: each reads all of the rest
    for done in range(1 + first % stride, len(two_epochs) + 1, stride):
        state = two_epochs[done - 1][1]
        rest = islice(together(chain, after, state, endless=True), len(two_epochs) - done)
        assert [b for b, _ in rest] == [b for b, _ in two_epochs[done:]]
        # A single epoch ends where it would have.
        left = -done % len(chain)
        if done % (chain.steps_per_pass or 1):
            assert len(list(together(chain, after, state))) == left


def test_epochs_differ_in_order_and_in_what_is_random() -> None:
    chain = arrays(torch.zeros(20, 1), torch.arange(20)).shuffle().map(Shake()).batch(20)
    loader = Loader(chain)
    first, second = next(iter(loader)), None
    list(loader)
    second = next(iter(loader))
    assert first.y.tolist() != second.y.tolist()
    assert sorted(first.y.tolist()) == sorted(second.y.tolist())
    by_label = dict(zip(first.y.tolist(), first.x[:, 0].tolist(), strict=True))
    again = dict(zip(second.y.tolist(), second.x[:, 0].tolist(), strict=True))
    assert all(by_label[label] != again[label] for label in by_label)
    assert len(set(by_label.values())) == 20


def test_a_seed_of_its_own() -> None:
    def order(chain: Dataset, seed: int) -> list[int]:
        batch = next(iter(Loader(chain.batch(30), seed=seed)))
        return list(batch.y.tolist())

    chain = arrays(torch.zeros(30, 1), torch.arange(30))
    assert order(chain.shuffle(), 1) != order(chain.shuffle(), 2)
    assert order(chain.shuffle(7), 1) == order(chain.shuffle(7), 2) == order(chain.shuffle(), 7)
    assert order(chain.shuffle(0), 9) == order(chain.shuffle(), 0)


def test_padding_makes_equal_shards() -> None:
    chain = Dataset(Numbers(7), batch_size=4, padded=True)
    shares = [[b.x[:, 0].tolist() for b in Loader(chain, (rank, 3))] for rank in range(3)]
    assert shares == [[[0, 1], [4]], [[2, 3], [5]], [[3, 3], [6]]]


def test_an_empty_share_has_the_shape_of_a_full_one() -> None:
    class Described(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.ones(2, 3), "name": f"n{index}"}

    for source, collate in ((Described(5), None), (Numbers(5), torch.utils.data.default_collate)):
        chain = as_dataset(torch.utils.data.DataLoader(source, 4, collate_fn=collate))  # type: ignore[arg-type]
        last = list(Loader(chain, (1, 2)))[-1]
        assert (last.size, last.global_size, last.offsets.tolist()) == (0, 1, [])
        if collate is None:
            assert last.data["x"].shape == (0, 2, 3)
        else:
            assert last.x.shape == (0, 1)
            assert last.y.shape == (0,)


def test_whole_examples_stand_in_where_there_are_no_rows() -> None:
    """As of pictures with boxes, and where time comes first."""

    def time_first(examples: list[Any]) -> Any:
        return torch.stack([x.expand(7) for x, _ in examples], 1), torch.tensor([1.0])

    for collate, shape in (
        (lambda found: tuple(zip(*found, strict=True)), (1,)), (time_first, (7, 2)),
    ):  # fmt: skip
        chain = as_dataset(torch.utils.data.DataLoader(Numbers(9), 4, collate_fn=collate))  # type: ignore[arg-type]
        last = list(Loader(chain, (1, 2)))[-1]
        assert last.size == 0
        first = last.spare[0]
        assert (first[0] if isinstance(first, tuple) else first).shape == shape
        assert count_rows(last.data) == 0 if isinstance(first, torch.Tensor) else not last.x


def test_what_functions_leave_out_of_a_batch_does_not_count() -> None:
    def even(x: Tensor, y: Tensor) -> Any:
        return x[y % 2 == 0], y[y % 2 == 0]

    def collated(examples: list[Any]) -> Any:
        return even(*torch.utils.data.default_collate(examples))

    loader: Any = torch.utils.data.DataLoader
    by_map = Dataset(Numbers(9)).batch(6).map(even)
    by_stream = as_dataset(loader([*Dataset(Numbers(9)).batch(6)], None))
    by_collate = as_dataset(loader(Numbers(9), 6, collate_fn=collated))
    for chain, last in ((by_map, (2, 0)), (by_stream.map(even), (1, 1)), (by_collate, (2, 0))):
        shares = [list(Loader(chain, (rank, 2))) for rank in range(2)]
        assert [[batch.size for batch in own] for own in shares] == [[2, last[0]], [1, last[1]]]
        assert sum(batch.left_out for own in shares for batch in own) == 4
        assert {batch.global_size for own in shares for batch in own} == {6, 3}
        assert all(len(batch.offsets) == batch.size for own in shares for batch in own)
    as_they_are = loader([torch.ones(2)] * 4, 4, collate_fn=tuple)
    assert [batch.size for batch in Loader(as_dataset(as_they_are))] == [4]


class TestCorruptExamples:
    def test_they_keep_their_offsets(self, caplog: pytest.LogCaptureFixture) -> None:
        chain = Dataset(Numbers(9, broken=(1, 4, 5))).batch(6)
        loaders = [Loader(chain, (rank, 2)) for rank in range(2)]
        with caplog.at_level(logging.WARNING, "spartito"):
            epochs = [[list(loader) for loader in loaders] for _ in range(3)]
        for left, right in epochs:
            assert [b.offsets.tolist() for b in left] == [[0, 2], [0, 1, 2]]
            assert [b.offsets.tolist() for b in right] == [[3], []]
            assert [b.size for b in left + right] == [2, 3, 1, 0]
            assert {b.global_size for b in (left[0], right[0])} == {6}
            assert left[0].y.tolist() == [0, -2]
        messages = [record.getMessage() for record in caplog.records]
        named = [n for n in (1, 4, 5) for text in messages if f"number {n} is broken" in text]
        assert sorted(set(named)) == [1, 4, 5]
        assert len(set(messages)) == 3  # each once, in three epochs

    def test_a_shard_of_nothing_but_them(self) -> None:
        chain = Dataset(Numbers(8, broken=(0, 1))).batch(4)
        first = next(iter(Loader(chain, (0, 2))))
        assert (first.size, first.x.shape, first.y.shape) == (0, (0, 1), (0,))

    def test_too_many_are_an_error(self) -> None:
        broken = tuple(range(3, 9))
        chain = Dataset(Numbers(20, broken)).batch(5)
        assert sum(b.size for b in Loader(chain.skip_corrupt(6))) == 14
        with pytest.raises(UserError, match=r"6 examples cannot be read, the last: number 8") as e:
            list(Loader(chain.skip_corrupt(5)))
        assert "Up to 5 are skipped" in str(e.value)
        with pytest.raises(UserError, match="1 examples cannot be read"):
            list(Loader(chain.skip_corrupt(0)))

    @pytest.mark.parametrize("ahead", [0, 2])
    def test_all_of_them(self, ahead: int) -> None:
        chain = Dataset(Numbers(4, (0, 1, 2, 3))).batch(2).prefetch(ahead)
        with pytest.raises(UserError, match="not one example of the data set can be read"):
            list(Loader(chain))


class Counted:
    """An iterable that starts again, and knows how often it did."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.started = items, 0

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        return iter(self.items)


@settings(max_examples=40)
@given(
    count=st.integers(1, 25),
    batch=st.integers(4, 7),
    world_size=st.integers(1, 4),
    drop=st.booleans(),
    shake=st.booleans(),
)
def test_a_stream_of_examples(
    count: int, batch: int, world_size: int, drop: bool, shake: bool
) -> None:
    items = [(torch.tensor([float(n)]), -n) for n in range(max(count, batch))]
    chain = Dataset(ExampleStream(items)).map(lambda x, y: (x + 1, y))
    chain = (chain.map(Shake()) if shake else chain).batch(batch, drop)
    alone = list(together(chain, 1))
    assert [b for b, _ in together(chain, world_size)] == [b for b, _ in alone]
    assert sum(len(b[3]) for b, _ in alone) == len(items) - (len(items) % batch if drop else 0)
    for done, (_, state) in enumerate(alone[:-1], 1):
        rest = [b for b, _ in together(chain, world_size, state)]
        assert rest == [b for b, _ in alone[done:]]


def test_a_stream_of_batches() -> None:
    made = [
        [np.arange(5.0).reshape(5, 1), np.arange(5)],
        (torch.tensor([[9.0]]), torch.tensor([9])),
        {"x": torch.arange(6.0)[:, None], "y": torch.arange(6), "name": list("abcdef")},
    ]
    chain = Dataset(BatchStream(Counted(made))).map(
        lambda *data: data[0] if len(data) < 2 else data
    )
    parts = [list(Loader(chain, (rank, 2))) for rank in range(2)]
    assert [b.size for b in parts[0]] == [2, 1, 3]
    assert [b.size for b in parts[1]] == [3, 0, 3]
    assert [b.spare is None for b in parts[1]] == [True, False, True]
    assert parts[1][0].x.tolist() == [[2.0], [3.0], [4.0]]
    assert parts[1][2].data["name"] == ["d", "e", "f"]


def test_a_stream_of_batches_whose_examples_are_no_rows() -> None:
    lengths = (3, 5, 4, 6, 2)
    seqs = [(torch.arange(n), f"t{n}") for n in lengths]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(seqs)

    def ragged(found: list[Any]) -> Any:
        return tuple(zip(*found, strict=True))

    loader = torch.utils.data.DataLoader(Stream(), 4, collate_fn=ragged)
    for count in (1, 2):
        seen = [[*Loader(as_dataset(loader), (rank, count))] for rank in range(count)]
        for step, size in enumerate((4, 1)):
            batches = [part[step] for part in seen]
            assert sum(batch.size for batch in batches) == batches[0].global_size == size
            found = [(len(x), y) for batch in batches for x, y in zip(*batch.data, strict=True)]
            assert found == [(n, f"t{n}") for n in lengths[4 * step :][:4]]


def test_a_stream_of_batches_that_cannot_be_divided() -> None:
    batch = {"x": torch.ones(4, 2), "table": torch.arange(9.0), "scale": torch.tensor(0.5)}
    chain = as_dataset(torch.utils.data.DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    (found,) = Loader(chain)
    assert found.size == 4
    assert len(found.data["table"]) == 9
    with pytest.raises(UserError, match=r"cannot be divided among replicas: .* 4, 9 rows"):
        list(Loader(chain, (0, 2)))


def test_a_stream_that_ends_for_good() -> None:
    loader = Loader(Dataset(BatchStream(iter([(torch.zeros(2, 1), torch.zeros(2))]))))
    assert len(list(loader)) == 1
    with pytest.raises(UserError, match="the list_iterator that was given as data is used up"):
        list(loader)
    with pytest.raises(UserError, match="the data set has no examples"):
        list(Loader(Dataset(BatchStream(Counted([])))))


def test_a_list_of_what_looks_like_batches_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is read as examples; a loader without a batch size takes batches as they are."""
    batches = [(torch.zeros(5, 6), torch.zeros(5)) for _ in range(8)]
    assert next(iter(Loader(as_dataset(batches)))).x.shape == (8, 5, 6)
    assert "a list is taken as examples, here 8" in caplog.text
    caplog.clear()
    assert next(iter(Loader(as_dataset([torch.zeros(5, 6)] * 2)))).x.shape == (2, 5, 6)
    assert "here 2" in caplog.text
    assert "if they are x and y, a tuple (x, y)" in caplog.text
    caplog.clear()
    plain: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    assert [batch.x.shape for batch in Loader(as_dataset(plain))] == [(5, 6)] * 8
    for examples in (
        [(torch.zeros(6), torch.tensor(1))] * 8,
        [{"x": torch.zeros(6), "name": "a"}] * 8,
        [torch.zeros(5, 6)] * 8,
        [torch.zeros(2)] * 2,
        [(torch.zeros(1, 6), torch.zeros(1))] * 8,
    ):
        next(iter(Loader(as_dataset(examples))))
    assert not caplog.text


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_of_a_data_set_names_the_example(ahead: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise OSError("no such picture")
            return super().__getitem__(index)

    with pytest.raises(OSError, match="no such picture") as info:
        list(Loader(Dataset(Broken(6)).batch(2).prefetch(ahead)))
    (note,) = info.value.__notes__
    assert "example 3 of Broken" in note
    assert "raise spartito.CorruptSampleError" in note
    source: Any = Broken(6)
    loader: Any = torch.utils.data.DataLoader(source, 2, num_workers=1)
    with pytest.raises(OSError, match="example 3 of Broken"):
        list(Loader(as_dataset(loader)))


def test_mappings_of_any_kind_and_depth() -> None:
    """A tokenizer returns a UserDict, and examples may be nested."""
    x = torch.arange(12.0).view(6, 2)
    tokens = UserDict({"input_ids": x, "more": {"mask": x[:, 0]}})
    nested = ((x, {"again": -x}), torch.arange(6))
    streams = [UserDict(input_ids=x[:4]), UserDict(input_ids=x[4:])]

    class Encoded(Numbers):
        def __getitem__(self, index: int) -> Any:
            return UserDict(input_ids=x[index], more=UserDict(mask=x[index, 0]))

    for brought in (tokens, Encoded(6), per_worker(lambda context: streams)):
        batches = list(Loader(as_dataset(brought, 4)))
        assert all(type(batch.data) is dict for batch in batches)
        assert torch.equal(torch.cat([batch.data["input_ids"] for batch in batches]), x)
    mapped = arrays(x).batch(3).map(lambda rows: UserDict(x=rows))
    assert [type(batch.data) for batch in Loader(mapped)] == [dict, dict]
    (left, named), y = next(iter(Loader(as_dataset(nested, 6).shuffle()))).data
    assert torch.equal(left, -named["again"])
    assert torch.equal(left, x[y])
    (alone,) = next(iter(Loader(as_dataset(((x, x),), 6)))).data
    assert torch.equal(alone[1], x)
    assert arrays(x, (0, 1, 1, 0, 1, 0)).examples == 6  # a tuple of numbers is an array


def test_each_worker_makes_its_own() -> None:
    asked: list[InputContext] = []

    def batches(context: InputContext) -> Iterator[Any]:
        asked.append(context)
        for n in range(3):
            yield [np.full((2, 1), n + 10 * context.data_shard[0]), torch.full((2,), n)]

    chain = per_worker(batches).map(lambda x, y: (x + 0.5, y))
    loader = Loader(chain, (1, 3))
    got = list(loader)
    assert [b.x[0].item() for b in got] == [10.5, 11.5, 12.5]
    assert (got[0].size, got[0].global_size, got[0].offsets.tolist()) == (2, 6, [2, 3])
    resumed = Loader(chain, (1, 3))
    resumed.load_state_dict({"pass": 4, "step": 2})
    assert [b.x[0].item() for b in resumed] == [12.5]
    assert asked == [InputContext((1, 3), 0), InputContext((1, 3), 4)]


def test_loaders_that_cannot_be() -> None:
    three = arrays(torch.zeros(3, 1))
    with pytest.raises(UserError, match="a global batch of 2 for 3 replicas"):
        check_divides(three.batch(2), 3)
    with pytest.raises(UserError, match="the data set has no examples"):
        Loader(arrays(torch.zeros(0, 1)).batch(2))
    with pytest.raises(UserError, match="3 examples are fewer than one batch of 4"):
        Loader(three.batch(4, drop_remainder=True))
    with pytest.raises(UserError, match="a data set without batches"):
        Loader(three)


def test_a_batch_unpacks_and_indexes_as_its_data_do() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    (pair,) = Loader(arrays(x, y).batch(3))
    inputs, targets = pair
    assert inputs is pair.x
    assert targets is pair[1] is pair.y
    (named,) = Loader(as_dataset({"x": x, "labels": y}, 3))
    assert torch.equal(named["labels"], y)
    assert dict(**named).keys() == {"x", "labels"}
