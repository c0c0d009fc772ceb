"""A plain module on a mesh: what is cut where, the cut itself, and modules that show it.

Parameters stay the user's own objects, under their names, with the local shard as their values.
Inside of ``forward`` a module shows them as `Sharded` tensors, outside as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from spartito.checkpoint.cuts import Box
from spartito.engine.meta.meta_models import make
from spartito.engine.modules.batchnorm import SynchronizedForward
from spartito.engine.updates.optimizers import LOADING, WHOLE_SHAPE, whole_shape
from spartito.errors import UserError
from spartito.mesh.layout import Layout, check_dims
from spartito.mesh.names import Dims, name_dims
from spartito.mesh.sharded_tensor import Axes
from spartito.mesh.showing_modules import HERE, PLAIN, Here, cut_tensors, is_shown, shown
from spartito.mesh.spec import Spec, replicated, spec


@dataclass(frozen=True, slots=True)
class Placed:
    """One parameter or buffer on the mesh.

    Args:
        path: The first of the user's names.
        dims: What its dims are called; () where they have no names.
        shape: That of the whole tensor.
        spec: How it is cut.
        uneven: The dims that a rule is about, and that do not divide.
    """

    path: str
    dims: Dims
    shape: tuple[int, ...]
    spec: Spec
    uneven: tuple[int, ...] = ()


def plan(
    model: nn.Module,
    layout: Layout,
    names: Mapping[str, Sequence[str | None]] = {},
    strict: bool = False,
) -> dict[str, Placed]:
    """Where every parameter and buffer of a whole model is to lie; nothing is changed.

    Args:
        model: Any module.
        layout: The rules, and the sizes of the axes.
        names: Patterns of paths, and the dims that these tensors have.
        strict: Whether dims that do not divide are an error; else they stay whole.

    Returns:
        By path, each tensor once.

    Raises:
        UserError: For a dim or pattern that the model lacks, two dims on one axis, and where
            ``strict`` dims that do not divide.
    """
    named = name_dims(model, names)
    counts = Counter(dim.name for dims in named.values() for dim in dict.fromkeys(dims) if dim.name)
    check_dims(layout.rules, counts)
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    found = {}
    for path, tensor in tensors.items():
        dims, shape = named.get(path, ()), whole_shape(tensor)
        if not dims:
            found[path] = Placed(path, (), shape, replicated(len(shape)))
            continue
        placement = layout.lay(dims, shape, path, strict or _is_given(path, names))
        blocks = tuple(dim.blocks(size) for dim, size in zip(dims, shape, strict=True))
        how = spec(placement.axes, (), blocks)
        found[path] = Placed(path, dims, shape, how, placement.uneven)
    if strict:
        for placed in found.values():
            if placed.uneven:
                raise UserError(does_not_divide(placed, layout), _REMEDY)
    return found


_REMEDY = "Choose another size or mesh, name the dim None, or leave strict=True out."


def _is_given(path: str, names: Mapping[str, Any]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in names)


def does_not_divide(placed: Placed, layout: Layout) -> str:
    """Which dim of a tensor does not divide, and by what.

    Args:
        placed: One with an uneven dim.
        layout: The rules.

    Returns:
        A part of a sentence.
    """
    number = placed.uneven[0]
    dim, size = placed.dims[number], placed.shape[number]
    axis = next(axis for name, axis in layout.rules if name == dim.name)
    what = f"{size} {dim.name}"
    if dim.units:
        each = [part * dim.units for part in dim.parts or (1,)]
        kind = "heads" if dim.name == "heads" else "groups"
        what = f"{' + '.join(map(str, dict.fromkeys(each)))} {kind}"
    return f"{placed.path}: {what} do not divide among {axis}={layout.axes[axis]}"


def cut(
    model: nn.Module,
    planned: Mapping[str, Placed],
    axes: Axes,
    whole: Callable[[Tensor], Tensor] = Tensor.detach,
) -> None:
    """Leave this task its shards of a model that is whole, and have its modules show them.

    The parameters stay the same objects, so optimizers that hold them go on.

    Args:
        model: The one that was planned, with equal values on all tasks.
        planned: What `plan` returned.
        axes: The axes of the mesh as this task sees them.
        whole: Gives the values of a tensor, which may have none; one at a time.

    Raises:
        UserError: For a module with hooks on its backward pass.
    """
    if not all(placed.spec.is_replicated for placed in planned.values()):
        _check_hooks(model)
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, placed in planned.items():
        tensor: Any = tensors[path]
        make(tensor, shard_of(whole(tensor), placed.spec, axes))
        setattr(tensor, WHOLE_SHAPE, placed.shape)
    specs = {id(tensors[path]): placed.spec for path, placed in planned.items()}
    show(model, {key: how for key, how in specs.items() if not how.is_replicated}, axes)


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks that torch would put around shards, as an autograd Function."""
    for path, module in model.named_modules():
        if path and (module._backward_hooks or module._backward_pre_hooks):
            raise UserError(
                f"{path} has a hook on its backward pass, where tensors are shards on a mesh",
                "Take a hook on its output, in a forward hook: output.register_hook(...).",
            )


