"""Modules that show their shards as what they are parts of, while the model's own code runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

from torch import Tensor, nn

from spartito.engine.modules.batchnorm import SynchronizedForward
from spartito.errors import UserError
from spartito.mesh.functions import watch
from spartito.mesh.recomputation import keep_shards
from spartito.mesh.sharded_tensor import (
    Axes,
    Sharded,
    all_whole,
    local_of,
    map_tensors,
    whole,
    wrap,
)
from spartito.mesh.spec import Spec, replicated

_inside = 0  # forward passes that run, one in the other
_shows = 0  # other methods and hooks of the model that run
HERE, PLAIN = "_spartito_mesh", "_spartito_plain"


@dataclass(frozen=True, slots=True)
class Here:
    """How a module's own tensors are cut, by their names, and along which axes."""

    specs: Mapping[str, Spec]
    axes: Axes

    def __deepcopy__(self, memo: Any) -> Here:
        return self

    def __reduce__(self) -> Any:
        raise UserError(
            "a module on a mesh has shards of its parameters, and cannot be pickled",
            "Write strategy.state_dict()['model'], or trainer.save(folder).",
        )


def is_shown(module: nn.Module) -> bool:
    """Whether `show` has changed the class of a module.

    Args:
        module: Any.

    Returns:
        Whether its class is one of those made here.
    """
    return PLAIN in vars(type(module))


@contextmanager
def inside() -> Iterator[None]:
    """A block inside of a forward pass: what a model returns there stays as it is cut."""
    global _inside
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1


def is_inside() -> bool:
    """Whether a forward pass of ours runs."""
    return _inside > 0


_saves = False


@contextmanager
def saving() -> Iterator[None]:
    """A block in which ``state_dict()`` of a module gives the shards that it has."""
    global _saves
    before, _saves = _saves, True
    try:
        yield
    finally:
        _saves = before


def is_saving() -> bool:
    """Whether such a block runs."""
    return _saves


