"""What the members of a group over servers have of the model, and all of it on the first one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from spartito.checkpoint.cuts import Box, Cut, Part, gap
from spartito.checkpoint.saved_state import Saved
from spartito.checkpoint.saving import Attempt, Tasks, gather_together
from spartito.checkpoint.write_plan import Local
from spartito.collectives.collective import Collective
from spartito.engine.updates.optimizers import load_named_state, named_state, unwrap
from spartito.errors import UserError
from spartito.outer.group_values import Values
from spartito.steps.groups import BUNDLE, send
from spartito.steps.parts import Parts, State
from spartito.steps.prepared import Pair
from spartito.steps.state_parts import saved_optimizer, take_apart


class GroupModel(Protocol):
    """The model of a group, of which servers see all on its first member; all members call it."""

    @property
    def wholes(self) -> Mapping[str, Tensor]:
        """What stands for the tensors that members have between them, by the user's names."""
        ...

    def collect(self) -> None:
        """Put together on the first member what all have."""
        ...

    def spread(self) -> None:
        """Let all have what the first member has."""
        ...

    def optimizer(self) -> State:
        """The state of the group's optimizer; on the first member all of it."""
        ...

    def load_optimizer(self, state: State) -> None:
        """Take one's own part of a whole state.

        Args:
            state: As `optimizer` returns it; all have been given it.
        """
        ...


class EqualModels:
    """Each member has all of the model.

    Args:
        pair: A prepared one.
        group: The members.
    """

    wholes: Mapping[str, Tensor] = {}

    def __init__(self, pair: Pair, group: Collective) -> None:
        self._pair, self._group = pair, group
        self._tensors = list(tensors_of(pair).values())

    def collect(self) -> None:
        """As `GroupModel.collect`: it is there."""

    def spread(self) -> None:
        """As `GroupModel.spread`."""
        send(self._group, self._tensors)
        self._pair.gradients.written()

    def optimizer(self) -> State:
        """As `GroupModel.optimizer`: all have the same."""
        return named_state(unwrap(self._pair.model), self._pair.optimizer)

    def load_optimizer(self, state: State) -> None:
        """As `GroupModel.load_optimizer`."""
        load_named_state(unwrap(self._pair.model), self._pair.optimizer, state)


