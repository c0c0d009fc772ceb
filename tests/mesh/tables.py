"""What is computed on whole and on cut tensors: a table of cases for each family of operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.mesh.cases import fixed, packed

Cases = dict[str, tuple[Callable[..., Any], list[Any]]]


class Squared(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * x * weight * grad, (grad * x * x).flatten(0, -2).sum(0)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def products() -> Cases:
    return {
        "linear": (F.linear, [r(2, 4), r(6, 4), r(6)]),
        "linear without bias": (F.linear, [r(2, 3, 4), r(6, 4)]),
        "linear of a vector": (F.linear, [r(4), r(6, 4), r(6)]),
        "matmul": (torch.matmul, [r(2, 4, 6), r(2, 6, 8)]),
        "matmul, broadcast": (torch.matmul, [r(2, 1, 4, 6), r(4, 6, 2)]),
        "matrix times vector": (torch.matmul, [r(4, 6), r(6)]),
        "vector times matrices": (torch.matmul, [r(6), r(2, 6, 4)]),
        "@": (lambda a, b: a @ b, [r(4, 6), r(6, 2)]),
    }


def elementwise() -> Cases:
    return {
        "relu": (F.relu, [r(2, 4)]),
        "relu in place": (lambda x: F.relu(x * 2, inplace=True), [r(2, 4)]),
        "gelu": (F.gelu, [r(2, 4)]),
        "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), [r(2, 4)]),
        "add": (torch.add, [r(2, 4), r(2, 4)]),
        "add, alpha": (lambda a, b: torch.add(a, b, alpha=3), [r(2, 4), r(4)]),
        "broadcast": (lambda a, b: a * b, [r(2, 1, 4), r(6, 4)]),
        "scalar": (lambda a: 1 - a / 3 + 2**a, [r(2, 4)]),
        "tensor of no dims": (lambda a, b: a * b, [r(4, 2), r()]),
        "twice the same": (lambda a: a * a + a, [r(2, 4)]),
        "+=": (lambda a, b: (a * 1).__iadd__(b), [r(2, 4), r(2, 4)]),
        "where": (lambda a, b: torch.where(a > 0, a, b), [r(2, 4), r(4)]),
        "promotion": (lambda a, b: a.float() + b, [r(2, 4), r(2, 4)]),
    }


def views() -> Cases:
    return {
        "heads": (lambda x: x.view(2, 4, 4, -1).transpose(1, 2), [r(2, 4, 8)]),
        "heads joined": (lambda x: x.transpose(1, 2).reshape(2, 3, -1), [r(2, 4, 3, 2)]),
        "flatten": (lambda x: x.flatten(1), [r(2, 4, 2, 2)]),
        "flatten all": (lambda x: torch.flatten(x), [r(2, 4, 2)]),
        "rows": (lambda x: x.reshape(-1, x.size(-1)), [r(2, 4, 6)]),
        "permute": (lambda x: x.permute(2, 0, 1), [r(2, 4, 6)]),
        "t": (lambda x: x.t() @ x, [r(2, 4)]),
        "T": (lambda x: x.T, [r(2, 4)]),
        "mT": (lambda x: x.mT, [r(2, 4, 6)]),
        "unsqueeze": (lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)), [r(2, 4)]),
        "squeeze": (lambda x: (x.squeeze(1), x.squeeze(), x.squeeze(0)), [r(2, 1, 4)]),
        "expand": (lambda x: x.expand(3, 2, 4, 6), [r(2, 1, 6)]),
        "movedim": (lambda x: x.movedim(-1, 0), [r(2, 4, 6)]),
        "other sizes": (lambda x: x.view(3, 2, 4).view(2, 12), [r(2, 3, 4)]),
        "of ones": (lambda x: x.view(1, 2, 1, 4, 1), [r(2, 4)]),
        "contiguous": (lambda x: x.transpose(0, 1).contiguous().view(-1), [r(2, 4)]),
        "shape": (lambda x: x * (x.shape[0] + 10 * x.size(1) + x.numel() + x.dim()), [r(2, 4)]),
    }


def lookups() -> Cases:
    at = torch.tensor([[0, 3, 1], [2, 2, 5]])
    return {
        "embedding": (lambda w: F.embedding(at, w), [r(6, 4)]),
        "embedding, padding": (lambda w: F.embedding(at, w, padding_idx=2), [r(6, 4)]),
        "embedding, last padding": (lambda w: F.embedding(at, w, padding_idx=-1), [r(6, 4)]),
        "embedding, scaled": (
            lambda w: F.embedding(at, w, scale_grad_by_freq=True), [r(6, 4)],
        ),
        "tied": (
            lambda w, x: F.linear(F.embedding(at, w) * x, w), [r(6, 4), r(4)],
        ),
    }  # fmt: skip


def norms() -> Cases:
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def tracked(x: Tensor, w: Tensor, b: Tensor) -> Any:
        own = mean.clone(), var.clone()
        return F.batch_norm(x, *own, w, b, training=True), *own

    def built_in(x: Tensor, w: Tensor, b: Tensor) -> Any:
        own = mean.clone(), var.clone()
        return torch.batch_norm(x, w, b, *own, True, 0.1, 1e-5, False), *own

    return {
        "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [r(2, 6, 4), r(4), r(4)]),
        "layer norm, two dims": (lambda x, w: F.layer_norm(x, (6, 4), w), [r(2, 6, 4), r(6, 4)]),
        "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), [r(2, 6, 4), r(4)]),
        "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [r(2, 4, 3), r(4), r(4)]),
        "group norm, 1": (lambda x, w, b: F.group_norm(x, 1, w, b), [r(2, 4, 3), r(4), r(4)]),
        "group norm, 4": (lambda x: F.group_norm(x, 4), [r(2, 4, 2, 2)]),
        "batch norm": (tracked, [r(4, 4, 3), r(4), r(4)]),
        "batch norm, torch's own": (built_in, [r(4, 4, 3), r(4), r(4)]),
        "instance norm, torch's own": (
            lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
            [r(2, 4, 6), r(4), r(4)],
        ),
        "batch norm of rows": (tracked, [r(6, 4), r(4), r(4)]),
        "batch norm, statistics": (
            lambda x, m, v: (F.batch_norm(x, m, v, training=True), m, v),
            [r(2, 4, 3), fixed(torch.zeros(4).double()), fixed(torch.ones(4).double())],
        ),
        "batch norm, evaluated": (
            lambda x, w, b: F.batch_norm(x, mean, var, w, b), [r(2, 4, 2, 2), r(4), r(4)],
        ),
        "instance norm": (
            lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [r(2, 4, 6), r(4), r(4)],
        ),
    }  # fmt: skip


def attention() -> Cases:
    sdpa = F.scaled_dot_product_attention
    some = r(4, 3, 3) > 0
    some[..., 0] = True
    heads = [r(2, 4, 3, 2) for _ in range(3)]
    groups = [r(2, 4, 3, 2), r(2, 2, 3, 2), r(2, 2, 3, 2)]
    few = [r(2, 4, 3, 2), r(2, 1, 3, 2), r(2, 1, 3, 2)]
    return {
        "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), heads),
        "mask": (lambda q, k, v: sdpa(q, k, v, attn_mask=some), heads),
        "bias": (lambda q, b: sdpa(q, q, q, attn_mask=b), [heads[0], r(1, 4, 3, 3)]),
        "dropout": (lambda q, k, v: sdpa(q, k, v, is_causal=True, dropout_p=0.4), heads),
        "dropout, mask": (lambda q, k: sdpa(q, k, k, attn_mask=some, dropout_p=0.4), heads[:2]),
        "groups": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), groups),
        "groups, dropout": (lambda q, k: sdpa(q, k, k, enable_gqa=True, dropout_p=0.3), groups[:2]),
        "one group": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), few),
        "broadcast keys": (lambda q, k: sdpa(q, k, k), few[:2]),
        "by hand": (
            lambda q, k, v: torch.softmax((q @ k.mT / 2).masked_fill(~some, -torch.inf), -1) @ v,
            heads,
        ),
        "repeated": (
            lambda k: k[:, :, None].expand(2, 2, 2, 3, 2).reshape(2, 4, 3, 2), groups[1:2],
        ),
        "repeat_interleave": (lambda k: k.repeat_interleave(2, 1), groups[1:2]),
    }  # fmt: skip


def convolutions() -> Cases:
    return {
        "1d": (F.conv1d, [r(2, 4, 5), r(6, 4, 3), r(6)]),
        "2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [r(2, 4, 4, 4), r(2, 4, 3, 3), r(2)]),
        "2d, same": (lambda x, w: F.conv2d(x, w, padding="same"), [r(2, 2, 4, 4), r(2, 2, 3, 3)]),
        "points": (lambda x, w, b: F.conv2d(x, w, b, 2), [r(2, 4, 3, 4), r(2, 4, 1, 1), r(2)]),
        "points, some": (
            lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(0, 0)),
            [r(2, 4, 4, 4), r(2, 4, 1, 1)],
        ),
        "points, last": (
            lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w, None, 3),
            [r(2, 4, 4, 4), r(2, 4, 1, 1)],
        ),
        "one image": (F.conv2d, [r(4, 4, 4), r(2, 4, 3, 3), r(2)]),
        "depthwise": (
            lambda x, w, b: F.conv2d(x, w, b, groups=4), [r(2, 4, 4, 4), r(4, 1, 2, 2), r(4)],
        ),
        "depthwise, twice": (
            lambda x, w, b: F.conv1d(x, w, b, groups=4), [r(2, 4, 4), r(8, 1, 2), r(8)],
        ),
        "grouped": (
            lambda x, w, b: F.conv1d(x, w, b, groups=2), [r(2, 4, 4), r(6, 2, 2), r(6)],
        ),
        "three groups": (
            lambda x, w, b: F.conv1d(x, w, b, groups=3), [r(2, 6, 4), r(6, 2, 2), r(6)],
        ),
        "transposed": (
            lambda x, w, b: F.conv_transpose2d(x, w, b, 2), [r(2, 4, 3, 3), r(4, 6, 2, 2), r(6)],
        ),
        "transposed, grouped": (
            lambda x, w, b: F.conv_transpose1d(x, w, b, groups=2),
            [r(2, 4, 3), r(4, 2, 2), r(4)],
        ),
        "max pool": (lambda x: F.max_pool2d(x, 2), [r(2, 4, 4, 4)]),
        "max pool, indices": (
            lambda x: F.max_pool2d(x, 2, return_indices=True), [r(2, 4, 4, 4)],
        ),
        "avg pool": (lambda x: F.avg_pool2d(x, 2), [r(2, 4, 4, 4)]),
        "adaptive": (
            lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 2)), [r(2, 4, 4, 4)],
        ),
        "pool 1d": (lambda x: (F.avg_pool1d(x, 2), F.max_pool1d(x, 2)), [r(2, 4, 4)]),
        "interpolate": (
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [r(2, 4, 2, 2)],
        ),
        "pad": (lambda x: F.pad(x, (1, 2, 0, 0)), [r(2, 4, 4)]),
        "pad, reflect": (lambda x: F.pad(x, (1, 1), "reflect"), [r(2, 4, 4)]),
        "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), [r(2, 4, 2, 2)]),
        "unfold": (lambda x: F.unfold(x, 2), [r(2, 4, 3, 3)]),
        "mean of images": (lambda x: x.mean((2, 3)), [r(2, 4, 2, 2)]),
        "cat of channels": (
            lambda x, y, w: F.conv1d(torch.cat([x, y, x], 1), w),
            [r(2, 4, 3), r(2, 2, 3), r(2, 10, 2)],
        ),
    }  # fmt: skip


def reductions() -> Cases:
    x = r(2, 4, 6)
    return {
        "sum": (lambda x: (x.sum(), x.sum(1), x.sum((0, -1), keepdim=True)), [x]),
        "mean": (lambda x: (x.mean(), x.mean(-1), x.mean((1, 2)), torch.mean(x, 0, True)), [x]),
        "softmax": (lambda x: (x.softmax(-1), F.softmax(x, 1), torch.softmax(x, 0)), [x]),
        "log_softmax": (lambda x: (F.log_softmax(x, -1), x.log_softmax(1)), [x]),
        "max": (lambda x: (x.max(1), x.max(), x.amax((0, 2))), [x]),
        "min": (lambda x: (torch.min(x, 1, True), x.amin(), torch.maximum(x, -x)), [x]),
        "argmax": (lambda x: (x.argmax(-1), x.argmax(1, keepdim=True)), [x]),
        "var": (lambda x: (x.var(), x.var(1), x.std((1, 2), keepdim=True)), [x]),
        "logsumexp": (lambda x: x.logsumexp(1), [x]),
        "topk": (lambda x: x.topk(2, 1), [x]),
        "sort": (lambda x: x.sort(-1), [x]),
        "flip": (lambda x: (x.flip(1), torch.flip(x, (0, 2)), torch.roll(x, 1, 1)), [x]),
        "tril": (lambda x: x.tril(), [x]),
        "cumsum": (lambda x: x.cumsum(1), [x]),
        "normalize": (lambda x: (F.normalize(x), F.normalize(x, dim=-1)), [x]),
        "any": (lambda x: ((x > 0).any(), (x > 0).all(1), (x > 0).sum(1)), [x]),
        "whole": (lambda x: torch.linalg.vector_norm(x, dim=1), [x]),
        "whole, in place": (lambda x: (x * 1).cumsum_(1), [x]),
    }


def joins() -> Cases:
    x, y = r(2, 4, 6), r(2, 4, 6)
    at = torch.tensor([1, 0, 1])

    def put(x: Tensor, y: Tensor) -> Tensor:
        z = x * 1
        z[:, 1:3] = y[:, :2]
        z[0] = 1.0
        z[..., -1] = y[..., 0]
        return z

    return {
        "cat": (lambda x, y: (torch.cat([x, y], 1), torch.cat((x, y, x), dim=-1)), [x, y]),
        "cat, apart": (lambda x, y: torch.cat([x, y], 1).split([4, 2, 2], 1), [x, y]),
        "cat, chunks": (lambda x, y: torch.cat([x, y], 2).chunk(2, -1), [x, y]),
        "cat, linear": (lambda x, w: F.linear(torch.cat([x, x], 2), w), [x, r(2, 12)]),
        "cat, norm": (lambda x, y: F.layer_norm(torch.cat([x, y], -1), (12,)), [x, y]),
        "stack": (lambda x, y: (torch.stack([x, y]), torch.stack((x, y), -1)), [x, y]),
        "chunk": (lambda x: (x.chunk(2, 1), torch.chunk(x, 3, -1)), [x]),
        "split": (lambda x: (x.split(3, 2), torch.split(x, [1, 3], 1)), [x]),
        "unbind": (lambda x: (x.unbind(1), list(x)), [x]),
        "select": (lambda x: (x[0], x[:, 1], x[..., -1], x.select(1, 2)), [x]),
        "slice": (lambda x: (x[:, 1:3], x[:1], x[..., ::2], x[:, :4], x[:, None, 0]), [x]),
        "slice, dots": (lambda x: (x[:, ..., 1], x[..., 1, :2]), [x]),
        "narrow": (lambda x: (x.narrow(1, 1, 2), x.narrow(-1, 0, 6)), [x]),
        "by tensor": (lambda x: (x[at], x[:, at], x[[1, 0]], x.index_select(1, at)), [x]),
        "by mask": (lambda x: (x[:, torch.tensor([True, False, True, True])], x[x > 0]), [x]),
        "by two": (lambda x: x[at, at], [x]),
        "gather": (lambda x: x.gather(1, torch.zeros(2, 4, 6).long()), [x]),
        "gather, fewer": (lambda x: x.gather(1, torch.ones(2, 1, 6).long()), [x]),
        "repeat": (lambda x: (x.repeat(1, 2, 1), x.repeat(3, 1, 1, 1)), [x]),
        "put": (put, [x, y]),
    }


def losses() -> Cases:
    at = torch.tensor([1, 0, 3, 2])
    some = torch.tensor([1, -100, 3, 2])
    weights = torch.tensor([0.5, 1.0, 2.0, 0.25]).double()
    pixels = torch.tensor([[1, 0, 3], [2, 2, -100]])
    chance = torch.softmax(r(4, 4), 1)
    found: Cases = {}
    for reduction in ("mean", "sum", "none"):
        more = {"reduction": reduction}
        found |= {
            f"cross entropy {reduction}": (
                lambda x, m=more: F.cross_entropy(x, at, **m), [r(4, 4)],
            ),
            f"ignored {reduction}": (
                lambda x, m=more: F.cross_entropy(x, some, weights, **m), [r(4, 4)],
            ),
            f"smooth {reduction}": (
                lambda x, m=more: F.cross_entropy(x, some, label_smoothing=0.2, **m), [r(4, 4)],
            ),
            f"smooth, weights {reduction}": (
                lambda x, m=more: F.cross_entropy(x, some, weights, label_smoothing=0.2, **m),
                [r(4, 4)],
            ),
            f"pixels {reduction}": (
                lambda x, m=more: F.cross_entropy(x, pixels, weights, **m), [r(2, 4, 3)],
            ),
            f"chances {reduction}": (
                lambda x, m=more: F.cross_entropy(x, chance, weights, label_smoothing=0.1, **m),
                [r(4, 4)],
            ),
            f"nll {reduction}": (
                lambda x, m=more: F.nll_loss(F.log_softmax(x, 1), some, weights, **m), [r(4, 4)],
            ),
            f"mse {reduction}": (lambda x, y, m=more: F.mse_loss(x, y, **m), [r(2, 4), r(2, 4)]),
            f"l1 {reduction}": (lambda x, y, m=more: F.l1_loss(x, y, **m), [r(2, 4), r(2, 4)]),
            f"huber {reduction}": (
                lambda x, y, m=more: F.huber_loss(x, y, delta=0.5, **m), [r(2, 4), r(2, 4)],
            ),
            f"bce {reduction}": (
                lambda x, m=more: F.binary_cross_entropy(x.sigmoid(), chance, **m), [r(4, 4)],
            ),
            f"bce, logits {reduction}": (
                lambda x, m=more: F.binary_cross_entropy_with_logits(
                    x, chance, weights, pos_weight=weights, **m
                ),
                [r(4, 4)],
            ),
            f"kl {reduction}": (
                lambda x, m=more: F.kl_div(F.log_softmax(x, 1), chance, **m), [r(4, 4)],
            ),
        }  # fmt: skip
    found["one row"] = (lambda x: F.cross_entropy(x, torch.tensor(2)), [r(4)])
    found["huber, weights"] = (
        lambda x, y, w: F.huber_loss(x, y, weight=w),  # type: ignore[call-arg]
        [r(2, 4), r(2, 4), r(2, 4)],
    )  # fmt: skip
    found["kl, batchmean"] = (lambda x: F.kl_div(x, chance, reduction="batchmean"), [r(4, 4)])
    return found


def randoms() -> Cases:
    return {
        "dropout": (lambda x: F.dropout(x, 0.3), [r(2, 4, 6)]),
        "dropout, in place": (lambda x: F.dropout(x * 1, 0.3, inplace=True), [r(2, 4, 6)]),
        "no dropout": (lambda x: F.dropout(x, 0.3, training=False), [r(2, 4, 6)]),
        "dropout of all": (lambda x: F.dropout(x, 1.0), [r(2, 4, 6)]),
        "channels": (lambda x: F.dropout2d(x, 0.5), [r(2, 4, 2, 2)]),
        "channels, 1d": (lambda x: F.dropout1d(x, 0.5), [r(2, 4, 2)]),
        "like": (lambda x: x + torch.rand_like(x) + torch.randn_like(x), [r(2, 4)]),
        "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), [r(2, 4)]),
        "other dropout": (lambda x: F.alpha_dropout(x, 0.5, training=True), [r(2, 4)]),
        "twice": (lambda x: F.dropout(x, 0.3) + F.dropout(x, 0.3), [r(2, 4)]),
    }


def others() -> Cases:
    return {
        "float": (lambda x: x.float().double() + x.to(torch.float64), [r(2, 4)]),
        "detach": (lambda x: x * x.detach(), [r(2, 4)]),
        "type_as": (lambda x: x.type_as(torch.ones(3).double()) * x, [r(2, 4)]),
        "compared with nothing": (lambda x: x * ((x == None) + 2), [r(2, 4)]),  # noqa: E711
        "printed": (lambda x: x * (len({x, x}) + bool(f"{x}")), [r(2, 4)]),
        "zeros_like": (lambda x: x + torch.ones_like(x) + x.new_ones(x.shape), [r(2, 4)]),
        "einsum": (
            lambda x, w: torch.einsum("bti,io->bto", x, w), [r(2, 3, 4), r(4, 6)],
        ),
        "einsum, dots": (lambda x, w: torch.einsum("...i,oi", x, w), [r(2, 3, 4), r(6, 4)]),
        "einsum, sum": (lambda x, w: torch.einsum("bi,bj->", x, w), [r(2, 4), r(2, 6)]),
        "einsum, trace": (lambda x: torch.einsum("ii", x), [r(4, 4)]),
        "addmm": (torch.addmm, [r(6), r(2, 4), r(4, 6)]),
        "addmm, scaled": (
            lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2), [r(2, 6), r(2, 4), r(4, 6)],
        ),
        "baddbmm": (torch.baddbmm, [r(2, 2, 6), r(2, 2, 4), r(2, 4, 6)]),
        "a gradient stopped": (lambda x, w: F.linear(x, w.detach()), [r(2, 4), r(6, 4)]),
        "a norm of a sum": (
            lambda x, w: F.layer_norm(F.linear(x, w).relu(), (6,)) * w.sum(), [r(2, 4), r(6, 4)],
        ),
        "where, of one": (lambda x: x + x[torch.where(x > 0)].sum(), [r(2, 4)]),
        "where, named": (
            lambda x, y: torch.where(condition=x > y, input=x, other=y), [r(2, 4), r(4)],
        ),
        "mlp": (
            lambda x, a, b, c, d: F.linear(F.gelu(F.linear(x, a, b)), c, d) + x,
            [r(2, 4), r(8, 4), r(8), r(4, 8), r(4)],
        ),
    }  # fmt: skip


def multihead() -> Cases:
    """Query, key and value packed into one weight, whose blocks are each cut."""
    mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
    padding = torch.tensor([[False, False, True], [False, True, True]])

    found: Cases = {}
    weights = [packed(r(12, 4)), packed(r(12)), r(4, 4), r(4)]
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "no weights": {"need_weights": False},
        "causal": {"need_weights": False, "attn_mask": mask, "is_causal": True},
        "mask": {"attn_mask": mask},
        "padding": {"key_padding_mask": padding, "attn_mask": mask, "need_weights": False},
        "of each head": {"average_attn_weights": False, "training": False},
    }
    for name, more in kinds.items():
        found[f"self, {name}"] = partial(_attend, more, True), [r(3, 2, 4), *weights]
        found[f"across, {name}"] = partial(_attend, more, False), [r(3, 2, 4), *weights]
    found["module"] = _module, [r(2, 3, 4), *weights]
    return found


def _attend(
    more: dict[str, Any], to_itself: bool, x: Tensor, w: Tensor, b: Tensor, c: Tensor, d: Tensor
) -> Any:
    y = x if to_itself else x.flip(0)
    return F.multi_head_attention_forward(x, y, y, 4, 2, w, b, None, None, False, 0.3, c, d, **more)


def _module(x: Tensor, w: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.3).double()
    made: Any = module
    del module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias
    made.in_proj_weight, made.in_proj_bias = w, b
    made.out_proj.weight, made.out_proj.bias = c, d
    return module(x, x, x)
