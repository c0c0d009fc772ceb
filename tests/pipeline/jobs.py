"""What the tests of pipelines run on every task; each returns plain values to compare."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, partial
from itertools import chain, count, repeat
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spartito as sp
from spartito.engine.devices.host_reads import on_host
from spartito.engine.modules.recompute import recompute
from spartito.engine.randomness.global_randomness import globalize, replaying
from spartito.engine.step_context import StepContext, enter
from spartito.errors import SpartitoError, UserError
from spartito.models.cats_vs_dogs import CatsVsDogs
from spartito.models.gpt import GPT
from spartito.steps.placements.stages import Lines, Pipelines
from tests.mesh.tables import Squared

STEPS = 5

Made = tuple[nn.Module, Tensor, Tensor, Callable[[Any, Any], Any]]


def mlp() -> Made:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(),
        nn.Dropout(0.3), nn.Linear(16, 3),
    )  # fmt: skip
    return net.double(), torch.randn(19, 6).double(), torch.arange(19) % 3, nn.CrossEntropyLoss()


def gpt() -> Made:
    torch.manual_seed(0)
    net = GPT(12, 8, layers=4, heads=2, width=8, dropout=0.2, packed=True).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    tokens = torch.randint(0, 12, (9, 8))
    return net, tokens, torch.cat([tokens[:, 1:], tokens[:, :1]], 1), loss


def gpt_again() -> Made:
    """Blocks that compute their activations again, also where a stage begins inside of one."""
    made = gpt()
    recompute(made[0], True)
    return made


class Regions(nn.Module):
    """Activations that are computed again: of a function, inside of others, with what crosses."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)
        self.within = self.inner if reentrant else partial(self.again, self.inner)
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(width, width) for _ in range(5))
        self.drop, self.scale = nn.Dropout(0.3), nn.Parameter(torch.ones(width))

    def inner(self, x: Tensor, scale: float) -> Tensor:
        made: Tensor = self.drop(self.e(torch.tanh(self.b(x)))) * scale
        return made

    def outer(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        seen = self.within(hidden.sin(), 1.5)
        made = F.linear(torch.sin(seen), self.c.weight, self.c.bias * self.scale)
        out: Tensor = self.drop(made) + hidden * x
        return out

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.again(self.outer, self.drop(x * self.scale))
        out: Tensor = self.again(self.d, hidden) + x
        return out


def regions(reentrant: bool = False) -> Made:
    torch.manual_seed(0)
    x, y = torch.randn(19, 6).double(), torch.arange(19) % 6
    return Regions(6, reentrant).double(), x, y, nn.CrossEntropyLoss()


def cats() -> Made:
    torch.manual_seed(0)
    photos = torch.rand(8, 3, 16, 16).double() * 255
    net = CatsVsDogs().double()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # drawn alike in deterministic training alone
    return (
        net,
        photos,
        torch.arange(8.0).double()[:, None] % 2,
        nn.BCEWithLogitsLoss(),
    )


def encoder() -> Made:
    """Layers of torch's own that nobody wrote for this, with a mask that all of them take."""
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)
            self.head = nn.Linear(8, 12)

        def forward(self, tokens: Tensor) -> Tensor:
            size = tokens.shape[1]
            mask = torch.full((size, size), -torch.inf, device=tokens.device).double().triu(1)
            hidden = self.encoder(self.embed(tokens), mask=mask)
            out: Tensor = self.head(hidden)
            return out

    _, tokens, target, loss = gpt()
    return Tagger().double(), tokens, target, loss


def frozen() -> Made:
    """The first layers do not learn, and one parameter is never used."""
    layers, x, y, loss = mlp()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.spare = layers, nn.Linear(2, 2).double()
            self.layers[0].requires_grad_(False)  # type: ignore[index]
            self.layers[2].requires_grad_(False)  # type: ignore[index]

        def forward(self, data: Tensor) -> Tensor:
            out: Tensor = self.layers(data)
            return out

    return Net(), x, y, loss


