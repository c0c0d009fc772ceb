"""Values that another task has, in place of which this one has tensors without any."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spartito.errors import UserError


class RefusingAbsent(TorchFunctionMode):
    """A block that may not write values that are elsewhere into those that are here, or back.

    Torch leaves the tensor as it is where one without values is added to it in place, and says
    nothing.
    """

    active = 0
    """How many such blocks there are now, one in the other."""

    def __enter__(self) -> Any:
        RefusingAbsent.active += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        RefusingAbsent.active -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            others = [each for each in tree_leaves((args[1:], kwargs)) if isinstance(each, Tensor)]
            absent = _is_absent(args[0])
            if any(_is_absent(each) != absent and (each.dim() or not absent) for each in others):
                raise UserError(
                    f"{name} of parameters that are on two tasks of a pipeline: values of one are "
                    "not on the other",
                    "Put both layers on one task (split=[...]), or choose mirrored or sharded.",
                )
        return func(*args, **kwargs)


def _is_absent(tensor: Tensor) -> bool:
    """Whether it stands for a parameter of another task, or was one before that was divided."""
    return tensor.is_meta or tensor.shape == (0,)