def shard_of(tensor: Tensor, how: Spec, axes: Axes) -> Tensor:
    """This task's shard of a whole tensor.

    Args:
        tensor: The whole one.
        how: How it is cut.
        axes: The axes of the mesh.

    Returns:
        The shard, in memory of its own; ``tensor`` itself where it is not cut.
    """
    if how.is_replicated:
        return tensor
    for dim, axis in enumerate(how.dims):
        if axis is not None:
            tensor = axes[axis].view(tensor, dim, how.blocks_of(dim))
    return torch.empty_like(tensor, memory_format=torch.preserve_format).copy_(tensor)


@dataclass(frozen=True, slots=True)
class SpecCut:
    """Which boxes of a whole tensor a task holds: what checkpoints ask.

    Args:
        shape: That of the whole tensor.
        spec: How it is cut.
        sizes: Of the axes.
        here: Where the task is on each of them.
    """

    shape: tuple[int, ...]
    spec: Spec
    sizes: Mapping[str, int]
    here: Mapping[str, int]

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of this task's shard."""
        return self.spec.local_shape(self.shape, self.sizes)

    def parts(self, tensor: Tensor) -> list[tuple[Box, Tensor]]:
        """The boxes that a shard consists of.

        Args:
            tensor: The shard.

        Returns:
            Each box with a view of its elements.
        """
        edges = [self._edges(dim) for dim in range(len(self.shape))]
        found = []
        for each in product(*edges):
            view = tensor
            for dim, (_, first, size) in enumerate(each):
                view = view.narrow(dim, first, size)
            found.append((Box(tuple(e[0] for e in each), tuple(e[2] for e in each)), view))
        return found

    def _edges(self, dim: int) -> list[tuple[int, int, int]]:
        """Begin in the whole, begin in the shard, and size of each block of a dim."""
        axis, whole = self.spec.dims[dim], self.shape[dim]
        if axis is None:
            return [(0, 0, whole)]
        found, outer, inner = [], 0, 0
        for block in self.spec.blocks_of(dim) or (whole,):
            size = block // self.sizes[axis]
            found.append((outer + self.here[axis] * size, inner, size))
            outer, inner = outer + block, inner + size
        return found


@contextmanager
def hidden(model: nn.Module) -> Iterator[None]:
    """A block in which modules have their own classes, as `hide` leaves them.

    Args:
        model: One that `show` has changed, or any other.
    """
    shown_ones = (each for each in model.modules() if is_shown(each) and HERE in vars(each))
    axes = next((vars(each)[HERE].axes for each in shown_ones), None)
    specs = specs_of(model)
    hide(model)
    yield
    if axes is not None:
        show(model, specs, axes)


def specs_of(model: nn.Module) -> dict[int, Spec]:
    """How the tensors of a model are cut.

    Args:
        model: Any; one that was never on a mesh has none.

    Returns:
        By the id of each tensor that is cut.
    """
    return {id(tensor): how for tensor, how, _ in cut_tensors(model)}


def check_same(model: nn.Module, axes: Mapping[str, int], here: Mapping[str, int]) -> None:
    """Refuse shards that are not those of this task on this mesh.

    Args:
        model: One that `cut` has cut, or a whole one.
        axes: The sizes of the axes.
        here: Where this task is on each of them.

    Raises:
        UserError: If it was cut for another mesh, or another task.
    """
    for module in model.modules():
        known: Here | None = module.__dict__.get(HERE)
        for how in known.specs.values() if known else ():
            for name in how.axes:
                axis = known.axes[name] if known else None
                if axis is None or (axis.size, axis.index) != (axes.get(name), here.get(name)):
                    raise UserError(
                        f"the model was cut for another mesh, and is now to lie on {dict(axes)}",
                        f"Build it anew, and load what was saved: {LOADING}.",
                    )


def check_kept(model: nn.Module) -> None:
    """Refuse a whole parameter in place of one that is cut, which its module would show as a shard.

    Args:
        model: One that `cut` has cut, or any other.

    Raises:
        UserError: It names the parameter.
    """
    for path, module in model.named_modules():
        known: Here | None = module.__dict__.get(HERE)
        for name in known.specs if known else ():
            tensor = module._parameters.get(name)
            if tensor is not None and not hasattr(tensor, WHOLE_SHAPE):
                raise UserError(
                    f"{path}.{name} is a new parameter, of shape {tuple(tensor.shape)}, in place "
                    "of one of which each task on the mesh has a shard",
                    "Replace the whole layer, which is not cut then, or change it before the "
                    "Trainer is made.",
                )


def show(model: nn.Module, specs: Mapping[int, Spec], axes: Axes) -> None:
    """Change the classes of modules so that they show their tensors as what they are parts of.

    Args:
        model: The module whose tensors are shards now.
        specs: How these are cut, by the id of each.
        axes: The axes of the mesh.
    """
    above = {""}
    for path, module in model.named_modules(remove_duplicate=False):
        own = {
            name: specs[id(tensor)]
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and id(tensor) in specs
        }
        if own or isinstance(module, SynchronizedForward):
            module.__dict__[HERE] = Here(own, axes)
            parents = path.split(".")
            above |= {".".join(parents[:count]) for count in range(len(parents) + 1)}
    for path, module in model.named_modules():
        if path in above and not is_shown(module):
            here = module.__dict__.get(HERE)
            kind: Any = type(module)
            module.__class__ = shown(kind, tuple(sorted(here.specs if here else ())))


def hide(model: nn.Module) -> None:
    """Give the modules their own classes back, which see the shards as they are.

    Args:
        model: One that `show` has changed, or any other.
    """
    for module in model.modules():
        if is_shown(module):
            module.__class__ = vars(type(module))[PLAIN]