class Keeps(nn.Module):
    """It changes buffers in place: before parameters, of activations, and for a later layer."""

    calls: Tensor
    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.first(x) * (1 + 0.1 * self.calls)
        self.mean.mul_(0.9)
        self.mean += x.detach().mean(0)
        x = self.third(torch.tanh(self.second(torch.tanh(x) - self.mean)))
        out: Tensor = self.last(torch.tanh(x))
        return out


class Crosses(nn.Module):
    """Masks, numbers, scalars, views and skips cross, and one of them is changed in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.past, self.more = (nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.a(x)
        most, mask, mean = hidden.argmax(1), hidden > 0, hidden.mean()
        wide = hidden.mean(1, keepdim=True).expand(-1, x.shape[1])
        y = self.b(torch.tanh(hidden)).masked_fill(mask, 0.3) + wide
        y = self.relu(y + F.one_hot(most, x.shape[1]) * mean) * 1.5
        y[:, :2] *= 2
        seen = self.more(self.past(y[:, None])[0])[0][:, 0]
        out: Tensor = self.c(seen) + x
        return out


class Itself(torch.autograd.Function):
    """It returns what it takes, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Functions(nn.Module):
    """Functions with a backward pass of their own take what crosses, and give what crosses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

        def thrice(module: nn.Module, found: Any, _: Any) -> Any:
            return (found[0] * 3,)

        self.b.register_full_backward_hook(thrice)

    def forward(self, x: Tensor) -> Tensor:
        itself: Any = Itself.apply
        squared: Any = Squared.apply
        hidden: Tensor = self.a(itself(x))
        passed: Tensor = itself(hidden)
        own = torch.tanh(self.b(passed)) + squared(hidden, self.scale)
        out: Tensor = self.c(own + passed)
        return out


def functions() -> Made:
    _, x, y, loss = keeps()
    return Functions(6).double(), x, y, loss


def keeps() -> Made:
    torch.manual_seed(0)
    x, y = torch.randn(19, 6).double(), torch.arange(19) % 3
    return Keeps(6).double(), x, y, nn.CrossEntropyLoss()


def crosses() -> Made:
    _, x, y, loss = keeps()
    return Crosses(6).double(), x, y, loss


def idles() -> Made:
    """A stage may be without parameters."""
    _, x, y, loss = keeps()
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Tanh(), nn.Linear(6, 6))
    return net.double(), x, y, loss


class Written(nn.Module):
    """A tensor that is made in one stage, and learns in the next one, which writes into it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.a(x))
        made = torch.zeros_like(hidden)
        made[:, 0] = 0.5
        hidden = torch.tanh(self.b(hidden))
        made[:, 1:] = hidden[:, 1:]
        out: Tensor = self.c(made * hidden)
        return out


def written() -> Made:
    torch.manual_seed(0)
    x, y = torch.randn(19, 6).double(), torch.arange(19) % 6
    return Written(6).double(), x, y, nn.CrossEntropyLoss()


