"""A tensor of which each task has a shard, for code that knows nothing of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.mesh import collectives
from spartito.mesh.collectives import Axis
from spartito.mesh.part_copies import as_copies, spoilt
from spartito.mesh.spec import Spec, replicated, spec

Axes = Mapping[str, Axis]
Rule = Callable[..., Any]

TABLE: dict[Any, Rule] = {}
"""What a torch function does with `Sharded` operands: ``rule(function, args, kwargs)``."""

VIEWS = {
    getattr(home, name)
    for name in """__getitem__ view view_as reshape flatten unflatten squeeze ravel select
    narrow split chunk tensor_split split_with_sizes unbind __iter__ diagonal unfold hsplit vsplit
    dsplit as_strided expand expand_as permute transpose t movedim moveaxis swapaxes
    swapdims""".split()  # noqa: SIM905
    for home in (torch, Tensor)
    if hasattr(home, name)
} | {torch.functional.split}
"""The functions of which plain torch returns views."""

_where: list[str] = []


class _NotSeen(torch.autograd.Function):
    """The origin of what stands for a shard where torch does not ask us."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise _not_seen()


def _not_seen() -> UserError:
    return UserError(
        "a sharded tensor went into a torch.autograd.Function (as each full backward hook of a "
        "module is one), or through C++ code that Spartito does not see",
        "Replicate the parameters of that module (names={path: ()}), or give a layout without "
        "'rows' where it comes behind a sum; hooks: output.register_hook; reentrant "
        "checkpointing: torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
    )


_PLAIN = torch.empty(0, device="meta")  # C++ code that reads it raises, rather than finds nothing
with torch.enable_grad():
    _LEARNS: Tensor = _NotSeen.apply(  # type: ignore[no-untyped-call]
        torch.empty(0, device="meta", requires_grad=True)
    )


_learns_itself: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def check_seen(x: Sharded) -> None:
    """Refuse what an autograd Function returned: torch gave it a history, its shard has none."""
    if not x.local.requires_grad and torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            if _learns_itself(x):
                raise _not_seen()


class Sharded(Tensor):
    """A tensor whose dims are cut along axes of the mesh; this task has ``local`` of it.

    Shapes and sizes are those of the whole tensor, so that a model's own ``view(B, T, heads, -1)``
    means what it says. torch's functions find out what to do with the shards in `TABLE`; what is
    not there is computed with the whole tensors, on each task, and said once. Make one with
    `wrap` (of a shard, as a parameter is), or `shard` (of a tensor that all tasks have); `whole`
    gives back a plain tensor. All of them are differentiable, and no gradient ever flows through
    the object itself: ``local`` has the history.

    Attributes:
        local: This task's shard, a plain tensor.
        spec: Which axis cuts which dim.
        axes: The axes that there are, by name.
    """

    local: Tensor
    spec: Spec
    axes: Axes
    _shape: torch.Size | None
    is_spoilt = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_transformed():
            raise UserError(
                f"{getattr(func, '__name__', func)}() of a sharded tensor inside of torch.vmap, or "
                "another transform of torch.func",
                "Compute the rows at once without it, or replicate the parameters of that module "
                "(names={path: ()}).",
            )
        for each in args:
            if type(each) is Sharded and (each.is_spoilt or not each.local.requires_grad):
                if each.is_spoilt and func is not Tensor.__setitem__:
                    raise spoilt()
                check_seen(each)
        if func in VIEWS and args and type(args[0]) is Sharded:
            return as_copies(cls._by_rule(func, args, kwargs), args[0])
        return cls._by_rule(func, args, kwargs)

    @classmethod
    def _by_rule(cls, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        rule = TABLE.get(func)
        if not kwargs:
            return fallback(func, args, {}) if rule is None else rule(func, *args)
        if rule is None or kwargs.get("out") is not None:
            return fallback(func, args, kwargs)
        if "input" in kwargs and func is not torch.where:  # of which it is the second
            return rule(func, kwargs.pop("input"), *args, **kwargs)
        return rule(func, *args, **kwargs)

    # What is asked of every tensor, without a way through `__torch_function__`.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole tensor."""
        if self._shape is None:
            sizes = list(self.local.shape)
            for dim, axis in enumerate(self.spec.dims):
                if axis is not None:
                    sizes[dim] *= self.axes[axis].size
            self._shape = torch.Size(sizes)
        return self._shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def nelement(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.spec.dims)

    def ndimension(self) -> int:
        return len(self.spec.dims)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.spec.dims)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """That of the shard."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of the shard."""
        return self.local.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the shard learns."""
        return self.local.requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the shard is a leaf."""
        return self.local.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """That of the shard."""
        return self.local.grad_fn

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Sharded(shape={tuple(self.shape)}, spec={self.spec}, local={self.local!r})"

    def __format__(self, how: str) -> str:
        return repr(self)  # what one task alone may ask for

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "a sharded tensor cannot be pickled or copied", "Save strategy.state_dict() instead."
        )

    def whole(self) -> Tensor:
        """The whole tensor, on every task: differentiable; all tasks of its axes call it."""
        return whole(self)


