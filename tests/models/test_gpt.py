from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartito.errors import UserError
from spartito.models import GPT
from spartito.models.gpt import Memory


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(2))


def small(packed: bool = False, dropout: float = 0.0) -> GPT:
    torch.manual_seed(1)
    return GPT(11, context=12, layers=2, heads=2, width=8, dropout=dropout, packed=packed).double()


def by_hand(model: GPT, given: Tensor) -> Tensor:
    """The same network, token by token and head by head."""
    state = dict(model.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    x = state["embedding.weight"][given] + state["positions.weight"][: given.shape[1]]
    for index in range(len(model.blocks)):
        at = f"blocks.{index}"
        inside = norm(f"{at}.attention_norm", x)
        if f"{at}.attention.qkv.weight" in state:
            q, k, v = linear(f"{at}.attention.qkv", inside).split(x.shape[-1], -1)
        else:
            q, k, v = (linear(f"{at}.attention.{p}", inside) for p in ("query", "key", "value"))
        heads = []
        for rows in torch.arange(x.shape[-1]).chunk(2):
            scores = q[..., rows] @ k[..., rows].mT / math.sqrt(len(rows))
            later = torch.ones(scores.shape[-2:]).triu(1).bool()
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[..., rows])
        x = x + linear(f"{at}.attention.out", torch.cat(heads, -1))
        inside = linear(f"{at}.up", norm(f"{at}.mlp_norm", x))
        x = x + linear(f"{at}.down", inside * 0.5 * (1 + torch.erf(inside / math.sqrt(2))))
    return norm("norm", x) @ state["embedding.weight"].T


@pytest.mark.parametrize("packed", [False, True])
def test_logits_are_those_of_a_network_written_by_hand(packed: bool) -> None:
    model, given = small(packed), tokens(3, 12)
    torch.testing.assert_close(model(given), by_hand(model, given), rtol=0, atol=1e-13)


def test_packed_is_the_same_as_three_layers() -> None:
    apart, packed, given = small(), small(packed=True), tokens(2, 9)
    state = apart.state_dict()
    for kind in ("weight", "bias"):
        for block in range(2):
            at = f"blocks.{block}.attention"
            parts = [state.pop(f"{at}.{name}.{kind}") for name in ("query", "key", "value")]
            state[f"{at}.qkv.{kind}"] = torch.cat(parts)
    packed.load_state_dict(state)
    torch.testing.assert_close(packed(given), apart(given), rtol=0, atol=1e-14)


def test_the_head_is_the_embedding_and_learns_from_both_ends() -> None:
    model, given = small(), tokens(2, 5)
    assert model.head.weight is model.embedding.weight
    F.cross_entropy(model(given).flatten(0, 1), given.flatten()).backward()
    grad = model.embedding.weight.grad
    assert grad is not None
    assert grad[~torch.isin(torch.arange(11), given)].abs().sum() > 0  # as classes, not as inputs


def test_presets_have_the_sizes_that_they_say() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in make(65).parameters()) for make in (GPT.small, GPT.medium)]
    assert sizes == [809_856, 25_384_448]


def test_dropout_is_on_in_training_only() -> None:
    model, given = small(dropout=0.5), tokens(1, 8)
    assert not torch.equal(model(given), model(given))
    model.eval()
    assert torch.equal(model(given), model(given))


def test_tokens_one_by_one_give_the_logits_of_all_at_once() -> None:
    model, given = small(), tokens(3, 12)
    memories = [Memory() for _ in model.blocks]
    parts = [model.extend(given[:, :5], memories)]
    parts += [model.extend(given[:, at : at + 1], memories) for at in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), model(given), rtol=0, atol=1e-14)


def test_generation_takes_the_likeliest_and_goes_past_the_context() -> None:
    model, given = small(dropout=0.3), tokens(2, 3)
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    written = model.generate(given, 40, temperature=0)
    assert [module.training for module in model.modules()] == before
    assert not written.requires_grad
    assert written.shape == (2, 43)
    assert model.training
    model.eval()
    for end in range(3, 13):  # what fits the context
        assert torch.equal(model(written[:, :end])[:, -1].argmax(-1), written[:, end])


def test_generation_is_drawn_from_its_seed_and_its_temperature() -> None:
    model, given = small(), tokens(1, 3)
    nn.init.normal_(model.embedding.weight)
    one, again, other = (model.generate(given, 30, 1.0, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    cold = model.generate(given, 30, 1e-4, seed=1)
    assert torch.equal(cold, model.generate(given, 30, 0))


@pytest.mark.parametrize(
    ("given", "words"),
    [((2, 13), "13 tokens for a GPT with a context of 12"), ((4,), "takes sequences")],
)
def test_what_it_cannot_read_is_refused(given: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        small()(tokens(*given))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="heads do not divide the width"):
        GPT(11, heads=3, width=8)
