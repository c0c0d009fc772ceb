"""Models without values, on torch's meta device: what can be made of them, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spartito.collectives.collective import Collective
from spartito.engine.devices.precision import convert
from spartito.engine.meta.recipe_operations import memory
from spartito.engine.meta.value_recipes import (
    forget,
    is_noted,
    is_written_outside,
    key_of,
    meta,
    value_of,
)
from spartito.errors import UserError
from spartito.notes import warn

CPU = torch.device("cpu")


def is_unmade(model: nn.Module) -> bool:
    """Whether some of a model's tensors have no values.

    Args:
        model: Any module.
    """
    return any(tensor.is_meta for _, tensor in _named(model))


def plan_values(model: nn.Module, precision: str) -> None:
    """Find out how every tensor of a model gets its values, without giving it any.

    What was built under `spartito.meta` has been noted. What was built under
    ``torch.device("meta")`` gets what the ``reset_parameters`` of its modules do, children first,
    and of models of ``transformers`` what ``_init_weights`` does.

    Args:
        model: Any module.
        precision: As of `spartito.engine.devices.precision.convert`.

    Raises:
        UserError: If nobody knows the values of a tensor, one was written into outside of
            `spartito.meta`, or two parameters share memory.
    """
    for known, tensor in _named(model):
        if tensor.is_meta and is_written_outside(tensor):
            raise UserError(
                f"{known} was written into outside of sp.meta(), and had no values yet",
                "Put what writes into the block too: with sp.meta(): net.apply(init). A state "
                "is loaded there, by load_state_dict(state, assign=True), or by trainer.load().",
            )
    if any(_lacking(model)):
        resets = [_reset(each) for each in _children_first(model) if any(_lacking(each))]
        with meta():
            for reset in filter(callable, resets):
                reset()
        of_transformers = getattr(model, "_init_weights", None)
        if callable(of_transformers):
            with meta():
                model.apply(of_transformers)
        warn(
            "a model built under torch.device('meta') has what reset_parameters() of its modules "
            "gives; build it under sp.meta(), which also notes what its own __init__ does"
        )
    if name := next(_lacking(model), None):
        path, _, own = name.rpartition(".")
        raise UserError(
            f"{own} of {path or 'the model'}, a {type(model.get_submodule(path)).__name__}, has no "
            "values: it is on the meta device, and nothing that was noted sets it",
            "Build the model under sp.meta() instead of torch.device('meta'): with sp.meta(): "
            "net = Net(). Or give the module a reset_parameters() that sets it.",
        )
    _check_apart(model)
    with meta():
        convert(model, precision)


def make(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer without values some; it stays the same object.

    Args:
        tensor: One on the meta device; any other one gets them as its ``data``.
        value: Its values, or a part of them; their memory is taken.
    """
    if not tensor.is_meta:
        tensor.data = value
        return
    made: Any = value
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(value, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def make_buffers(model: nn.Module, device: torch.device = CPU) -> None:
    """Give a model's buffers their values, whole.

    Args:
        model: One of which `plan_values` knows all.
        device: Where they are to be.
    """
    for buffer in model.buffers():
        if buffer.is_meta:
            make(buffer, value_of(buffer).to(device))


def make_parameters(
    model: nn.Module,
    named: Iterable[tuple[str, nn.Parameter]],
    group: Collective,
    keeps: Callable[[str], bool] = lambda name: True,
    device: torch.device = CPU,
) -> None:
    """Give parameters without values those that the first task of a group has, one at a time.

    Args:
        model: Those that are made are in it.
        named: All that were planned, by name; those with values stay as they are.
        group: The tasks; all call it.
        keeps: Whether this task wants a parameter.
        device: Where they are to be.
    """
    named = list(named)
    with making(model, (parameter for _, parameter in named)):
        for name, parameter in named:
            if parameter.is_meta:
                value = told(group, parameter)
                if keeps(name):
                    make(parameter, value.to(device))


def told(group: Collective, tensor: Tensor) -> Tensor:
    """The value that the first task of a group has of a tensor, on all of them.

    Args:
        group: The tasks; all call it for the same tensors, one after the other.
        tensor: One on the meta device, made there and sent; or any other, which is sent.

    Returns:
        A whole one, laid out as ``tensor``; it is not made elsewhere.
    """
    if group.world_size == 1:
        return value_of(tensor)
    if tensor.is_meta and group.rank:
        value = torch.empty(0, dtype=tensor.dtype).set_(memory(tensor.nbytes))
        value = value[: tensor.numel()].view(tensor.shape)
    else:
        value = value_of(tensor).contiguous()
    group.broadcast(value)
    if not tensor.is_meta or value.stride() == tensor.stride():
        return value
    return torch.empty_like(tensor.detach(), device="cpu").copy_(value)


def make_all(model: nn.Module) -> None:
    """Give all that is left its values, whole.

    Args:
        model: One of which `plan_values` knows all.
    """
    for _, tensor in _named(model):
        if tensor.is_meta:
            make(tensor, value_of(tensor))


@contextmanager
def making(model: nn.Module, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """A block in which `make` is called; what was noted is let go of when no more can be made.

    Args:
        model: Any module. Its recurrent layers do not look at their parameters in the block.
        tensors: More that are made.
    """
    planned = (*tensors, *(tensor for _, tensor in _named(model)))
    keys = [key_of(tensor) for tensor in planned if tensor.is_meta]
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:  # torch swaps nothing that has weak references
        module._flat_weight_refs = [None] * len(module._flat_weights_names)
    yield
    for module in recurrent:
        module._init_flat_weights()
    if not any(tensor.is_meta and is_noted(tensor) for _, tensor in _named(model)):
        forget(keys)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once, but those that no batch has given a size."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor):
            yield name, tensor


def _lacking(model: nn.Module) -> Iterator[str]:
    """The names of what has no values and no notes."""
    return (name for name, each in _named(model) if each.is_meta and not is_noted(each))


def _reset(module: nn.Module) -> Any:
    """What gives a module's own tensors their first values, where it has that."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _children_first(model: nn.Module) -> Iterator[nn.Module]:
    found: list[nn.Module] = []
    model.apply(found.append)
    return iter(dict.fromkeys(found))


def _check_apart(model: nn.Module) -> None:
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not is_lazy(parameter) and parameter.numel():
            other = seen.setdefault(parameter.untyped_storage()._cdata, name)
            if other != name:
                raise UserError(
                    f"{name} shares memory with {other}, of which it is another view",
                    "Build such a model without sp.meta().",
                )
