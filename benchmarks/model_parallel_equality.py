"""Losses of a model on a mesh against plain torch on one device, in fp64.

``--rounds`` is the number of steps. Each row trains the same model with the same batches: with
plain torch in one process, and under `MeshStrategy` in as many processes as the mesh has tasks;
with an axis "pipeline" under `PipelineStrategy`, whose reference accumulates the same microbatches.
With dropout the reference is one device with ``deterministic=True``, whose masks are drawn for the
global batch. The transformers and the ResNet of the package ``transformers`` join where that is
installed; nothing of it is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from benchmarks.common import Figure, announce, conclude, parser
from spartito.engine.randomness.global_randomness import globalize
from spartito.engine.step_context import StepContext, enter
from spartito.models import GPT, CatsVsDogs, MnistMLP
from tests.replicas import Replicas

MESHES = {
    "2": {"model": 2},
    "4": {"model": 4},
    "2x2": {"data": 2, "model": 2},
    "2x2x2": {"pipeline": 2, "data": 2, "model": 2},
}
MICROBATCHES = 2
OPTIMIZERS = {"SGD": 0.05, "Adam": 1e-3}
TARGET = 1e-12
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, its batches, and how its loss is made.

    Attributes:
        build: Makes the model, in fp64.
        data: Makes the examples.
        loss: A function of output and target; None: the model has its own.
        draws: Whether it has dropout.
        rows: Of a batch. BatchNorm over few numbers magnifies rounding.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[..., Tensor] | None
    draws: bool = False
    rows: int = 4


def numbers(*shape: int) -> Tensor:
    """Normal numbers, the same in each process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens(count: int, length: int, vocabulary: int) -> Tensor:
    """Tokens, the same in each process."""
    source = torch.Generator().manual_seed(2)
    return torch.randint(vocabulary, (count, length), generator=source)


def language_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def _gpt(dropout: float = 0.0, packed: bool = False) -> nn.Module:
    return GPT(32, context=16, layers=2, heads=4, width=32, dropout=dropout, packed=packed)


def _sentences() -> Data:
    given = tokens(40, 17, 32)
    return given[:, :-1], given[:, 1:]


def _hugging(kind: str) -> nn.Module:
    hf: Any = import_module("transformers")

    if kind == "gpt2":
        config = hf.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return Named(hf.GPT2LMHeadModel(config))
    if kind == "llama":
        config = hf.LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        return Named(hf.LlamaForCausalLM(config))
    config = hf.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2],
        layer_type="bottleneck", num_labels=4,
    )  # fmt: skip
    return Named(hf.ResNetForImageClassification(config))


class Named(nn.Module):
    """What the package's model calls ``logits``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The logits of ``x``."""
        logits: Tensor = self.inner(x).logits
        return logits


SUBJECTS: dict[str, Subject] = {
    "mlp": Subject(
        MnistMLP,
        lambda: (numbers(40, 784), torch.arange(40) % 10),
        nn.functional.cross_entropy,
    ),
    "cats-vs-dogs, dropout": Subject(
        CatsVsDogs,
        lambda: (numbers(40, 3, 96, 96) * 40 + 127, (torch.arange(40) % 2)[:, None].double()),
        nn.functional.binary_cross_entropy_with_logits,
        draws=True,
        rows=8,
    ),
    "gpt": Subject(_gpt, _sentences, language_loss),
    "gpt packed": Subject(lambda: _gpt(packed=True), _sentences, language_loss),
    "gpt, dropout": Subject(lambda: _gpt(0.1), _sentences, language_loss, draws=True),
    "transformers GPT-2": Subject(lambda: _hugging("gpt2"), _sentences, language_loss),
    "transformers Llama": Subject(lambda: _hugging("llama"), _sentences, language_loss),
    "transformers ResNet": Subject(
        lambda: _hugging("resnet"),
        lambda: (numbers(40, 3, 32, 32), torch.arange(40) % 4),
        nn.functional.cross_entropy,
        rows=8,  # a microbatch has 2 for BatchNorm
    ),
}


def _made(name: str) -> tuple[Subject, nn.Module, Any]:
    subject = SUBJECTS[name]
    torch.manual_seed(3)
    return subject, subject.build().double(), subject.data()


