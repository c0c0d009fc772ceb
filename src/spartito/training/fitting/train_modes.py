"""Train mode and eval mode of a model's modules: as the user has set them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from spartito.engine.updates.optimizers import unwrap
from spartito.notes import warn
from spartito.steps.state_parts import parameters_here


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients; then each module goes back to its own mode."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in before:
            module.training = mode


class Modes:
    """The modes in which a model trains.

    A module that the user has put into eval mode stays there, as a frozen backbone whose BatchNorm
    is not to follow the data. Where no module at all is in train mode, as after ``model.eval()``,
    those of the epoch before come back; before the first one all modules train.
    """

    def __init__(self) -> None:
        self._known: list[tuple[nn.Module, bool]] = []
        self._told = False

    def begin(self, model: nn.Module, tells: bool) -> None:
        """Before an epoch.

        Args:
            model: What trains.
            tells: Whether to say once that dropout stays off in a part that learns.
        """
        modules = list(unwrap(model).modules())
        chosen = self._chosen(model)
        model.train()  # a model's own train() may leave some of it in eval mode, too
        for module in modules:
            module.training = module.training and chosen.get(id(module), True)
        self._known = [(module, module.training) for module in modules]
        if tells and not self._told and (name := without_dropout(unwrap(model))):
            warn(
                "%s learns in eval mode, as it was before: its dropout is off. If it is to be on, "
                "call train() on it before fit",
                name,
            )
            self._told = True

    def _chosen(self, model: nn.Module) -> dict[int, bool]:
        """The mode of each module, by its id, in which the next epoch is to begin."""
        chosen = {id(module): module.training for module in unwrap(model).modules()}
        if any(chosen.values()):
            return chosen
        return {id(module): mode for module, mode in self._known}

    def roles(self, model: nn.Module) -> Roles:
        """What learns here, and in which modes the next epoch begins."""
        chosen, here = self._chosen(model), parameters_here(model)
        fixed = [
            name
            for name, each in unwrap(model).named_parameters()
            if name in here and not each.requires_grad
        ]
        modules = unwrap(model).named_modules()
        return {
            "fixed": fixed,
            "eval": [n for n, each in modules if not chosen.get(id(each), True)],
        }


Roles = dict[str, list[str]]
"""What no tensor tells of a model, by names: parameters that do not learn, modules in eval mode."""


def are_roles(model: nn.Module, roles: Roles, now: Roles) -> bool:
    """Whether ``roles`` of all tasks are those of this one ``now``."""
    here = parameters_here(model)
    fixed = {name for name in roles["fixed"] if name in here}
    return (fixed, {*roles["eval"]}) == ({*now["fixed"]}, {*now["eval"]})


def take_roles(model: nn.Module, roles: Roles) -> None:
    """Have the model as it was when it had these roles."""
    here = parameters_here(model)
    for name, parameter in unwrap(model).named_parameters():
        if name in here and parameter.requires_grad == (name in roles["fixed"]):
            parameter.requires_grad_(name not in roles["fixed"])
    for name, module in unwrap(model).named_modules():
        module.training = name not in roles["eval"]


def without_dropout(model: nn.Module) -> str:
    """The first part of ``model`` that learns with all of it, and so some dropout, in eval mode.

    Returns:
        Its name, "" where there is none.
    """
    name: str
    for name, module in model.named_modules():
        parts = list(module.modules())
        if (
            name
            and not any(part.training for part in parts)
            and any(isinstance(part, _DropoutNd) and part.p > 0 for part in parts)
            and any(parameter.requires_grad for parameter in module.parameters())
        ):
            return name
    return ""
