from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartito.errors import UserError
from spartito.models import CatsVsDogs
from spartito.training.summary import summarize


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The pictures are tiny: threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class PlainSeparable(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(i, i, 3, padding=1, groups=i, bias=False)
        self.pointwise = nn.Conv2d(i, o, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.pointwise(self.depthwise(x))
        return y


class PlainBlock(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.separable1 = PlainSeparable(i, o)
        self.norm1 = nn.BatchNorm2d(o)
        self.separable2 = PlainSeparable(o, o)
        self.norm2 = nn.BatchNorm2d(o)
        self.projection = nn.Conv2d(i, o, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.separable1(x.relu()))
        y = self.norm2(self.separable2(y.relu()))
        return torch.add(F.max_pool2d(y, 3, 2, 1), self.projection(x))


class Plain(nn.Module):
    """The reference, line by line as Keras' example has it."""

    def __init__(self) -> None:
        super().__init__()
        self.entry1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.entry1_norm = nn.BatchNorm2d(32)
        self.entry2 = nn.Conv2d(32, 64, 3, padding=1)
        self.entry2_norm = nn.BatchNorm2d(64)
        widths = [64, 128, 256, 512, 728]
        self.blocks = nn.Sequential(*(PlainBlock(i, o) for i, o in pairwise(widths)))
        self.exit = PlainSeparable(728, 1024)
        self.exit_norm = nn.BatchNorm2d(1024)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(1024, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry1_norm(self.entry1(x / 255)).relu()
        x = self.entry2_norm(self.entry2(x)).relu()
        x = self.exit_norm(self.exit(self.blocks(x))).relu()
        y: Tensor = self.head(self.dropout(x.mean((2, 3))))
        return y


def photos(count: int, size: int = 36, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(count, 3, size, size, generator=generator, dtype=dtype) * 255


def twins(dtype: torch.dtype = torch.float32) -> tuple[CatsVsDogs, Plain]:
    torch.manual_seed(1)
    ours, plain = CatsVsDogs().to(dtype), Plain().to(dtype)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def learn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits in training mode, with fixed dropout, and all gradients."""
    torch.manual_seed(2)
    output = model(x)
    weights = torch.linspace(-1, 1, max(1, output.numel()), dtype=output.dtype)
    (output.flatten() * weights[: output.numel()]).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    return output.detach(), gradients


def test_has_exactly_keras_parameters_and_statistics() -> None:
    found = summarize(CatsVsDogs())
    assert found.count.total == 2_782_649
    assert (found.trainable, found.fixed) == (2_773_913, 8_736)


def test_equals_the_plain_model_in_fp64_with_gradients_and_statistics() -> None:
    ours, plain = twins(torch.float64)
    x = photos(4, dtype=torch.float64)
    output, gradients = learn(ours, x)
    expected, expected_gradients = learn(plain, x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        scale = max(1.0, expected_gradients[name].abs().max().item())
        assert (gradient - expected_gradients[name]).abs().max().item() <= 1e-12 * scale, name
    for name, state in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], state, rtol=1e-12, atol=1e-12)
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-12, atol=1e-12)


def test_equals_the_plain_model_in_fp32() -> None:
    ours, plain = twins()
    ours.eval(), plain.eval()
    x = photos(4)
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-5)


def test_rows_do_not_depend_on_their_neighbours_in_evaluation() -> None:
    model = CatsVsDogs().double().eval()
    x = photos(5, dtype=torch.float64)
    torch.testing.assert_close(
        torch.cat([model(x[:2]), model(x[2:])]), model(x), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("size", [(36, 36), (45, 31), (180, 180)])
def test_any_size_of_photo(size: tuple[int, int]) -> None:
    assert CatsVsDogs().eval()(torch.rand(2, 3, *size)).shape == (2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_layout_does_not_matter_and_the_input_stays(
    dtype: torch.dtype, format: torch.memory_format
) -> None:
    model = CatsVsDogs().to(dtype).eval()
    x = photos(3, dtype=dtype)
    given = x.contiguous(memory_format=format)
    assert torch.equal(model(given), model(x))
    assert torch.equal(given, photos(3, dtype=dtype))


def test_bytes_are_the_same_photos() -> None:
    model = CatsVsDogs().eval()
    x = photos(2).to(torch.uint8)
    assert torch.equal(model(x), model(x.float()))


def test_learns_under_bf16_autocast() -> None:
    model = CatsVsDogs()
    with torch.autocast("cpu", torch.bfloat16):
        output, gradients = learn(model, photos(4))
    assert output.shape == (4, 1)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_gives_zero_gradients_and_spoils_no_statistics(training: bool) -> None:
    model = CatsVsDogs().train(training)
    before = {name: state.clone() for name, state in model.state_dict().items()}
    output, gradients = learn(model, photos(0))
    assert output.shape == (0, 1)
    assert all(not gradient.any() for gradient in gradients.values())
    for name, state in model.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.equal(state, before[name]), name


def test_the_engine_finds_its_modules_by_class() -> None:
    kinds = [type(module) for module in CatsVsDogs().modules()]
    assert kinds.count(nn.BatchNorm2d) == 11
    assert kinds.count(nn.Dropout) == 1


def test_copies_and_loaded_states_compute_the_same() -> None:
    model = CatsVsDogs()
    model(photos(4))
    other = CatsVsDogs()
    other.load_state_dict(model.state_dict())
    x = photos(2)
    expected = model.eval()(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(other.eval()(x), expected)


@pytest.mark.parametrize("shape", [(3, 36, 36), (2, 36, 36, 3), (2, 1, 36, 36)])
def test_other_shapes_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="colour photos"):
        CatsVsDogs()(torch.rand(shape))


def test_traces_into_one_graph() -> None:
    torch._dynamo.reset()
    model = CatsVsDogs().eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = photos(2)
    assert torch.equal(compiled(x), model(x))