class ModelInParts:
    """Members have parts of the model between them: shards, or those of a mesh.

    The first one has memory for all of it, and is the only one that does.

    Args:
        pair: A prepared one.
        held: What the strategy inside of the group has made of it.
        values: What this task has of its parameters.
        group: The members.
        attempt: `Coordination.attempt` of these.

    Raises:
        UserError: What members have is no whole model.
    """

    def __init__(
        self, pair: Pair, held: Parts, values: Values, group: Collective, attempt: Attempt
    ) -> None:
        self._pair, self._held, self._values = pair, held, values
        self._group, self._attempt = group, attempt
        with self._held.showing():
            values.follow(list(unwrap(pair.model).parameters()))
            cuts, tensors = held.cuts(pair, "model"), tensors_of(pair)
        named = values.named(values.tensors)
        self._learned = list(named)
        self._here = {name: (tensor, cuts.get(name)) for name, tensor in tensors.items()}
        self._here |= {name: _apart(value) for name, value in named.items()}
        self._boxes = self._told()
        self._wholes = {name: self._empty(name) for name in self._boxes}

    @property
    def wholes(self) -> Mapping[str, Tensor]:
        """As `GroupModel.wholes`; of others than the first member without values."""
        return self._wholes

    @torch.no_grad()
    def collect(self) -> None:
        """As `GroupModel.collect`: each part comes from the first that has it."""
        for member in range(self._group.world_size):
            own = member == self._group.rank
            parts = [(name, box) for name, of in self._boxes.items() for box in of[member]]
            views = self._views() if own else {}
            tensors = [views[part] if own else self._target(*part) for part in parts]
            if member:
                send(self._group, tensors, member)
            elif own:
                for part, tensor in zip(parts, tensors, strict=True):
                    self._target(*part).copy_(tensor)

    @torch.no_grad()
    def spread(self) -> None:
        """As `GroupModel.spread`: whole tensors travel, a bundle of them at a time."""
        tensors = {name: tensor.detach() for name, (tensor, _) in self._here.items()}
        tensors |= {name: tensors[name].clone() for name in self._learned}
        send(self._group, [t for name, t in tensors.items() if name not in self._wholes])
        for names in self._bundles():
            wholes = [self._arriving(name) for name in names]
            send(self._group, wholes)
            for name, whole in zip(names, wholes, strict=True):
                for box, view in _views(tensors[name], self._here[name][1]):
                    view.copy_(whole[box.within(Box.all_of(whole.shape))])
        with self._held.showing():
            self._values.put([tensors[name] for name in self._learned])
        self._pair.gradients.written()

    def optimizer(self) -> State:
        """As `GroupModel.optimizer`."""
        pair, held = self._pair, self._held

        def state() -> State:
            return {"optimizer": named_state(unwrap(pair.model), pair.optimizer)}

        def apart() -> dict[str, Local]:
            with self._held.showing():
                found = held.placement.save(pair, lambda: held.exchange.save(pair, state))
                return take_apart(found, self._cuts_of_optimizer)

        is_first = self._group.rank == 0
        tasks = Tasks(self._attempt, self._group, is_first)
        found: State = gather_together(apart, tasks, is_first).get("optimizer", {})
        return found

    def load_optimizer(self, state: State) -> None:
        """As `GroupModel.load_optimizer`."""
        pair, model = self._pair, unwrap(self._pair.model)
        with self._held.showing():
            named = {name: p for name, p in model.named_parameters() if not p.is_meta}
            kept = self._held.owned(pair) or set(named)
            saved, cuts = Saved.of({"optimizer": state}), self._held.cuts(pair, "optimizer")
            load_named_state(model, pair.optimizer, saved_optimizer(saved, kept, set(named), cuts))

    def _cuts_of_optimizer(self, section: str) -> Mapping[str, Cut]:
        return self._held.cuts(self._pair, section) if section == "optimizer" else {}

    def _told(self) -> dict[str, list[list[Box]]]:
        """Of each tensor that is in parts which boxes each member sends: no part comes twice."""
        own = {name: [*_boxes(*found)] for name, found in self._here.items()}
        told = self._group.all_gather_bytes(msgspec.msgpack.encode(own))
        kind = dict[str, list[Box]]
        all_ = [msgspec.msgpack.decode(each, type=kind) for each in told]
        found: dict[str, list[list[Box]]] = {}
        for name in own:
            seen: set[Box] = set()
            first = []
            for each in all_:
                new = [box for box in each[name] if box.numel and box not in seen]
                first.append(new)
                seen |= set(new)
            shape = _shape(*self._here[name])
            if any(each[name] != [Box.all_of(shape)] for each in all_):
                found[name] = first
                if seen and (what := gap(shape, seen)):
                    raise UserError(f"{name} in parts on the members of a group: {what}")
        return found

    def _empty(self, name: str) -> Tensor:
        tensor, cut = self._here[name]
        device = tensor.device if self._group.rank == 0 else torch.device("meta")
        return torch.zeros(_shape(tensor, cut), dtype=tensor.dtype, device=device)

    def _arriving(self, name: str) -> Tensor:
        whole = self._wholes[name]
        return torch.empty_like(whole, device="cpu") if whole.is_meta else whole

    def _target(self, name: str, box: Box) -> Tensor:
        """Where a part of a tensor goes: on the first member into the whole of it."""
        whole = self._wholes[name]
        if whole.is_meta:
            return torch.empty(box.sizes, dtype=whole.dtype)
        return whole[box.within(Box.all_of(whole.shape))]

    def _views(self) -> dict[tuple[str, Box], Tensor]:
        """What this task has of tensors that are in parts."""
        here = {name: self._here[name] for name in self._boxes}
        return {
            (name, box): view
            for name, (tensor, cut) in here.items()
            for box, view in _views(tensor.detach(), cut)
        }

    def _bundles(self) -> Iterator[list[str]]:
        names: list[str] = []
        nbytes = 0
        for name, whole in self._wholes.items():
            names, nbytes = [*names, name], nbytes + whole.nbytes
            if nbytes >= BUNDLE:
                yield names
                names, nbytes = [], 0
        if names:
            yield names


def tensors_of(pair: Pair) -> dict[str, Tensor]:
    """The tensors of a model that servers have, by the user's names.

    Args:
        pair: A prepared one.
    """
    model: nn.Module = unwrap(pair.model)
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _apart(value: Tensor | Part) -> tuple[Tensor, Cut | None]:
    return (value.tensor, value.cut) if isinstance(value, Part) else (value, None)


def _shape(tensor: Tensor, cut: Cut | None) -> tuple[int, ...]:
    return tuple(tensor.shape) if cut is None else cut.shape


def _views(tensor: Tensor, cut: Cut | None) -> list[tuple[Box, Tensor]]:
    """The boxes of the whole tensor that lie in this one."""
    return [(Box.all_of(tensor.shape), tensor)] if cut is None else cut.parts(tensor)


def _boxes(tensor: Tensor, cut: Cut | None) -> Sequence[Box]:
    return [box for box, _ in _views(tensor.detach(), cut)]
