"""Hooks that a user has put on gradients: each replica calls them with its own part of a sum.

What multiplies by a fixed factor, or leaves elements out, is the same of the parts as of the sum.
What clamps, normalizes or adds is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spartito.errors import UserError

_LARGER = 8192.0
"""A bound that gradients do not come to now is one that larger ones come to; a power of 2, which
rounds nothing."""


class GradientHooks:
    """Looks once at each hook of a training's parameters that changes a gradient."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # by id; held, so that no other gets it

    @contextmanager
    def watching(
        self,
        named: Callable[[], dict[int, str]],
        given: Sequence[nn.Parameter],
        repeats: bool = False,
    ) -> Iterator[None]:
        """A backward pass; afterwards hooks that are no fixed factor are refused.

        Args:
            named: Gives the user's names of parameters, by their ids.
            given: The parameters.
            repeats: Whether there are several passes for a batch, after each of which hooks on
                ``.grad`` change what all before have left.

        Raises:
            UserError: For such a hook.
        """
        new = list(self._new(given))
        if not new:
            yield
            return
        seen: list[tuple[nn.Parameter, Any, Tensor]] = []
        for parameter, hooks, key, hook in new:
            call = _after if hooks is parameter._post_accumulate_grad_hooks else _before
            hooks[key] = partial(call, seen, parameter, hook)
        try:
            yield
        finally:
            for _, hooks, key, hook in new:
                if key in hooks:  # it may have removed itself
                    hooks[key] = hook
        for parameter, hook, grad in seen:
            if not bool(grad.any()):
                continue
            self._known[id(hook)] = hook
            is_after = any(
                hook is each for each in (parameter._post_accumulate_grad_hooks or {}).values()
            )
            call = partial(_of_accumulated, hook, parameter) if is_after else hook
            if (is_after and repeats) or not _adds_up(call, grad):
                name = named().get(id(parameter), f"shape {tuple(parameter.shape)}")
                raise UserError(
                    f"a hook on the gradient of {name!r} that is no fixed factor of it, "
                    "deterministic: it is called with parts of the sum",
                    "Clip by clip_norm=. Change the sum in a function given to "
                    "optimizer.register_step_pre_hook, under mirrored or multi_worker_mirrored.",
                )

    def _new(
        self, given: Sequence[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, dict[int, Any], int, Any]]:
        """The hooks of the user's that were not looked at yet."""
        for parameter in given:
            both: tuple[Any, Any] = (
                parameter._backward_hooks,
                parameter._post_accumulate_grad_hooks,
            )
            for hooks in both:
                for key, hook in [*hooks.items()] if hooks else ():
                    if id(hook) not in self._known and is_of_user(hook):
                        yield parameter, hooks, key, hook


def is_of_user(hook: Any) -> bool:
    """Whether a hook is neither ours nor torch's.

    Args:
        hook: A function, or what `functools.partial` made of one.
    """
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.partition(".")[0] not in ("spartito", "torch")


def _before(seen: list[Any], parameter: nn.Parameter, hook: Any, grad: Tensor) -> Any:
    """Call a hook of `Tensor.register_hook`, and note it where it gives another gradient."""
    given = grad.detach().clone()
    found = hook(grad)
    if isinstance(found, Tensor):
        seen.append((parameter, hook, given))
    return found


def _after(seen: list[Any], parameter: nn.Parameter, hook: Any, own: nn.Parameter) -> None:
    """Call one of `register_post_accumulate_grad_hook`, and note it where it changes ``.grad``."""
    grad = own.grad
    if grad is None:
        hook(own)
        return
    given, version = grad.detach().clone(), grad._version
    hook(own)
    if (now := own.grad) is not None and (
        now is not grad or now._version != version or not torch.equal(now, given)
    ):
        seen.append((parameter, hook, given))


def _of_accumulated(hook: Any, parameter: nn.Parameter, grad: Tensor) -> Tensor | None:
    """What such a hook makes of a gradient."""
    stand_in = nn.Parameter(parameter.detach().clone())
    stand_in.grad = grad
    hook(stand_in)
    return stand_in.grad


@torch.no_grad()
def _adds_up(hook: Callable[[Tensor], Any], grad: Tensor) -> bool:
    """Whether what ``hook`` makes of a sum is the sum of what it makes of the parts.

    One that cannot be asked, as it wants the parameter itself, is let be.
    """
    other = grad.flatten().flip(0).view_as(grad) * _LARGER
    with suppress(Exception):
        parts = [hook(each.clone()) for each in (grad, other)]
        whole = hook(grad + other)
        if all(isinstance(each, Tensor) for each in (*parts, whole)):
            scale = max(float(each.abs().max()) for each in (*parts, whole))
            gap = float((whole - parts[0] - parts[1]).abs().max())
            return not gap > 16 * torch.finfo(grad.dtype).eps * scale
    return True