def plain(name: str, optimizer: str, steps: int) -> list[float]:
    """The losses of a loop that knows torch alone."""
    subject, net, (x, y) = _made(name)
    update = getattr(torch.optim, optimizer)(net.parameters(), OPTIMIZERS[optimizer])
    assert subject.loss is not None
    losses = []
    for step in range(steps):
        first = step * subject.rows % len(x)
        rows = slice(first, first + subject.rows)
        update.zero_grad()
        loss = subject.loss(net(x[rows]), y[rows])
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def accumulated(name: str, optimizer: str, steps: int, shards: int) -> list[float]:
    """The same with batches in microbatches, whose gradients are summed before an update.

    Dropout has the masks of one device, drawn for the whole batch.
    """
    subject, net, (x, y) = _made(name)
    if subject.draws:
        globalize(net)
    update = getattr(torch.optim, optimizer)(net.parameters(), OPTIMIZERS[optimizer])
    assert subject.loss is not None
    alone, losses = sp.strategy("one_device").engine.groups.data, []
    for step in range(steps):
        first, total = step * subject.rows % len(x), 0.0
        update.zero_grad()
        parts = torch.arange(subject.rows).tensor_split(shards)
        for part in [each for own in parts for each in own.tensor_split(MICROBATCHES)]:
            if subject.draws:
                epoch, number = divmod(step, len(x) // subject.rows)
                enter(StepContext(alone, 0, epoch << 32 | number, subject.rows, part))
            loss = subject.loss(net(x[first + part]), y[first + part]) * len(part) / subject.rows
            loss.backward()
            total += loss.item()
        enter(None)
        update.step()
        losses.append(total)
    return losses


def by_strategy(
    name: str, optimizer: str, steps: int, strategy: str, mesh: dict[str, int] | None
) -> tuple[list[float], float]:
    """The losses, and the memory behind what is cut, with its state, by that of one device."""
    torch.set_flush_denormal(True)
    subject, net, data = _made(name)
    before = {path: parameter.shape for path, parameter in net.named_parameters()}
    options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    if strategy == "pipeline":
        options["microbatches"] = MICROBATCHES
    with sp.strategy(strategy, **options) as made:
        model, update = made.prepare(
            net,
            getattr(torch.optim, optimizer)(net.parameters(), OPTIMIZERS[optimizer]),
            deterministic=True,
        )
        batches = iter(made.distribute(sp.data.arrays(*data).repeat().batch(subject.rows)))
        losses = []
        for _ in range(steps):
            result = made.step(next(batches), subject.loss)
            losses.append(float(result.loss) / float(result.weight))
        here = whole = 0
        for path, parameter in model.named_parameters():
            if parameter.shape != before[path]:
                state = [value for value in update.state[parameter].values() if value.dim()]
                here += sum(each.untyped_storage().nbytes() for each in [parameter, *state])
                whole += before[path].numel() * parameter.itemsize * (1 + len(state))
    return losses, here / max(whole, 1)


def main() -> None:
    """Print the table."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=10)
    options.add_argument("--only", default="", help="parts of the models' names, with commas")
    given = options.parse_args()
    here = announce(__doc__)
    wanted = [part for part in given.only.split(",") if part] or [""]
    names = [name for name in SUBJECTS if any(part in name for part in wanted)]
    if find_spec("transformers") is None:
        print("the package transformers is not installed: its models are left out")
        names = [name for name in names if "transformers" not in name]
    replicas, figures = Replicas(), []
    print(f"largest difference of the losses of {given.rounds} steps, fp64")
    print(f"{'model':24}{'optimizer':11}" + "".join(f"{'{' + m + '}':>11}" for m in MESHES))
    try:
        for name in names:
            for optimizer in OPTIMIZERS:
                gaps, ratio = compare(replicas, name, optimizer, given.rounds)
                print(f"{name:24}{optimizer:11}" + "".join(f"{gap:11.1e}" for gap in gaps.values()))
                title = f"{name}, {optimizer}"
                figures += [
                    Figure(f"{title}, mesh {mesh}", gap, TARGET, "<=", "difference of the loss")
                    for mesh, gap in gaps.items()
                ]
            figures.append(
                Figure(f"{name}: memory of what is cut, a task of 4 / a quarter", ratio, 1.05, "<=")
            )
    finally:
        replicas.close()
    conclude(here, figures, given.json)


def compare(
    replicas: Replicas, name: str, optimizer: str, steps: int
) -> tuple[dict[str, float], float]:
    """The largest difference on each mesh; what a task of four holds, by a quarter of the whole."""
    if SUBJECTS[name].draws:
        one = (by_strategy, 1, name, optimizer, steps, "one_device", None)
        expected = replicas(*one)[0][0]
    else:
        expected = replicas(plain, 1, name, optimizer, steps)[0]
    gaps, ratio = {}, 0.0
    for title, mesh in MESHES.items():
        tasks, right = math.prod(mesh.values()), expected
        strategy = "pipeline" if "pipeline" in mesh else "mesh"
        if strategy == "pipeline":
            right = replicas(accumulated, 1, name, optimizer, steps, mesh["data"])[0]
        found = replicas(by_strategy, tasks, name, optimizer, steps, strategy, mesh, timeout=300)
        pairs = [pair for each, _ in found for pair in zip(each, right, strict=True)]
        gaps[title] = max(abs(one - other) for one, other in pairs)
        if title == "4":
            ratio = 4 * max(part for _, part in found)
    return gaps, ratio


if __name__ == "__main__":
    main()
