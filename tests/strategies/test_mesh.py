"""What is particular to a mesh; test_contracts.py has what holds for every strategy."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import spartito as sp
from spartito.mesh.collectives import Axis
from spartito.models import GPT
from tests.replicas import ReplicaError, Replicas, warns
from tests.skips import shares_memory
from tests.strategies.jobs import blobs, make_strategy, mlp
from tests.strategies.test_contracts import EXACT, close

Net = Callable[[], nn.Module]


class Mixed(nn.Module):
    """Dropout on whole and on cut tensors, a parameter of its own, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.again = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.again.weight
        self.head = nn.Linear(8, 3)
        self.up.weight.requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.up(x)))
        x = self.drop(self.norm(self.down(x)) * self.scale)
        x = torch.tanh(self.tied(torch.tanh(self.again(x))))
        out: Tensor = self.head(x + nn.functional.linear(x, self.again.weight))
        return out


def by_torch(build: Net, optimizer: str, steps: int = 6) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and values of a loop that knows torch alone."""
    net = build()
    torch.manual_seed(5)
    update = getattr(torch.optim, optimizer)([p for p in net.parameters() if p.requires_grad], 0.05)
    x, y = blobs(8 * steps)
    losses = []
    for step in range(steps):
        rows = slice(8 * step, 8 * step + 8)
        update.zero_grad()
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        update.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


@warns(r"\d+ tensors stay whole")
def on_mesh(
    build: Net, optimizer: str, options: dict[str, Any], steps: int = 6
) -> tuple[list[float], dict[str, Tensor]]:
    """The same by a strategy."""
    with sp.MeshStrategy(**options, sync_batchnorm=True) as strategy:
        net = build()
        torch.manual_seed(5 + strategy.cluster.rank)  # the chief's counts
        learn = [p for p in net.parameters() if p.requires_grad]
        made = getattr(torch.optim, optimizer)(learn, 0.05)
        strategy.prepare(net, made, clip_norm=0.5)
        batches = strategy.distribute(sp.data.arrays(*blobs(8 * steps)).batch(8))
        losses = []
        for batch in batches:
            result = strategy.step(batch, nn.functional.cross_entropy)
            losses.append(float(result.loss) / float(result.weight))
        strategy.coordination.compare()
        values = strategy.state_dict()["model"]
        return losses, {name: value.clone() for name, value in values.items()}


TWO_AXES = {
    "mesh": {"rows": 2, "columns": 2},
    "layout": [("hidden", "rows"), ("features", "columns"), ("channels", "columns")],
}


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
@pytest.mark.parametrize(
    ("tasks", "options"), [(2, {"model": 2}), (4, TWO_AXES)], ids=["two", "two-axes"]
)
def test_plain_torch_has_the_same_numbers_with_its_own_dropout(
    replicas: Replicas, tasks: int, options: dict[str, Any], optimizer: str
) -> None:
    expected = replicas(by_torch, 1, Mixed, optimizer)[0]
    for found in replicas(on_mesh, tasks, Mixed, optimizer, options):
        close(list(found), list(expected))


class Odd(nn.Module):
    """What no layout was made for: recurrence, weights read by hand, norms, checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(12, 8)
        self.wide = nn.Linear(8, 16)
        self.act = nn.PReLU(16)
        self.norm = nn.RMSNorm(16)
        self.each = nn.InstanceNorm1d(16, affine=True, track_running_stats=True)
        self.narrow = nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(16)])
        self.memory = nn.LSTM(8, 8, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.double()

    def inner(self, x: Tensor) -> Tensor:
        spread = self.act(self.wide(x).transpose(1, 2).contiguous()).transpose(1, 2)
        spread = self.each(spread.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.norm(spread) * self.scales[1]
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * self.scales[0]
        x = self.encoder(x, src_key_padding_mask=tokens == 3)
        inside = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        x = self.memory(self.narrow(inside))[0]
        x = x + torch.einsum("btf,fk->btk", inside, self.wide.weight)
        return nn.functional.linear(x, self.words.weight)


@warns("prelu has no rule for")
def odd(mesh: bool) -> tuple[list[float], Tensor]:
    """Losses and predictions of it, by plain torch or on a mesh."""
    tokens = (torch.arange(40).view(8, 5) * 7) % 12
    net, losses = Odd(), []
    update = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    if not mesh:
        for _ in range(4):
            update.zero_grad()
            value = loss(net(tokens), tokens)
            value.backward()
            update.step()
            losses.append(value.item())
        with torch.no_grad():
            found: Tensor = net.eval()(tokens)
        return losses, found
    with sp.MeshStrategy(model=2, sync_batchnorm=True) as strategy:
        trainer = sp.Trainer(net, optimizer=update, loss=loss, strategy=strategy)
        for _ in range(4):
            for batch in strategy.distribute(sp.data.arrays(tokens, tokens).batch(8)):
                result = strategy.step(batch, loss)
                losses.append(float(result.loss) / float(result.weight))
        return losses, trainer.predict(tokens)


def test_a_module_that_no_layout_was_made_for(replicas: Replicas) -> None:
    expected = replicas(odd, 1, False)[0]
    for found in replicas(odd, 4, True):
        close(list(found), list(expected))


def held(optimizer: str) -> tuple[int, int, str]:
    """Bytes behind parameters and state, those of one device, and what is refused of a module."""
    with sp.MeshStrategy(layout={"hidden": "model"}) as strategy:
        net = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
        whole = sum(p.nbytes for p in net.parameters())
        update = getattr(torch.optim, optimizer)(net.parameters())
        strategy.prepare(net, update)
        x = torch.randn(4, 16)
        for batch in strategy.distribute(sp.data.arrays(x, x).batch(4)):
            strategy.step(batch, nn.functional.mse_loss)
        state = [v for each in update.state.values() for v in each.values() if v.dim()]
        copies = 1 + len(state) // 2
        bytes_here = sum(t.untyped_storage().nbytes() for t in [*net.parameters(), *state])
        assert next(copy.deepcopy(net).parameters()).shape == (8, 16)
        assert strategy.state_dict()["model"]["0.weight"].shape == (32, 16)
        with pytest.raises(sp.UserError) as error:
            net.state_dict()
        return bytes_here, whole * copies, str(error.value)


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_a_task_of_four_holds_a_quarter(replicas: Replicas, optimizer: str) -> None:
    for here, whole, says in replicas(held, 4, optimizer):
        assert here == whole // 4
        assert "shards of its parameters" in says


def drifting(rank: int, what: str, zero: int = 0) -> str:
    """One of four tasks changes something by itself."""
    with sp.MeshStrategy(model=2, zero=zero) as strategy:
        net = mlp()
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        if strategy.cluster.rank == rank:
            if what == "generator":
                torch.rand(1)
            else:
                net.get_parameter(what).data += 1e-9
        try:
            trainer.fit(blobs(8), batch_size=4, verbose=0)
        except sp.UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("tasks", "rank", "what", "text"),
    [
        (4, 2, "0.weight", "worker 2 has other parameters than worker 0"),  # its shard, elsewhere
        (2, 1, "3.bias", "worker 1 has other parameters than worker 0"),  # whole on all
        (4, 3, "generator", "worker 3 has drawn other random numbers than worker 2"),
    ],
)
def test_a_task_that_drifts_is_named(
    replicas: Replicas, tasks: int, rank: int, what: str, text: str
) -> None:
    for found in replicas(drifting, tasks, rank, what):
        assert f"drifted apart: {text}" in found


def test_drift_is_found_where_nothing_lies_in_shards(replicas: Replicas) -> None:
    """zero=3 on a mesh with one data shard."""
    for found in replicas(drifting, 2, 1, "3.bias", 3):
        assert "drifted apart: worker 1 has other parameters than worker 0" in found


def refused(options: dict[str, Any], build: Net, optimizer: str = "SGD") -> str:
    """The error of a strategy or its `prepare`."""
    try:
        with sp.MeshStrategy(**options) as strategy:
            net = build()
            strategy.prepare(net, getattr(torch.optim, optimizer)(net.parameters(), 0.1))
    except sp.UserError as error:
        return str(error)
    return ""


def three_heads() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 3, 8)


