"""What callbacks of a user do to the model on the chief, where they run alone.

Other tasks compute with what they have themselves, or with what servers give them: what is written
there would be lost, or the tasks would train different models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn, strided
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spartito.errors import UserError
from spartito.fingerprints import fingerprints
from spartito.names import listed

MOST_NAMES = 4


class CallbackWrites:
    """Compares a model before and after callbacks.

    Args:
        model: The chief's.
        name: The chief, as messages name it.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name
        self._before: dict[str, tuple[int, bool]] | None = None

    @contextmanager
    def refused(self) -> Iterator[None]:
        """A block of callbacks.

        Raises:
            UserError: One has changed the model, or what learns.
        """
        self._before = self._now()
        try:
            yield
            self.check()
        finally:
            self._before = None

    def note(self) -> None:
        """The model has got other values since, that all tasks have: loaded ones, or newer ones."""
        if self._before is not None:
            self._before = self._now()

    def check(self) -> None:
        """Refuse what a callback has done until now; nothing outside of the block.

        Raises:
            UserError: As `refused`.
        """
        if self._before is None:
            return
        before, now = self._before, self._now()
        names = {**before, **now}
        if written := [name for name in names if _sum_in(before, name) != _sum_in(now, name)]:
            raise UserError(
                f"{listed(written, MOST_NAMES)} of the model changed on {self._name} in a callback "
                "under parameter_server: callbacks run there alone, and other workers go on with "
                "what they have",
                "Write into the model before the Trainer is made, load values by "
                "trainer.load_weights(), or take a synchronous strategy.",
            )
        turned = [name for name in names if before[name] != now[name]]
        for learns, word in enumerate(("frozen", "unfrozen")):
            if those := [name for name in turned if now[name][1] is bool(learns)]:
                raise UserError(
                    f"{listed(those, MOST_NAMES)} of the model was {word} on {self._name} in a "
                    "callback under parameter_server: callbacks run there alone, and other workers "
                    "go on learning what they did",
                    "Freeze and unfreeze before the Trainer is made, or take a synchronous "
                    "strategy.",
                )

    def _now(self) -> dict[str, tuple[int, bool]]:
        """Of each parameter and buffer, by name, its fingerprint and whether it learns."""
        named = {
            f"{path}.{name}".lstrip("."): tensor
            for path, module in self._model.named_modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None and _has_values(tensor)
        }
        found = zip(fingerprints([*named.values()]), named.values(), strict=True)
        return dict(zip(named, ((one, each.requires_grad) for one, each in found), strict=True))


def _sum_in(found: dict[str, tuple[int, bool]], name: str) -> int | None:
    return found[name][0] if name in found else None


def _has_values(tensor: Tensor) -> bool:
    """Whether it has values that can be read here."""
    lazy = nn.parameter.is_lazy(tensor)
    plain = tensor.layout == strided and not is_traceable_wrapper_subclass(tensor)
    return not lazy and plain and not tensor.is_meta
