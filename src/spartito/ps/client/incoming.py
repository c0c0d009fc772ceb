"""The values of one server as they arrive: in one of two areas, by turns, which parameters show.

Copying the values into the model takes a tenth of a small step. So a parameter that lies whole in
the span becomes a view of the area that has just been filled, while the server fills the other
one. It stays where it is, and is copied to, as long as anybody else looks at its memory: through
``state_dict()``, ``.data``, numpy, or a graph that was kept.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn

from spartito.ps.client.vector import Copies, Vector
from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.memory import flat

NOWHERE = -1

_looks = torch._C._storage_Use_Count


class Incoming:
    """The values of ``span`` of a model: memory where they arrive, and their way into the model.

    ``areas`` are two, uint8 ``(bytes of the span,)``; the next values go to number ``turn``. Where
    they are ``shared`` with the server, a fork of this process takes a copy of the values along:
    what it would see else is written by the server.
    """

    def __init__(
        self, vector: Vector, span: Span, areas: Sequence[Tensor], turn: int, shared: bool
    ) -> None:
        self.areas, self.turn = areas, turn
        self._copies = [Copies(vector, span, area) for area in areas]
        self.before = Copies(vector, span, areas[1 - turn])
        """The values that the model had last: each run where it lies."""
        self._shown = NOWHERE  # the area that the parameters are views of
        entries = self._copies[0].movable()
        self._parameters = [vector.tensors[entry] for entry in entries]
        self._numbers = dict.fromkeys(entries.values())  # of the runs that can be shown
        self._views = [[_alone(copies.view(e)) for e in entries] for copies in self._copies]
        self._at = [[view.data_ptr() for view in views] for views in self._views]
        self._storages = [[view.untyped_storage() for view in views] for views in self._views]
        self._handles = [[storage._cdata for storage in found] for found in self._storages]
        self._known = [_looks(handle) + 1 for handle in self._handles[0]]  # and the parameter
        if shared and self._parameters:
            _SHOWING.add(self)

    @property
    def area(self) -> Tensor:
        """Where the next values go."""
        return self.areas[self.turn]

    def load(self, changed: Collection[int]) -> None:
        """The values that came into the model; of all runs but those ``changed`` it has them."""
        copies = self._copies[self.turn]
        for number in changed:
            self.before.adopt(copies, number)
        moves = bool(self._parameters) and self._is_alone()
        self.before.load(changed, self._numbers if moves else ())
        if moves:
            if still := [number for number in self._numbers if number not in changed]:
                copies.store(still)  # what the model has counts, whoever wrote it
            for parameter, view in zip(self._parameters, self._views[self.turn], strict=True):
                parameter.data = view
            torch.autograd.graph.increment_version(self._parameters)  # as a copy does
            self._shown = self.turn
        if self._shown != NOWHERE:
            self.turn = 1 - self._shown

    def leave(self) -> None:
        """Give the parameters memory of their own."""
        if self._shown != NOWHERE:
            for parameter, at in zip(self._parameters, self._at[self._shown], strict=True):
                if parameter.data_ptr() == at:
                    parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
            self._shown = NOWHERE

    def _is_alone(self) -> bool:
        """Whether nobody but the model looks at the memory of the parameters."""
        if self._shown == NOWHERE:
            pairs = zip(self._parameters, self._views[0], strict=True)
            return all(_may_become(parameter, view) for parameter, view in pairs)
        shown = self._shown
        return [parameter.data_ptr() for parameter in self._parameters] == self._at[shown] and [
            _looks(handle) for handle in self._handles[shown]
        ] == self._known


def _alone(view: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own, which knows of no other."""
    memory: memoryview = flat(view).view(torch.uint8).numpy().data
    return torch.frombuffer(memory, dtype=view.dtype).as_strided(view.shape, view.stride())


def _may_become(parameter: Tensor, view: Tensor) -> bool:
    """Whether a parameter is a plain one, like the view, at whose memory nobody else looks."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type == "cpu"
        and (parameter.dtype, parameter.shape) == (view.dtype, view.shape)
        and parameter.stride() == view.stride()
        and not parameter.is_shared()
        and _looks(parameter.untyped_storage()._cdata) == 2  # and what we ask by
    )


_SHOWING: WeakSet[Incoming] = WeakSet()


def _before_fork() -> None:
    for incoming in list(_SHOWING):
        incoming.leave()


os.register_at_fork(before=_before_fork)