@cache
def shown(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """``kind`` whose tensors of these names are `Sharded` inside of forward passes."""
    watch()
    keep_shards()
    plain: Any = kind.forward
    run: Any = plain
    if issubclass(kind, SynchronizedForward):
        run = partial(_forward_normalized, plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside:
            return run(self, *args, **kwargs)
        return _outermost(run, self, *args, **kwargs)

    def save(self: Any, *args: Any) -> None:
        if not _saves:
            raise UserError(
                f"state_dict() of a {kind.__name__} that has shards of its parameters",
                "strategy.state_dict()['model'] has the whole ones, trainer.save(folder) writes "
                "them; all tasks call it.",
            )
        kind._save_to_state_dict(self, *args)

    def load(self: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if not _saves:
            _cut_state(self, state, prefix)
        kind._load_from_state_dict(self, state, prefix, *args)

    body: dict[str, Any] = {name: property(_view(name)) for name in names}
    for base in reversed(kind.__mro__):
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            body |= {key: _own(f) for key, f in vars(base).items() if _is_own(key, f)}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside or not (self._forward_hooks or self._forward_pre_hooks):
            return kind._call_impl(self, *args, **kwargs)
        return _showing(kind._call_impl, self, *args, **kwargs)

    def members(self: Any, get: Any, *args: Any, **kwargs: Any) -> Any:
        views = _views(self) if _inside else {}
        for name, tensor in kind._named_members(self, get, *args, **kwargs):
            yield name, views.get(id(tensor), tensor)

    def put(self: Any, name: str, value: Any) -> None:
        if type(value) is Sharded and name in self._buffers and name not in names:
            value = whole(value)  # each task has all of the buffers that no rule cuts
        kind.__setattr__(self, name, value)

    body |= {
        "forward": forward,
        "__setattr__": put,
        "_call_impl": call,
        "_named_members": members,
        PLAIN: kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if names:
        body |= {"_save_to_state_dict": save, "_load_from_state_dict": load}
    return type(kind.__name__, (kind,), body)


def _cut_state(self: Any, state: dict[str, Any], prefix: str) -> None:
    """Leave this task its shards of a user's ``state_dict()``, which has whole tensors."""
    here: Here = self.__dict__[HERE]
    sizes = {name: axis.size for name, axis in here.axes.items()}
    for name, how in here.specs.items():
        value, own = state.get(prefix + name), self._parameters.get(name, self._buffers.get(name))
        if not isinstance(value, Tensor) or own is None:
            continue
        if tuple(value.shape) != (whole := how.global_shape(own.shape, sizes)):
            raise UserError(
                f"load_state_dict: {prefix}{name} of shape {tuple(value.shape)}, here {whole}",
                "Load what another instance of this model has saved.",
            )
        state[prefix + name] = local_of(value.detach(), how, here.axes)


def _outermost(run: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward pass of which the user sees the result: plain, whole."""
    global _inside
    _inside += 1
    try:
        return all_whole(run(*args, **kwargs))
    finally:
        _inside -= 1


def _showing(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Other code of the model: it sees what is whole, and returns what is whole."""
    global _shows
    _shows += 1
    try:
        return map_tensors(run(*args, **kwargs), _given_back)
    finally:
        _shows -= 1


def _given_back(value: Sharded) -> Tensor:
    """What a method returns: a parameter as it is, for optimizers; all else whole."""
    return value.local if isinstance(value.local, nn.Parameter) else whole(value)


def _is_own(name: str, value: Any) -> bool:
    """Whether it is a method that the model's author has added."""
    return inspect.isfunction(value) and not hasattr(nn.Module, name)


def _own(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method that may be called outside of a forward pass, as ``generate`` is."""

    def steps(*args: Any, **kwargs: Any) -> Any:
        values = plain(*args, **kwargs)
        while True:
            try:
                value = _showing(next, values)
            except StopIteration as end:
                return end.value
            yield value

    def method(*args: Any, **kwargs: Any) -> Any:
        if _inside or _shows:
            return plain(*args, **kwargs)
        return steps(*args, **kwargs) if generates else _showing(plain, *args, **kwargs)

    generates = inspect.isgeneratorfunction(plain)
    return wraps(plain)(method)


def cut_tensors(model: nn.Module) -> Iterator[tuple[Tensor, Spec, Axes]]:
    """The tensors of a model that are cut: the shard of each, how it is cut, and along what.

    Args:
        model: Any; one that was never on a mesh has none.
    """
    for module in model.modules():
        here: Here | None = module.__dict__.get(HERE)
        if here is not None:
            for name, how in here.specs.items():
                tensor = module._parameters.get(name, module._buffers.get(name))
                if tensor is not None:
                    yield tensor, how, here.axes


def _views(model: nn.Module) -> dict[int, Any]:
    """The cut tensors of a model as it sees them, by the id of each shard."""
    return {id(tensor): wrap(tensor, how, axes) for tensor, how, axes in cut_tensors(model)}


def _view(name: str) -> Any:
    def view(self: Any) -> Any:
        tensor = self._parameters[name] if name in self._parameters else self._buffers[name]
        if not (_inside or _shows) or tensor is None or isinstance(tensor, Sharded):
            return tensor
        here = self.__dict__[HERE]
        return wrap(tensor, here.specs[name], here.axes)

    return view


def _forward_normalized(plain: Any, self: Any, input: Tensor) -> Any:
    """BatchNorm over all data shards, of the channels that are here."""
    global _inside, _shows
    here = self.__dict__[HERE]
    channels = next((how.dims[0] for how in here.specs.values()), None)
    how = replicated(len(input.shape)).replace(1, channels)
    if isinstance(input, Sharded) or channels is not None:
        input = local_of(input, how, here.axes)
    before, features = (_inside, _shows), self.__dict__.get("num_features")
    _inside = _shows = 0  # it sees its own tensors as they are
    if features is not None and channels is not None:
        self.num_features = input.shape[1]  # InstanceNorm looks whether they are so many
    try:
        output = plain(self, input)
    finally:
        _inside, _shows = before
        if features is not None:
            self.num_features = features
    return wrap(output, how, here.axes)