class Looks(nn.Module):
    """What it does hangs on the values of its input: a mask without a 0, the longest row, rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.mix, self.out = (nn.Linear(width, width) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        mask: Tensor | None = tokens != 0
        lengths = (tokens != 0).sum(1)
        hidden: Tensor = self.embed(tokens)[:, : lengths.max()]
        tokens = tokens[:, : int(lengths.max())]
        if mask is not None and mask.all():
            mask = None
        if mask is not None:
            hidden = hidden * mask[:, : hidden.shape[1], None]
        hidden = torch.tanh(self.mix(hidden)) * (1 + 0.1 * lengths.sum().item())
        mean = hidden[tokens != 0].mean()
        out: Tensor = self.out(hidden.sum(1)) + mean
        return out


def looks() -> Made:
    torch.manual_seed(0)
    tokens = torch.randint(1, 7, (19, 5))
    lengths = torch.tensor([5, 5, 5, 2, 3, 1, 5, 5, 5, 4, 4, 4, 1, 1, 2, 5, 4, 5, 5])
    tokens[torch.arange(5) >= lengths[:, None]] = 0
    return Looks(6).double(), tokens, torch.arange(19) % 6, nn.CrossEntropyLoss()


MODELS = {
    "written": written,
    "looks": looks,
    "keeps": keeps,
    "crosses": crosses,
    "idles": idles,
    "functions": functions,
    "mlp": mlp,
    "gpt": gpt,
    "gpt again": gpt_again,
    "regions": regions,
    "reentrant": lambda: regions(reentrant=True),
    "cats": cats,
    "encoder": encoder,
    "frozen": frozen,
}


PARTED = ("cats", "crosses", "keeps", "looks")
"""Each microbatch by itself changes what these keep or see."""


def train(
    name: str, model: str, options: dict[str, Any], optimizer: str = "Adam", steps: int = STEPS
) -> dict[str, Any]:
    """Losses of some steps over one batch, the whole model then, and what is here of it."""
    net, x, y, loss = MODELS[model]()
    given = {name: ref(value) for name, value in net.named_parameters()}
    strategy = sp.strategy(name, **options)
    made, optim = strategy.prepare(
        net, _optimizer(optimizer, model), deterministic=model not in PARTED, clip_norm=0.5
    )
    data = strategy.distribute(sp.data.arrays(x, y).batch(len(x)))
    losses = []
    for _ in range(steps):
        for batch in data:
            result = strategy.step(batch, loss)
            losses.append(float(result.loss) / float(result.weight))
    whole = strategy.state_dict()
    here = [name for name, value in made.named_parameters() if not value.is_meta]
    state = sum(len(values) > 0 for values in optim.state.values())
    shard = strategy.data_shard
    gc.collect()
    alive = [name for name, value in given.items() if value() is not None]
    topology = strategy.engine.parts.topology
    links = isinstance(topology, Lines) and topology.messages._links is not None
    strategy.close()
    return {
        "losses": losses,
        "links": links,
        "weights": on_host(whole["model"]),
        "state": sorted(whole["optimizer"]["state"]),
        "here": here,
        "alive": alive,
        "states": state,
        "shard": shard,
    }


def fails() -> None:
    """Have an error in the last stage, when the others have its gradients to wait for."""
    net, x, y, loss = mlp()
    strategy = sp.strategy("pipeline", timeout=60.0)
    calls = count()

    def late(output: Any, target: Any) -> Any:
        if next(calls) == 12:  # of 8 in a step
            raise ValueError("labels of another world")
        return loss(output, target)

    try:
        strategy.prepare(net, _optimizer("SGD", "mlp"))
        data = strategy.distribute(sp.data.arrays(x, y).batch(len(x)).repeat())
        for batch in data:
            strategy.step(batch, late)
    finally:
        strategy.close()


@cache
def plain(model: str, optimizer: str, shards: int, microbatches: int) -> dict[str, Any]:
    """The same in plain torch: the microbatches are accumulated, with the masks of one device."""
    net, x, y, loss = MODELS[model]()
    globalize(net)
    optim = _optimizer(optimizer, model)(net.parameters())
    losses = []
    rows = torch.arange(len(x))
    parts = [
        part for shard in rows.tensor_split(shards) for part in shard.tensor_split(microbatches)
    ]
    group = sp.strategy("one_device").engine.groups.data
    for step in range(STEPS):
        optim.zero_grad()
        total = 0.0
        for part in parts:
            if not len(part):
                continue
            enter(StepContext(group, 0, step << 32, len(x), part))
            value = loss(net(x[part]), y[part]) * len(part) / len(x)
            with replaying():
                value.backward()
            total += value.item()
        enter(None)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optim.step()
        losses.append(total)
    return {"losses": losses, "weights": dict(net.state_dict())}


def _optimizer(name: str, model: str) -> Any:
    """With small steps of a CNN: BatchNorm of few rows makes much of a last bit.

    Gradients of biases before it are 0 but for rounding: Adam is not to make 1 of that.
    """
    more = {"eps": 1e-4} if name == "Adam" else {}
    rate = 1e-2 if model != "cats" else 1e-6 if name == "Adam" else 1e-4
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=rate, fused=True, **more)


class Branches(nn.Module):
    """It looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.second(x) if x.sum() > 0 else x
        return out