@pytest.mark.parametrize(
    ("options", "build", "text"),
    [
        ({"mesh": {"model": 3}}, mlp, "a mesh of model 3 = 3 tasks in a job of 2"),
        ({"model": 3}, mlp, "model=3 in a job of 2 tasks\n  It divides the number of tasks: 1, 2"),
        ({"mesh": {"model": 2}, "model": 2}, mlp, "give one"),
        ({"mesh": {"data": 2, "model": 0}}, mlp, "a size of 1 or more"),
        ({"layout": [("hidden", "modell")]}, mlp, "'modell', which the mesh has not"),
        ({"layout": [("hiden", "model")]}, mlp, "The model has hidden (3 tensors), features"),
        ({"names": {"0.weights": (None,)}}, mlp, "Did you mean '0.weight'"),
        ({"names": {"0.weight": ("hidden", "vocab")}}, mlp, "both on the axis 'model'"),
        ({"names": {"3.weight": ("hidden", None)}, "strict": True}, mlp, "3 hidden do not divide"),
        ({"strict": True}, three_heads, "3 heads do not divide among model=2"),
        ({"communication": "ddp"}, mlp, "DDP takes models that are whole"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    replicas: Replicas, options: dict[str, Any], build: Net, text: str
) -> None:
    for found in replicas(refused, 2, options, build):
        assert text in found


class Mapped(nn.Module):
    """It computes each row by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.vmap(self.layer)(x)
        return found


def mapped() -> str:
    with sp.MeshStrategy() as strategy:
        net = Mapped()
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        data = sp.data.arrays(torch.zeros(4, 6), torch.zeros(4, 6)).batch(4)
        try:
            for batch in strategy.distribute(data):
                strategy.step(batch, nn.MSELoss())
        except sp.UserError as error:
            return str(error)
    return ""


def test_a_transform_of_functions_is_refused_where_tensors_are_cut(replicas: Replicas) -> None:
    for found in replicas(mapped, 2):
        assert "linear() of a sharded tensor inside of torch.vmap" in found


def test_an_optimizer_that_looks_at_whole_parameters_is_refused(replicas: Replicas) -> None:
    for found in replicas(refused, 2, {}, mlp, "Adafactor"):
        assert "Adafactor may look at whole parameters" in found


def small_gpt() -> nn.Module:
    torch.manual_seed(2)
    return GPT(12, context=8, layers=1, heads=2, width=8, dropout=0.0)


def _counting(plain: Any, calls: list[int], by_result: bool) -> Any:
    """A collective of `Axis` that notes the bytes of its tensor, or of its result."""

    def call(self: Axis, tensor: Tensor, *args: Any) -> Tensor:
        before = len(calls)
        result: Tensor = plain(self, tensor, *args)
        calls[before:] = [result.nbytes if by_result else tensor.nbytes]
        return result

    return call


def counted() -> tuple[tuple[int, int], tuple[int, int]]:
    """Calls and bytes of the collectives of a step: as described, and as they came."""
    sentences = torch.arange(24).view(3, 8) % 12
    with sp.MeshStrategy() as strategy:
        net = small_gpt()
        described = strategy.describe(net, sentences)
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        calls: list[int] = []
        plain = {name: getattr(Axis, name) for name in ("sum", "all", "sum_own", "most")}
        try:
            for name, method in plain.items():
                setattr(Axis, name, _counting(method, calls, name == "all"))
            for batch in strategy.distribute(sp.data.arrays(sentences, sentences).batch(3)):
                strategy.step(batch, lambda out, y: out.sum() / out.numel())
        finally:
            for name, method in plain.items():
                setattr(Axis, name, method)
    costs = described.costs
    assert costs, described.example
    return (sum(c.calls for c in costs), sum(c.nbytes for c in costs)), (len(calls), sum(calls))


def test_the_collectives_that_are_described_are_those_that_come(replicas: Replicas) -> None:
    for described, came in replicas(counted, 2):
        assert described == came
        assert came[0] > 0


def penalized(fits: bool = False) -> str:
    """The error of a loss that has a penalty over the parameters outside of the model."""
    net = mlp()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in net.parameters())
        return nn.functional.cross_entropy(output, target) + penalty

    data = sp.data.arrays(*blobs(8)).batch(8)
    try:
        with sp.MeshStrategy() as strategy:
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            if fits:
                trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy)
                trainer.fit(data, epochs=2, verbose=0)
                return "two epochs"
            strategy.prepare(net, optimizer)
            for batch in strategy.distribute(data):
                strategy.step(batch, loss)
    except sp.UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fits", [False, True], ids=["own-loop", "fit"])
def test_a_penalty_that_sees_one_tasks_shards_is_refused(
    replicas: Replicas, accelerator_groups: Replicas, fits: bool
) -> None:
    """On devices where replicas are compared: nobody waits for the losses of a step."""
    for pool in (replicas, accelerator_groups):
        for found in pool(penalized, 2, fits):
            assert "the tasks of one model have different losses" in found


def moving() -> list[str]:
    """What strategies say to a model that was on a mesh, and its losses on the same one again."""
    net = mlp()
    made = []
    for kind, options in [
        (sp.MeshStrategy, {}),
        (sp.MeshStrategy, {}),
        (sp.MeshStrategy, {"mesh": {"data": 2, "model": 1}}),
        (sp.MirroredStrategy, {}),
    ]:
        with kind(**options) as strategy:
            try:
                trainer = sp.Trainer(
                    net,
                    optimizer=torch.optim.SGD(net.parameters(), 0.1),
                    loss=nn.CrossEntropyLoss(),
                    strategy=strategy,
                )
                made.append(str(trainer.fit(blobs(8), verbose=0).history["loss"][0]))
            except sp.UserError as error:
                made.append(str(error))
    return made


def test_shards_are_taken_by_the_same_mesh_alone(replicas: Replicas) -> None:
    for first, again, other, mirrored in replicas(moving, 2):
        assert float(again) < float(first)
        assert "cut for another mesh" in other
        assert "0.weight is here a shard, (4, 6) of (8, 6)" in mirrored


def test_a_description_needs_no_other_task() -> None:
    strategy = sp.MeshStrategy(mesh={"model": 1})
    text = str(strategy.describe(small_gpt()))
    assert "embedding.weight" in text
    assert "warning: no tensor is cut" in text


def exchanged() -> list[float]:
    """Losses of two fits; between them a layer is exchanged."""
    with sp.MeshStrategy() as strategy:
        net = mlp()
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        losses = trainer.fit(blobs(24), batch_size=8, verbose=0).history["loss"]
        torch.manual_seed(strategy.cluster.rank)
        head = nn.Linear(8, 4).double()
        net.register_module("3", head)
        trainer.optimizer.param_groups[0]["params"][2:] = list(head.parameters())
        losses = losses + trainer.fit(blobs(24), batch_size=8, verbose=0).history["loss"]
        strategy.coordination.compare()
        return [*losses, head.weight.sum().item()]


def test_a_layer_that_is_exchanged_starts_with_the_chiefs_values(replicas: Replicas) -> None:
    one, other = replicas(exchanged, 2)
    (alone,) = replicas(exchanged, 1)
    close(one, other)
    assert max(abs(a - b) for a, b in zip(one, alone, strict=True)) < EXACT


def saving_alone(folder: str) -> None:
    """The chief saves by itself in the middle of an epoch; the other waits for its error."""
    over = Path(folder) / "over"

    class Saves(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if not self.trainer.is_chief:
                over.read_bytes()
                return
            try:
                self.trainer.save(Path(folder) / "saved")
            finally:
                over.write_bytes(b"")

    with sp.MeshStrategy(model=2, timeout=3) as strategy:
        net = mlp()
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        trainer.fit(blobs(12), epochs=1, batch_size=4, callbacks=[Saves()], verbose=0)


@shares_memory
def test_a_save_on_one_task_alone_is_named(replicas: Replicas, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "over")
    first, _ = replicas.outcomes(saving_alone, 2, str(tmp_path))
    assert "[save]. All tasks call save, not the chief alone." in first.text


def averaged(name: str, options: dict[str, Any]) -> list[Tensor] | str:
    """What an average holds that was made before the Trainer, and follows each step."""
    net = mlp()
    average = AveragedModel(net)

    class Averages(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            average.update_parameters(net)

    with sp.strategy(name, **options) as strategy:
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        try:
            trainer.fit(blobs(12), epochs=2, batch_size=4, callbacks=[Averages()], verbose=0)
        except sp.UserError as error:
            return str(error)
    return [parameter.detach().clone() for parameter in average.module.parameters()]


@pytest.mark.parametrize(
    ("name", "options"), [("mesh", {"mesh": {"model": 2}}), ("pipeline", {"microbatches": 2})]
)
def test_an_average_of_a_divided_model_is_refused_by_name(
    replicas: Replicas, name: str, options: dict[str, Any]
) -> None:
    for found in replicas(averaged, 2, name, options):
        assert "an average of a Sequential of which each task has a part" in found


def test_an_average_of_a_whole_model_is_that_of_one_device(replicas: Replicas) -> None:
    (expected,) = replicas(averaged, 1, "one_device", {})
    for found in replicas(averaged, 2, "mesh", {"mesh": {"data": 2}}):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=EXACT)


def with_sparse_rows(model: int) -> None:
    with sp.MeshStrategy(model=model) as strategy:
        net = nn.EmbeddingBag(8, 4, sparse=True)
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))


def test_sparse_gradients_are_refused_where_tensors_are_cut(replicas: Replicas) -> None:
    replicas(with_sparse_rows, 1, 1)
    with pytest.raises(ReplicaError, match="UserError: sparse gradients under mesh"):
        replicas(with_sparse_rows, 2, 2)


def with_lookups(name: str, what: dict[str, Any]) -> None:
    with make_strategy(name) as strategy:
        net = nn.Sequential(nn.Embedding(8, 4, **what), nn.Linear(4, 2))
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))


@pytest.mark.parametrize("name", ["mirrored", "sharded", "central_storage"])
@pytest.mark.parametrize("what", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_lookups_of_all_rows_are_refused_where_there_are_replicas(
    replicas: Replicas, name: str, what: dict[str, Any]
) -> None:
    replicas(with_lookups, 1, name, what)
    with pytest.raises(ReplicaError, match=r"UserError: (max_norm=1\.0|scale_grad_by_freq) of 0, "):
        replicas(with_lookups, 2, name, what)
