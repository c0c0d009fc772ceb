"""The placement of a model on several tasks: each has a part of every tensor, as a layout says."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.accelerators import generator_states, set_generator_states
from spartito.checkpoint.cuts import Cut
from spartito.checkpoint.saved_state import Saved
from spartito.collectives.collective import Traffic
from spartito.engine.drift import different, outliers
from spartito.engine.meta.meta_models import make_all, told
from spartito.engine.modules.averaged_models import watch_averages
from spartito.engine.modules.buffers import shared_buffers
from spartito.engine.updates.divided_update import is_elementwise, say_elementwise
from spartito.engine.updates.optimizer_step import stepping
from spartito.engine.updates.optimizers import (
    Wrapper,
    has_sparse_gradients,
    optimizer_parameters,
    unwrap,
)
from spartito.errors import TaskLostError, UserError
from spartito.fingerprints import checksum
from spartito.mesh import placing
from spartito.mesh.axes import PIPELINE, Mesh
from spartito.mesh.collectives import Axis, summing_at_end
from spartito.mesh.describe import Description, describe, describe_tensors
from spartito.mesh.layout import DEFAULT, Layout
from spartito.mesh.showing_modules import inside, saving
from spartito.names import divisors
from spartito.notes import warn
from spartito.steps.coordination import SynchronousCoordination
from spartito.steps.groups import AXIS, LAYERS, send
from spartito.steps.parts import Exchange, Prepared, Settings, State
from spartito.steps.placements.computation import WholeModel
from spartito.steps.prepared import Pair
from spartito.steps.recovery import ShardsLostError, Standing, load_state, share_state
from spartito.steps.state_parts import parameters_here
from spartito.steps.team import Team

Rules = Sequence[tuple[str, Any]]
"""Of a layout: names of dims, and the axes that cut them."""


def mesh_of(
    given: Mapping[str, int] | None, model: int | None, rules: Rules, tasks: int, alone: bool
) -> tuple[Mesh, Layout]:
    """The mesh of so many tasks, and the rules on it.

    Args:
        given: The sizes of its axes; None: ``model`` tasks hold one model.
        model: None: all tasks do.
        rules: As `spartito.mesh.layout.read_rules` returns them.
        tasks: How many there are.
        alone: Whether this task has the whole model: an evaluator.

    Raises:
        UserError: They do not go together.
    """
    if alone:
        given, model = dict.fromkeys(given or {"model": 1}, 1), None
    if given is None:
        size = tasks if model is None else model
        if size < 1 or tasks % size:
            raise UserError(
                f"model={size} in a job of {tasks} tasks",
                f"It divides the number of tasks: {divisors(tasks)}.",
            )
        given = {"data": tasks // size, "model": size}
    mesh = Mesh(given)
    default = rules == DEFAULT
    kept = [rule for rule in rules if not default or rule[1] in mesh.axes]
    return mesh, Layout(tuple(kept), mesh.axes)


class TensorParallel:
    """Tensors are cut along the axes of a mesh, by rules about their named dims.

    Args:
        team: The tasks on the mesh.
        exchange: Of those that have the same part of the model.
        mesh: The axes and their sizes.
        layout: The rules on it.
        names: Patterns of parameters' paths, and the names of their dims.
        strict: Whether dims that do not divide are refused.
    """

    def __init__(
        self,
        team: Team,
        exchange: Exchange,
        mesh: Mesh,
        layout: Layout,
        names: Mapping[str, Sequence[str | None]] | None = None,
        strict: bool = False,
    ) -> None:
        self._team, self._exchange = team, exchange
        self.mesh, self.layout = mesh, layout
        self._names, self._strict = dict(names or {}), strict
        self.computation = WholeModel(team, _inside_of_a_pass)
        self.agreement = self.account = MeshAgreement(team)
        self._uncut: list[nn.Module] = []  # of a task that joins, until it has met the others

    @property
    def fraction(self) -> float:
        """As `Placement.fraction`."""
        return self._team.own_shard[1] / self.mesh.size

    def check(self, model: nn.Module, settings: Settings) -> None:
        """As `Placement.check`."""
        own = unwrap(model)
        if self._team.cluster.world_size > 1 and has_sparse_gradients(own):
            raise UserError(
                f"sparse gradients under {self._team.name}",
                "Gradients of shards are dense tensors: build the Embedding with sparse=False.",
            )
        if self._team.recovery is not None and settings.precision == "fp16":
            raise UserError(
                "precision='fp16' on a mesh with recovery: each task has a loss scale of its own",
                "Choose bf16.",
            )
        here = self.mesh.coordinates(self._team.tasks.rank)
        placing.check_same(own, self.mesh.axes, here)
        placing.hide(own)  # what a strategy before has shown
        self._plan(own)
        watch_averages()

    def lay_out(self, model: nn.Module) -> None:
        """As `Placement.lay_out`."""
        if self._team.groups.joins:
            make_all(model)
            return
        self._cut(model, partial(told, self._team.groups.world))

    def bring(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Placement.bring`."""
        self.cut(model, tensors)
        self._exchange.begin(unwrap(model), tensors)

    def cut(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `bring`, without giving parameters to the exchange.

        Args:
            model: With whatever wraps it.
            tensors: Parameters and buffers of it.
        """
        own, groups = unwrap(model), self._team.groups
        placing.check_kept(own)
        if groups.joins:
            self._uncut.append(own)
            return
        known, tensors = placing.specs_of(own), [each for each in tensors if not each.is_meta]
        cut = [tensor for tensor in tensors if id(tensor) in known]
        rest = [tensor for tensor in tensors if id(tensor) not in known]
        with self._team.coordination.during("prepare"):
            send(groups.data, cut)  # by those that have the same shards
            send(groups.world, rest)
        if known:
            placing.show(own, known, self._axes)
        elif len(tensors) == len(list(own.parameters())) + len(list(own.buffers())):
            self._cut(own, Tensor.detach)
        if (layers := groups[LAYERS]).world_size > 1:
            device = self._team.device
            states = [layers.broadcast(state) for state in generator_states(device)]
            set_generator_states(device, states)

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Placement.gradients`."""
        own = unwrap(model)
        called = model if isinstance(model, Wrapper) else own
        compiled = [m for m in own.modules() if m._compiled_call_impl is not None]
        if (called is not model or compiled) and self._team.is_chief:
            warn("torch.compile is left out on a mesh: it cannot look into the exchange of shards")
        for module in compiled:
            module._compiled_call_impl = None
        self.cut_state(own, optimizer)
        return self._exchange.gradients(called, optimizer)

    def rejoin(self) -> None:
        """As `Rejoins.rejoin`: the axes have others along them, and who joins cuts its models."""
        for name, axis in self._axes.items():
            axis.join(self._team.groups[AXIS + name])
        for model in self._uncut:
            self._cut(model, Tensor.detach)
        self._uncut = []

    def cut_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Leave this task its part of the state that a fresh optimizer has (Adagrad).

        Args:
            model: The user's own.
            optimizer: Of its parameters.

        Raises:
            UserError: The optimizer may look at whole parameters.
        """
        specs = placing.specs_of(model)
        for parameter in optimizer_parameters(optimizer):
            how = specs.get(id(parameter))
            if how is None:
                continue
            if not is_elementwise(optimizer):
                raise UserError(
                    f"{type(optimizer).__name__} may look at whole parameters, of which each task "
                    "has a part",
                    say_elementwise(optimizer),
                )
            shape = how.global_shape(parameter.shape, self.mesh.axes)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == shape:
                    optimizer.state[parameter][key] = placing.shard_of(value, how, self._axes)

    def prepared(self, pair: Pair, couple: Callable[[Pair], None]) -> None:
        """As `Placement.prepared`: at once."""
        couple(pair)

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        """As `Placement.fractions`."""
        specs = placing.specs_of(unwrap(pair.model))
        together = self._team.groups[LAYERS].world_size
        cut = [specs.get(id(parameter)) for parameter in parameters]
        shards = [math.prod(self.mesh.axes[a] for a in how.axes) if how else 1 for how in cut]
        return [count / together for count in shards]

    def describe(self, model: nn.Module, example: Any = None, loss: Any = None) -> Description:
        """As `MeshStrategy.describe`.

        Args:
            model: A whole one; it is not changed.
            example: Inputs of one task.
            loss: A function of the output alone.
        """
        own = unwrap(model)
        return describe(own, self._plan(own), self.layout, example, loss)

    # What is here

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        """As `Held.cuts`."""
        model = unwrap(pair.model)
        specs, here = placing.specs_of(model), self.mesh.coordinates(self._team.tasks.rank)
        tensors = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        found: dict[str, Cut] = {}
        for name, tensor in tensors:
            if (how := specs.get(id(tensor))) is not None and not tensor.is_meta:
                shape = how.global_shape(tensor.shape, self.mesh.axes)
                found[name] = placing.SpecCut(shape, how, self.mesh.axes, here)
        return found

    def owned(self, pair: Pair) -> set[str] | None:
        """As `Held.owned`."""
        if not any(self.cuts(pair, section) for section in ("model", "optimizer")):
            return None
        return parameters_here(pair.model)

    def showing(self) -> AbstractContextManager[None]:
        """As `Held.showing`: shards."""
        return saving()

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """As `Held.save`."""
        with saving():
            return state()

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """As `Held.load`."""
        with saving():
            load(saved)

    @cached_property
    def _axes(self) -> dict[str, Axis]:
        batch = self.layout.batch_axis
        return {
            name: Axis(name, self._team.groups[AXIS + name], self._rows_from(name))
            for name in self.layout.axes
            if name != batch
        }

    def _rows_from(self, axis: str) -> float:
        """From how many bytes on a sum stays cut by rows."""
        return math.inf if PIPELINE in self.mesh.axes else self.layout.rows_from(axis)

    def _plan(self, model: nn.Module) -> dict[str, placing.Placed]:
        return placing.plan(model, self.layout, self._names, self._strict)

    def _cut(self, model: nn.Module, whole: Callable[[Tensor], Tensor]) -> None:
        """Leave this task its shards of what ``whole`` gives for each tensor."""
        team, planned = self._team, self._plan(model)
        self._say(planned)
        if team.is_chief and team.groups[LAYERS].world_size > 1:
            self.agreement.layout = describe_tensors(model, planned, self.layout).figures()
        with team.coordination.during("prepare"):
            placing.cut(model, planned, self._axes, whole)

    def _say(self, planned: Mapping[str, placing.Placed]) -> None:
        """Tell what stays whole though a rule is about it."""
        uneven = [placed for placed in planned.values() if placed.uneven]
        if uneven and self._team.is_chief:
            warn(
                "%d tensors stay whole where they do not divide: %s",
                len(uneven),
                "; ".join(placing.does_not_divide(one, self.layout) for one in uneven[:3]),
            )
        is_whole = all(placed.spec.is_replicated for placed in planned.values())
        if is_whole and self._team.is_chief and self._team.groups[LAYERS].world_size > 1:
            warn("no tensor of the model is cut: all tasks of the mesh compute all of it")


class Rejoins(Protocol):
    """A placement whose tasks have met again."""

    def rejoin(self) -> None:
        """Leave here what belongs here, as on the others; the values come afterwards.

        All tasks call it.
        """
        ...


class InColumns:
    """Each part of a model is on one task for each data shard: those of a column of the mesh.

    An update is made once all tasks have its gradients. Where one is lost just then, some have made
    it and others have not; these still can, and do if anybody has.

    Args:
        team: Whose training it is.
        placement: How the model lies on them.
    """

    def __init__(self, team: Team, placement: Rejoins) -> None:
        self._team, self._placement = team, placement
        self._at = -1  # the update of this task's part, in a meeting that is under way
        self._begun: Pair | None = None  # its update waits for the others
        self._open: list[tuple[Pair, list[Tensor | None], list[Tensor]]] = []

    def keep(self) -> None:
        """As `Copies.keep`: they are there."""
        self._open, self._at = [], -1

    @contextmanager
    def updating(self, pair: Pair, aboard: bool) -> Generator[None]:
        """As `Copies.updating`."""
        if aboard:
            self._begun = pair
            self._meet()
            self._begun = None
        yield

    @contextmanager
    def loading(self, aboard: bool) -> Generator[None]:
        """As `Copies.loading`: nothing else is to know."""
        yield

    def leaving(self, cause: TaskLostError | None) -> TaskLostError | None:
        """As `Copies.leaving`: keep an update that others may have made."""
        if self._begun is not None:
            pair, self._begun = self._begun, None
            grads = [p.grad for p in pair.gradients.parameters]
            own = [None if grad is None else grad.clone() for grad in grads]
            buffers = [buffer.clone() for buffer in unwrap(pair.model).buffers()]
            self._open = [(pair, own, buffers)]
        return cause

    def share(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """As `Copies.share`: each column brings its part up to the newest update."""
        team = self._team
        self._placement.rejoin()
        world, column = team.groups.world, team.replicas
        at = max(own.progress[0], self._at)  # where this task's part is
        text = msgspec.json.encode((own, at, column.ranks))
        texts = world.all_gather_bytes(text)
        told = [msgspec.json.decode(t, type=tuple[Standing, int, list[int]]) for t in texts]
        able = [(part, each.progress) for each, part, _ in told if not each.is_new]
        newest = max((part for part, _ in able), default=at)
        furthest = max((progress[0] for _, progress in able), default=at)
        lost = [ranks for *_, ranks in told if all(told[rank][0].is_new for rank in ranks)]
        if able and (lost or newest > furthest):
            names = " and ".join(world.names[rank] for rank in lost[0]) if lost else "all tasks"
            raise ShardsLostError(
                f"{names} that had a part of the newest state were lost together",
                "Start the job again: it goes on from the newest backup of BackupAndRestore, or "
                "checkpoint, if there is one.",
            )
        if at < newest and self._open and not own.is_new:
            self._finish()
            at += 1
        self._open = []
        here = msgspec.structs.replace(own, progress=(at,))
        with saving():
            share_state(column, team.pairs.all, here, dict, take=_take)
        self._at = newest
        best, state = share_state(world, (), own, training)
        # The tasks of one data shard draw the same, and the task that tells may be of another.
        drawn = share_state(
            team.groups[LAYERS], (), own, lambda: {"random": training().get("random")}
        )[1]
        if state is not None and drawn is not None:
            state.update(drawn)
        return best, state

    def _meet(self) -> None:
        """All tasks have the gradients of an update."""
        self._team.groups.world.barrier()

    def _finish(self) -> None:
        """Make the update that others have made."""
        for pair, grads, buffers in self._open:
            for parameter, grad in zip(pair.gradients.parameters, grads, strict=True):
                parameter.grad = grad
            with torch.no_grad():
                for buffer, value in zip(unwrap(pair.model).buffers(), buffers, strict=True):
                    buffer.copy_(value)
            with stepping(pair.optimizer):
                pair.optimizer.step()
            for parameter in pair.gradients.parameters:
                parameter.grad = None


def check_recovery(team: Team, data_shards: int, zero: int) -> None:
    """Refuse a recovery that could not bring a part of a model back.

    Args:
        team: The tasks, with a recovery.
        data_shards: How many tasks have the same part.
        zero: What they keep in shards among them.

    Raises:
        UserError: It says why.
    """
    least = None if team.recovery is None else team.recovery.min_workers
    tasks = team.tasks.world_size
    if least is not None and least < tasks:
        raise UserError(
            f"min_workers={least} of {tasks} tasks under {team.name}, which has a model only with "
            "all",
            "Leave it out: who is lost is waited for.",
        )
    if zero:
        raise UserError(
            f"zero={zero} under {team.name} with recovery: a shard would be on one task alone",
            "Leave one of them out.",
        )
    if data_shards == 1:
        raise UserError(
            f"recovery under {team.name} with one data shard: no task has the part of a lost one",
            "Take twice as many tasks, or BackupAndRestore and no recovery.",
        )


def _take(pair: Pair, saved: dict[str, Any]) -> None:
    """As `load_state`; what other stages have is not among it."""
    is_whole = not any(p.is_meta for p in unwrap(pair.model).parameters())
    load_state(pair, saved, strict=is_whole)


@contextmanager
def _inside_of_a_pass() -> Generator[None]:
    """A block around a backward pass; gradients of small tensors are summed at its end."""
    with inside(), summing_at_end():
        yield


class MeshAgreement:
    """Tasks of one model have parameters in common, and must draw the same random numbers.

    Args:
        team: The tasks on the mesh.
    """

    hides_outputs = False
    counts = True
    layout: Mapping[str, Any] | None = None
    """What `TensorParallel.describe` found of the model that was prepared last."""

    def __init__(self, team: Team) -> None:
        self._team, self.traffic = team, Traffic()

    def settle(self) -> None:
        """As `Agreement.settle`: all write into their own."""

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int | None:
        """As `Agreement.checksum`: that of the values."""
        return None

    def compare(self, order: int) -> None:
        """As `Agreement.compare`."""
        team, group = self._team, self._team.groups[LAYERS]
        models = [unwrap(pair.model) for pair in team.pairs.all]
        specs = {key for model in models for key in placing.specs_of(model)}
        coordination = _synchronous(team)
        common = [each for each in coordination.parameters() if id(each) not in specs]
        coordination.compare_in(group, common, order)
        if group.world_size > 1:
            states = generator_states(team.device)
            drawn = group.all_gather(torch.tensor([checksum(states)]))
            if unlike := outliers([each.item() for each in drawn]):
                raise different(
                    group,
                    unlike,
                    "has drawn other random numbers than",
                    "Tasks of one model draw the same, as for dropout: use a generator of your own "
                    "where one task alone draws.",
                )

    def settle_buffers(self) -> None:
        """As `Agreement.settle_buffers`."""
        team = self._team
        for pair in team.pairs.all:
            model = unwrap(pair.model)
            own = shared_buffers(model, without=placing.specs_of(model))
            is_strict = pair.randomness is not None
            _synchronous(team).settle_buffers(team.groups[LAYERS], own, is_strict)

    def describe(self) -> dict[str, Any]:
        """As `Account.describe`."""
        return {"layout": self.layout} if self.layout else {}

    def conclude(self) -> None:
        """As `Account.conclude`."""

    def counted(self, parts: list[bytes]) -> list[bytes]:
        """As `Account.counted`: all tasks of a model have the same output."""
        return parts


def _synchronous(team: Team) -> SynchronousCoordination:
    """What a mesh's tasks agree on: they meet in every step."""
    assert isinstance(team.coordination, SynchronousCoordination), "of a mesh"
    return team.coordination