class Strays(nn.Module):
    """It does what each pass of a stage would do again, or what depends on values."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.what = nn.Linear(3, 3), nn.Linear(3, 3), what
        self.calls = 0
        self.chances = chain([1.0], repeat(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "writes":
            x[:, 0] -= 0.5
        elif self.what == "averages":
            with torch.no_grad():
                self.second.weight.mul_(0.9)
        elif self.what == "counts":
            self.calls += 1
        hidden: Tensor = torch.vmap(self.first)(x) if self.what == "maps" else self.first(x)
        if self.what == "draws" and next(self.chances):
            hidden = torch.tanh(hidden)
        out: Tensor = self.second(hidden.sum(1, keepdim=True).expand(-1, 3))
        return out / (1 + self.calls)


class Sparse(nn.Linear):
    """Makes a sparse tensor of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to_sparse().to_dense())


class Centres(nn.Module):
    """Takes the mean of all rows from each."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Own(torch.optim.SGD):
    """May look at anything."""


class OwnByParameter(Own):
    """Says that it does not."""

    by_parameter = True


def refused(model: str, options: dict[str, Any]) -> str:
    """The error of a first step."""
    torch.manual_seed(0)
    nets: dict[str, nn.Module] = {
        "small": nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
        "branches": Branches(),
        "keeps": Keeps(3),
        "sparse": Sparse(3, 3),
        "often": nn.Sequential(nn.Embedding(3, 3, scale_grad_by_freq=True), nn.Linear(3, 3)),
        "together": nn.Sequential(nn.Linear(3, 3), Centres(), nn.Linear(3, 3)),
        "own": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        "own, by parameter": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        **{what: Strays(what) for what in ("writes", "counts", "draws", "maps", "averages")},
    }
    strategy = sp.strategy("pipeline", **options)
    try:
        net = nets[model]
        kind = {"own": Own, "own, by parameter": OwnByParameter}.get(model, torch.optim.SGD)
        deterministic = model == "together"
        strategy.prepare(net, lambda parameters: kind(parameters, 0.1), deterministic=deterministic)
        for batch in strategy.distribute(sp.data.arrays(torch.randn(4, 3), torch.randn(4, 3))):
            strategy.step(batch, nn.MSELoss())
    except SpartitoError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


def called() -> tuple[bool, str]:
    """Whether a model computes by itself before a step, and what it says behind it."""
    net, x, y, loss = mlp()
    strategy = sp.strategy("pipeline", microbatches=2)
    try:
        strategy.prepare(net, lambda parameters: torch.optim.SGD(parameters, 0.1))
        is_whole = net(x).shape == (19, 3)
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(19)):
            strategy.step(batch, loss)
        net(x)
    except SpartitoError as error:
        return is_whole, str(error)
    finally:
        strategy.close()
    return is_whole, ""


def owned() -> list[str]:
    """The errors of the parts of a step."""
    strategy = sp.strategy("pipeline")
    net = nn.Linear(2, 2)
    _, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    batch = next(iter(strategy.distribute(sp.data.arrays(torch.ones(2, 2)).batch(2))))
    found = []
    for part, given in ((strategy.backward, (None, batch)), (strategy.update, (optimizer,))):
        try:
            part(*given)
        except UserError as error:
            found.append(str(error))
    strategy.close()
    return found


def moved() -> tuple[int, int]:
    """Bytes that a step adds to what the tasks tell of their traffic."""
    net, x, y, loss = mlp()
    strategy = sp.PipelineStrategy(split=["4"], microbatches=2)
    with strategy:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy)
        told = []
        for epoch in (1, 2):
            trainer.fit((x[:8], y[:8]), epochs=epoch, batch_size=8, verbose=False)
            told.append(cast(Any, strategy.engine).parts.topology.messages.traffic.sent)
            assert strategy.coordination.traffic.sent >= told[-1]
            assert strategy.coordination.traffic.waited > 0
        return told[0], told[1]


class Changing(nn.Module):
    """What it does is said by attributes and modules that a user may change between two steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.drop = nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.0)
        self.middle, self.b = nn.Dropout(0.5), nn.Linear(16, 3)
        self.width = 16
        self.powers: list[int] = []
        self.asked: dict[str, Any] = {"of": {"noise": []}}

    def forward(self, x: Tensor) -> Tensor:
        """What goes from one stage to the next has so many columns."""
        hidden = self.middle(self.drop(self.act(self.a(x)))[:, : self.width])
        for power in self.powers:
            hidden = hidden + hidden**power
        for rate in self.asked["of"]["noise"]:
            hidden = F.dropout(hidden, rate, self.training)
        return F.linear(hidden, self.b.weight[:, : self.width], self.b.bias)


