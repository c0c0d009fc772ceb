"""Types, devices, copies, and what autograd is asked of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.mesh.sharded_tensor import Sharded, like, local_of, map_tensors, rule, whole

_g: Any = Tensor


@rule(Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.int,
      Tensor.long, Tensor.bool, Tensor.type, Tensor.cpu, Tensor.cuda, Tensor.to_dense,
      Tensor.type_as, torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like,
      torch.detach, Tensor.detach, _g.data.__get__, _g.real.__get__,
      torch.resolve_conj, Tensor.resolve_conj, torch.resolve_neg, Tensor.resolve_neg)  # fmt: skip
def _converted(func: Any, x: Tensor, *args: Any, **named: Any) -> Any:
    given = [each.local if isinstance(each, Sharded) else each for each in args]
    if not isinstance(x, Sharded):
        return func(x, *given, **named)
    local = func(x.local, *given, **named)
    if not isinstance(local, Tensor):  # x.type() without a type is its name
        return local
    return x if local is x.local else like(local, x)


@rule(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
      Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point,
      torch.is_complex, torch.is_tensor, Tensor.get_device, Tensor.is_signed,
      Tensor.is_contiguous, Tensor.is_inference, Tensor.is_pinned, Tensor.is_shared)  # fmt: skip
def _of_shard(func: Any, x: Sharded, *args: Any, **named: Any) -> Any:
    return func(x.local, *args, **named)


@rule(Tensor.requires_grad_, Tensor.detach_, Tensor.retain_grad)
def _own(func: Any, x: Sharded, *args: Any) -> Any:
    found = func(x.local, *args)
    if func is Tensor.retain_grad:
        return found
    return like(x.local, x)


@rule(_g.requires_grad.__set__)
def _set_requires_grad(func: Any, x: Sharded, value: bool) -> None:
    x.local.requires_grad = value


@rule(_g.grad.__get__)
def _grad(func: Any, x: Sharded) -> Any:
    return None if x.local.grad is None else like(x.local.grad, x)


@rule(_g.grad.__set__)
def _set_grad(func: Any, x: Sharded, value: Tensor | None) -> None:
    x.local.grad = None if value is None else local_of(value, x.spec, x.axes)


@rule(Tensor.register_hook)
def _register_hook(func: Any, x: Sharded, hook: Any) -> Any:
    def called(grad: Tensor) -> Any:
        changed = hook(like(grad, x))
        return changed if changed is None else local_of(changed, x.spec, x.axes)

    return x.local.register_hook(called)


@rule(Tensor.backward)
def _backward(
    func: Any, x: Tensor, gradient: Tensor | None = None, *args: Any, **named: Any
) -> None:
    if not isinstance(x, Sharded):
        func(x, None if gradient is None else whole(gradient), *args, **named)
        return
    if gradient is None:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    x.local.backward(local_of(gradient, x.spec, x.axes), *args, **named)


@rule(torch.autograd.backward)
def _backward_of_several(
    func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **named: Any
) -> None:
    roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    single = isinstance(grad_tensors, Tensor)
    given = [grad_tensors] if single else [*(grad_tensors or [None] * len(roots))]
    for number, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not isinstance(root, Sharded):
            given[number] = None if gradient is None else whole(gradient)
            continue
        if gradient is None:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        roots[number] = root.local
        given[number] = local_of(gradient, root.spec, root.axes)
    func(roots, given, *args, **map_tensors(named, lambda each: each.local))


@rule(Tensor.stride)
def _stride(func: Any, x: Sharded, *args: Any) -> Any:
    return torch.empty(x.shape, device="meta").stride(*args)


@rule(Tensor._is_view, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr)
def _memory(func: Any, x: Tensor) -> Any:
    raise UserError(
        f"{func.__name__}() of a sharded tensor, which has no memory for the whole",
        "torch.compile asks for it: leave the compiled function out on a mesh, or replicate the "
        "parameters that it uses (names={path: ()}).",
    )


@rule(Tensor.is_conj, Tensor.is_neg, torch.is_conj, torch.is_neg)
def _kind(func: Any, x: Sharded) -> Any:
    return func(x.local)