def wrap(local: Tensor, spec: Spec, axes: Axes) -> Tensor:
    """Say that ``local`` is this task's shard.

    Args:
        local: The shard, as a parameter that is one; operations on the result flow back to it.
        spec: How the whole tensor is cut. A replicated one gives ``local`` itself.
        axes: The axes of the mesh.

    Returns:
        A `Sharded` view of it.
    """
    if spec.partial:
        for name in spec.partial:
            local = collectives.reduce(local, axes[name])
        spec = spec._replace(partial=())
    if spec.is_replicated:
        return local
    return made(local, spec, axes)


def made(local: Tensor, spec: Spec, axes: Axes) -> Sharded:
    """As `wrap`, of a spec that cuts a dim and has no partial sums."""
    stands = _LEARNS if local.requires_grad else _PLAIN
    found: Sharded = stands.as_subclass(Sharded)
    found.local, found.spec, found.axes, found._shape = local, spec, axes, None
    return found


def shard(tensor: Tensor, spec: Spec, axes: Axes) -> Tensor:
    """Cut a tensor that all tasks have (or that is cut otherwise) as ``spec`` says.

    Args:
        tensor: Plain, with the same values on all tasks; or `Sharded`.
        spec: How it shall be cut.
        axes: The axes of the mesh.

    Returns:
        The same values; differentiable.

    Raises:
        UserError: The dim does not divide.
    """
    for dim, axis in enumerate(spec.dims):
        sizes = spec.blocks_of(dim) or (tensor.shape[dim],)
        if axis is not None and any(size % axes[axis].size for size in sizes):
            raise UserError(
                f"dim {dim} of size {tensor.shape[dim]} cut along {axis!r}, which has "
                f"{axes[axis].size} tasks",
                "Only dims that divide evenly are cut: replicate it, or take another size.",
            )
    return wrap(local_of(tensor, spec, axes), spec, axes)


def local_of(tensor: Tensor, to: Spec, axes: Axes) -> Tensor:
    """The local part of ``tensor`` once it is cut as ``to`` says; differentiable."""
    if not isinstance(tensor, Sharded):
        here, local = replicated(tensor.dim()), tensor
    else:
        if tensor.is_spoilt:
            raise spoilt()
        check_seen(tensor)
        here, local = tensor.spec, tensor.local
    if here == to:
        return local
    for dim, axis in enumerate(here.dims):
        if axis is not None and (to.dims[dim] != axis or here.blocks_of(dim) != to.blocks_of(dim)):
            local = collectives.gather(local, axes[axis], dim, here.blocks_of(dim))
            here = here.replace(dim, None)
    for dim, axis in enumerate(to.dims):
        if axis is not None and here.dims[dim] is None:
            local = collectives.cut(local, axes[axis], dim, to.blocks_of(dim))
    return local


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor with all values on every task; differentiable. Plain ones stay as they are.

    All tasks of the axes that cut it call this together.
    """
    if not isinstance(tensor, Sharded):
        return tensor
    return local_of(tensor, replicated(len(tensor.shape)), tensor.axes)


def uncut(tensor: Tensor, *dims: int) -> Tensor:
    """``tensor`` with these dims (may be negative) whole on every task; differentiable."""
    if not isinstance(tensor, Sharded):
        return tensor
    to = tensor.spec
    for dim in dims:
        if to.dims[dim] is not None:
            to = to.replace(dim % len(to.dims), None)
    return tensor if to is tensor.spec else wrap(local_of(tensor, to, tensor.axes), to, tensor.axes)


def like(local: Tensor, x: Sharded) -> Sharded:
    """``local`` as the shard of a tensor that is cut as ``x`` is."""
    return made(local, x.spec, x.axes)


def here_of(tensor: Tensor) -> Tensor:
    """What this task has of ``tensor``: its shard, or all of a plain one."""
    return tensor.local if isinstance(tensor, Sharded) else tensor


def as_it_is(local: Tensor, x: Tensor) -> Tensor:
    """``local`` cut as ``x`` is; a plain tensor where that is plain."""
    return like(local, x) if isinstance(x, Sharded) else local


def map_tensors(value: Any, change: Callable[[Sharded], Any]) -> Any:
    """``value`` with every `Sharded` in its lists, tuples and dicts replaced."""
    if isinstance(value, Sharded):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(each, change) for each in value)
    if type(value) is dict:
        return {key: map_tensors(each, change) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, change) for each in value))
    return value


def all_whole(value: Any) -> Any:
    """``value`` with every `Sharded` in its lists, tuples and dicts as a plain tensor."""
    return map_tensors(value, whole)


@contextmanager
def module(name: str) -> Iterator[None]:
    """Say which module runs, for what is said of its operations."""
    _where.append(name)
    try:
        yield
    finally:
        _where.pop()


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Put a rule into the table for these functions."""

    def register(made: Rule) -> Rule:
        for function in functions:
            TABLE[function] = made
        return made

    return register


def fallback(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is not on the table: the plain operation on whole tensors, said once."""
    from spartito.mesh.rules.whole import compute_whole

    return compute_whole(func, args, kwargs)


def is_transformed() -> bool:
    """Whether the code that runs is inside of a transform of `torch.func`, as vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def at() -> str:
    """The module that runs, for messages."""
    return _where[-1] if _where else ""


__all__ = [
    "TABLE", "Axes", "Sharded", "all_whole", "at", "local_of", "made", "map_tensors", "module",
    "rule", "shard", "spec", "whole", "wrap",
]  # fmt: skip