def _drop(net: Any) -> None:
    net.drop.p = 0.5  # what the second stage draws comes after it


def _narrow(net: Any) -> None:
    net.width = 4


def _bend(net: Any) -> None:
    net.act = nn.GELU()


def _list(net: Any) -> None:
    net.powers.append(2)


def _nest(net: Any) -> None:
    net.asked["of"]["noise"].append(0.5)


CHANGES: dict[str, Callable[[Any], None]] = {
    "dropout": _drop,
    "width": _narrow,
    "layer": _bend,
    "list": _list,
    "dict": _nest,
}


def changed(name: str, options: dict[str, Any], change: str) -> tuple[list[float], int]:
    """Losses of three steps before a change and three after, and how many models were recorded."""
    _, x, y, loss = mlp()
    net = Changing().double()
    strategy = sp.strategy(name, **options)
    strategy.prepare(net, _optimizer("SGD", "mlp"), deterministic=True)
    losses = []
    for step in range(6):
        if step == 3:
            CHANGES[change](net)
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(len(x))):
            result = strategy.step(batch, loss)
            losses.append(float(result.loss) / float(result.weight))
    computation = strategy.engine.computation
    made = [*computation.passes.values()] if isinstance(computation, Pipelines) else []
    recorded = sum(len(cuts) for each in made for cuts in each.piped._cuts.values())
    strategy.close()
    return losses, recorded


def two_optimizers(part: bool) -> list[str]:
    """What a second trainer on a model says that the first has divided, at once and again."""
    net, x, y, loss = mlp()
    strategy = sp.strategy("pipeline")
    second = [*net[7].parameters()] if part else [*net.parameters()]  # type: ignore[index]
    made: list[Any] = [torch.optim.Adam(net.parameters()), torch.optim.SGD(second, 0.1)]
    trainers = [sp.Trainer(net, optimizer=o, loss=loss, strategy=strategy) for o in made]
    trainers[0].fit((x, y), batch_size=len(x), verbose=0)
    said = []
    for _ in range(2):
        try:
            trainers[1].fit((x, y), batch_size=len(x), verbose=0)
        except UserError as error:
            said.append(str(error))
    trainers[0].fit((x, y), batch_size=len(x), verbose=0)  # goes on
    strategy.close()
    return said


def averaged(crosses: bool, how: str) -> str:
    """What is said of a callback that averages one layer into another, "" where they are on one.

    It "keeps" the parameters, takes them from the model each time, or asks for its "state".
    """
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)]
    net = nn.Sequential(*layers)
    chosen = layers[1], layers[3 if crosses else 0]
    kept = [layer.weight for layer in chosen]

    class Average(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            strategy.state_dict()
            if how == "state":
                net.state_dict()
            target, source = kept if how == "keeps" else [layer.weight for layer in chosen]
            target.data.mul_(0.9).add_(source.data, alpha=0.1)

    x = torch.randn(8, 3, dtype=torch.float64)
    strategy = sp.PipelineStrategy(split=["2"])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    trainer = sp.Trainer(net, optimizer=optimizer, loss=nn.MSELoss(), strategy=strategy)
    try:
        trainer.fit((x, x), batch_size=4, callbacks=[Average()], verbose=0)
    except SpartitoError as error:
        return str(error)
    finally:
        strategy.close()
    return ""
