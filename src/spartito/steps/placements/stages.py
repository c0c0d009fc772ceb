"""The placement of a model in a pipeline: each task has some of its layers, microbatches pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.accelerators import begin_backward
from spartito.checkpoint.cuts import Cut
from spartito.checkpoint.saved_state import Saved
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, Traffic
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.data.batch import Batch
from spartito.engine.devices.host_reads import Number
from spartito.engine.gradients.gradient_sum import LocalGradients, Weighed
from spartito.engine.logged import listening
from spartito.engine.losses.loss import LossFunction
from spartito.engine.meta.meta_models import is_unmade, make_buffers, make_parameters
from spartito.engine.modules.batchnorm import has_batchnorm
from spartito.engine.updates.optimizers import (
    check_by_parameter,
    check_frequencies,
    check_undivided,
    unwrap,
)
from spartito.errors import UserError
from spartito.mesh.axes import DATA, PIPELINE, Mesh
from spartito.mesh.layout import Layout
from spartito.notes import note
from spartito.pipeline import schedules
from spartito.pipeline.messages import Messages, connect, connect_devices
from spartito.pipeline.model import PipedModel
from spartito.pipeline.schedules import Shape
from spartito.pipeline.split import Start
from spartito.steps.groups import AXIS, LAYERS
from spartito.steps.parts import Exchange, Prepared, Settings, State
from spartito.steps.placements.computation import (
    Evaluated,
    WholeModel,
    look_at_norms,
    no_rows,
    of_spare_rows,
    without_loss,
)
from spartito.steps.placements.stage_passes import (
    StagePasses,
    draws,
    nothing,
    telling,
    told,
    told_bytes,
)
from spartito.steps.placements.tensor_parallel import TensorParallel
from spartito.steps.prepared import Pair, tensors_of
from spartito.steps.state_parts import parameters_here
from spartito.steps.team import Team
from spartito.steps.topology import Connected, Grid
from spartito.system import give_back_memory


def mesh_of_stages(
    given: Mapping[str, int] | None, stages: int | None, per_task: int, tasks: int
) -> Mesh:
    """The mesh of a pipeline.

    Args:
        given: What the user asked for; None: pipelines of as many tasks as ``stages`` need.
        stages: Of the model; None: those of all tasks, or of the mesh.
        per_task: The stages of each task.
        tasks: Of the job.

    Raises:
        UserError: They do not go together.
    """
    if given is None:
        stages = tasks * per_task if stages is None else stages
        if stages % per_task:
            raise UserError(f"{stages} stages with {per_task} for each task", "Take a multiple.")
        length = stages // per_task
        if tasks % length:
            raise UserError(
                f"{tasks} tasks for pipelines of {length} (stages={stages}"
                + (f", {per_task} for each task)" if per_task > 1 else ")"),
                f"Take a multiple of {length} tasks, or stages={tasks * per_task}.",
            )
        return Mesh({DATA: tasks // length, PIPELINE: length})
    if PIPELINE not in given:
        raise UserError(
            f"mesh={dict(given)} has no axis {PIPELINE!r}",
            "Its size is how many tasks have stages: {'pipeline': 2, 'data': 2, 'model': 2}.",
        )
    mesh = Mesh(given)
    if stages not in (None, mesh.axes[PIPELINE] * per_task):
        raise UserError(
            f"stages={stages} on mesh={mesh.axes}, which has {mesh.axes[PIPELINE] * per_task}",
            "The mesh says it already: leave stages out.",
        )
    return mesh


@dataclass
class Lines:
    """The topology of pipelines: a mesh, whose axis "pipeline" has the stages, and their messages.

    Args:
        grid: The mesh.
        per_task: The stages of each task.
    """

    grid: Grid
    per_task: int
    traffic: Traffic = field(default_factory=Traffic)
    """What went between the stages so far."""
    _messages: Messages | None = None

    def shard(self, tasks: ClusterSpec) -> tuple[int, int]:
        """As `Topology.shard`."""
        return self.grid.shard(tasks)

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        """As `Topology.connect`; this task's pipeline too."""
        found = self.grid.connect(rendezvous, cluster)
        ranks = self.grid.mesh.along(PIPELINE, cluster.rank)
        tasks = len(ranks)
        rank_of = [tasks - 1 - stage % tasks for stage in range(tasks * self.per_task)]
        mail = connect(rendezvous, ranks)
        rendezvous.keep(mail)
        rank = ranks.index(cluster.rank)
        links = connect_devices(rendezvous, ranks, rank_of, rank)
        self._messages = Messages(mail, rank, rank_of, self.traffic, rendezvous.device, links)
        return found

    @property
    def messages(self) -> Messages:
        """Those of this task's pipeline, once it is connected."""
        assert self._messages is not None, "connected"
        return self._messages


class Stages:
    """The layers of a model are divided among the tasks of a pipeline, when the first batch comes.

    Args:
        team: The tasks.
        lines: How they are connected.
        inside: How the tensors of a stage are placed.
        exchange: Of those that have the same stages.
        shape: Tasks, stages and microbatches.
        schedule: In which order microbatches pass.
        split: Where stages begin: "auto", or the paths of modules.
    """

    def __init__(
        self,
        team: Team,
        lines: Lines,
        inside: TensorParallel,
        exchange: Exchange,
        shape: Shape,
        schedule: str,
        split: str | Sequence[str],
    ) -> None:
        self._team, self._inside, self._exchange = team, inside, exchange
        self.pipelines = Pipelines(team, lines, shape, schedule, split, self._divide)
        self.computation = self.pipelines
        self.agreement = self.account = StageAgreement(inside, self.pipelines)

    @property
    def fraction(self) -> float:
        """As `Placement.fraction`."""
        return self._inside.fraction

    def check(self, model: nn.Module, settings: Settings) -> None:
        """As `Placement.check`."""
        if settings.precision == "fp16":
            raise UserError(
                "precision='fp16' in a pipeline: a stage would not hear of another's overflow",
                "Take 'bf16', which needs no loss scale.",
            )
        if self.pipelines.shape.microbatches > 1:
            for path, module in model.named_modules():
                check_frequencies(path, module)
        self._inside.check(model, settings)

    def lay_out(self, model: nn.Module) -> None:
        """As `Placement.lay_out`."""
        groups = self._team.groups
        if groups.joins or groups[LAYERS].world_size > 1:
            self._inside.lay_out(model)  # shards of all stages, until the first batch
        elif self._team.recovery is not None:  # who joins later has no part in making them
            named = model.named_parameters()
            make_parameters(model, named, groups.world, device=self._team.device)
            make_buffers(model, self._team.device)
        else:
            make_buffers(model, self._team.device)

    def bring(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Placement.bring`; the exchange gets parameters once it is known who keeps them."""
        self._inside.cut(model, tensors)

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Placement.gradients`: this task's own, until it is known which parameters stay."""
        own = unwrap(model)
        if self.pipelines.shape.tasks > 1:
            check_by_parameter(optimizer, "task of a pipeline")
        if self.pipelines.has_divided(optimizer):
            return self._inside.gradients(own, optimizer)
        self._inside.cut_state(own, optimizer)
        return own, LocalGradients(optimizer)

    def prepared(self, pair: Pair, couple: Callable[[Pair], None]) -> None:
        """As `Placement.prepared`: with the first batch."""
        self.pipelines.add(pair, couple)

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        """As `Placement.fractions`; what several stages use counts in the first of them."""
        counted = self.pipelines.of(pair).counts(parameters)
        found = self._inside.fractions(pair, parameters)
        return [fraction * counts for fraction, counts in zip(found, counted, strict=True)]

    def describe(self, model: nn.Module, example: Any = None, loss: Any = None) -> Any:
        """As `PipelineStrategy.describe`.

        Args:
            model: A whole one; it is not changed.
            example: Inputs of one task.
            loss: A function of the output alone.
        """
        return self._inside.describe(model, example, loss)

    # What is here

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        """As `Held.cuts`."""
        piped, found = self.pipelines.of(pair).piped, self._inside.cuts(pair, section)
        return {name: cut for name, cut in found.items() if not piped.is_foreign(name)}

    def owned(self, pair: Pair) -> set[str] | None:
        """As `Held.owned`: of one's own stages."""
        return parameters_here(pair.model)

    def showing(self) -> AbstractContextManager[None]:
        """As `Held.showing`."""
        return self._inside.showing()

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """As `Held.save`: under the user's names, in the user's order."""
        self._make_all(pair)
        found, passes = self._inside.save(pair, state), self.pipelines.of(pair)
        if "optimizer" in found and passes.piped.starts:
            groups = zip(found["optimizer"]["groups"], passes.piped.names, strict=True)
            for group, names in groups:
                group["params"] = list(names)
        if "accumulated" in found and passes.piped.starts:
            waiting = found["accumulated"]["gradients"]
            waiting |= dict(passes.tied_sums(waiting, self.pipelines.messages))
        return found

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """As `Held.load`: a model without values takes them with its first batch."""
        passes = self.pipelines.of(pair)
        if "accumulated" in saved:
            self._make_all(pair)
        if is_unmade(pair.model) and passes.piped.starts is None:
            passes.unread.append(partial(self._load_later, pair, saved, load))
            return
        self._inside.load(pair, saved, load)
        if pair.saved is not None:
            for name, stages in passes.piped.tied().items():
                if stages[0] not in self.pipelines.own:  # the sum counts once
                    pair.saved["gradients"].pop(name, None)

    def _load_later(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        with self._inside.showing(), self._exchange.showing():
            self.load(pair, saved, load)

    def _make_all(self, pair: Pair) -> None:
        """What is asked for before the first batch, all tasks have."""
        model, passes = unwrap(pair.model), self.pipelines.of(pair)
        if passes.piped.starts is None and is_unmade(model):
            world, device = self._team.groups.world, self._team.device
            make_parameters(model, model.named_parameters(), world, device=device)
            pair.gradients = self.gradients(model, pair.optimizer)[1]
            passes.read()

    def rejoin(self) -> None:
        """As `Rejoins.rejoin`: who joins divides its models as the others have."""
        self._inside.rejoin()
        world, all_ = self._team.groups.world, self.pipelines.passes.values()
        told = world.all_gather_bytes(json.dumps([passes.plan for passes in all_]).encode())
        for passes, *plans in zip(all_, *map(json.loads, told), strict=True):
            passes.piped.forget_cuts()
            plan = next(filter(None, plans), None)
            if plan is not None and passes.plan is None:
                self._keep(passes, plan)

    def _keep(self, passes: StagePasses, plan: dict[str, Any]) -> None:
        """Keep what is this task's, as the chief has planned."""
        passes.plan = plan
        starts = [Start(path, call) for path, call in plan["starts"]]
        piped, pair, team = passes.piped, passes.pair, self._team
        parameters = dict(pair.model.named_parameters())
        piped.divide(starts, plan["owners"], pair.optimizer)
        pair.order = list(piped.order)
        world = team.groups.world
        make_parameters(pair.model, parameters.items(), world, piped.keeps, team.device)
        pair.shared = tensors_of(piped.model)  # those of others are let go of
        if team.is_chief and starts:
            begins = ", ".join(start.path for start in starts)
            note("%d stages, which begin with the input, %s", piped.stages, begins)

    def _divide(self, passes: StagePasses, plan: dict[str, Any]) -> None:
        """Go on with this task's part of a model, and of the gradients that wait."""
        piped, pair = passes.piped, passes.pair
        parameters = dict(pair.model.named_parameters())
        waiting = {name: parameter.grad for name, parameter in parameters.items()}
        self._keep(passes, plan)
        self._exchange.begin(pair.model, list(pair.model.parameters()))
        before, made = pair.gradients, self._inside.gradients(pair.model, pair.optimizer)
        pair.gradients = made[1]
        pair.gradients.go_on(before)
        for name, grad in waiting.items():  # of a checkpoint between the batches of an update
            first = piped.stages_of(name)[0] in self.pipelines.own  # what is tied counts once
            parameters[name].grad = grad if first else None


class Pipelines:
    """The computation of models in pipelines.

    Args:
        team: The tasks.
        lines: How they are connected.
        shape: Tasks, stages and microbatches.
        schedule: In which order microbatches pass.
        split: Where stages begin.
        divide: Leaves this task what is planned for it.
    """

    def __init__(
        self,
        team: Team,
        lines: Lines,
        shape: Shape,
        schedule: str,
        split: str | Sequence[str],
        divide: Callable[[StagePasses, dict[str, Any]], None],
    ) -> None:
        begin_backward(team.device)  # of most stages the last operation is no loss
        self._team, self.lines, self.shape = team, lines, shape
        self.schedule, self._split, self._divide = schedule, split, divide
        here = lines.grid.mesh.coordinates(team.tasks.rank)[PIPELINE]
        self._position = shape.tasks - 1 - here
        self.own = range(self._position, shape.stages, shape.tasks)
        """The stages of this task."""
        self.passes: dict[int, StagePasses] = {}  # by the id of a pair's optimizer
        self.timelines: list[dict[str, Any]] = []
        """What the first pipeline's tasks did when, in the last step of an epoch."""

    def add(self, pair: Pair, couple: Callable[[Pair], None]) -> None:
        """Take a pair that was prepared.

        Args:
            pair: It.
            couple: Is called once it is known what this task has of it.
        """
        piped = PipedModel(pair.model, self.shape.stages, self.own, self._team.device)
        passes = StagePasses(
            pair, piped, self.shape, self._position, self.schedule, couple, self._team.device
        )
        self.passes[id(pair.optimizer)] = passes
        if pair.randomness is not None:
            pair.randomness.look = partial(draws, piped.model, device=self._team.device)
        if self._team.is_chief and has_batchnorm(pair.model) and self.shape.microbatches > 1:
            note(
                "BatchNorm sees one microbatch at a time: numbers are those of %d small batches "
                "that are accumulated, not of the whole batch",
                self.shape.microbatches * self._team.num_replicas,
            )

    def of(self, pair: Pair) -> StagePasses:
        """The passes of a prepared pair.

        Args:
            pair: It.
        """
        return self.passes[id(pair.optimizer)]

    def has_divided(self, optimizer: Optimizer) -> bool:
        """Whether it is known which of an optimizer's parameters are this task's.

        Args:
            optimizer: Of a pair.
        """
        passes = self.passes.get(id(optimizer))
        return passes is not None and passes.plan is not None

    def enter(self, pairs: Sequence[Pair]) -> None:
        """As `Computation.enter`: what has been divided is to stay the same."""
        for pair in pairs:
            self.of(pair).piped.check_unchanged(pair.optimizer)

    def train(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        """As `Computation.train`: the output is with the last stage."""
        passes = self._ready(pair, batch, loss is not None)
        divisor = pair.gradients.begin(self._team.divisor(batch))
        output: Any = None
        total: Number = 0.0
        weight: Number = 0.0
        if batch.size:
            with telling(self.messages, self._team.job.task), self._watching(pair):
                output, total, weight = passes.train(batch, loss, divisor, self.messages)
        elif pair.randomness is not None:
            pair.randomness.abstain()
        pair.gradients.add(*self._of_last_stage(total, weight))
        return output

    def _watching(self, pair: Pair) -> AbstractContextManager[None]:
        """A step whose gradients are sums of those of microbatches, or of replicas."""
        if pair.randomness is None or not self._in_parts:
            return nullcontext()
        repeats = self.shape.microbatches > 1
        return pair.hooks.watching(pair.names_by_id, pair.gradients.parameters, repeats)

    @property
    def _in_parts(self) -> bool:
        """Whether a pass has a part of a global batch."""
        return self.shape.microbatches > 1 or self._team.divides

    def _of_last_stage(self, total: Number, weight: Number) -> tuple[Number, Number]:
        """A sum of losses and its weight, which the last stage has, on all tasks."""
        own = Weighed(self._line, weight, total)
        came = self._line.all_reduce(torch.tensor(own.on_host, dtype=torch.float64))
        weight, total = own.total(tuple(came.tolist()))
        return total, weight

    def evaluate(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Evaluated:
        """As `Computation.evaluate`."""
        self._look_at_norms(pair)
        passes = self._ready(pair, batch, loss is not None)
        if not batch.size:
            return 0.0, 0.0, None
        with telling(self.messages, self._team.job.task):
            output, sums, like = passes.look(batch, loss, True, self.messages)
            if loss is None and pair.looks_from_first is None:
                pair.looks_from_first = self._is_so_for_one(sums.is_guess)
                if pair.looks_from_first:
                    with listening(None):  # it has reported its figures
                        output, sums, like = passes.look(batch, loss, True, self.messages)
        total, weight = self._of_last_stage(sums.loss, sums.weight)
        return total, weight, told(self._line, output, like, self._last, self._team.device)

    def predict(self, pair: Pair, batch: Batch, has_loss: bool) -> Any:
        """As `Computation.predict`."""
        self._look_at_norms(pair)
        shown = of_spare_rows(batch)
        passes = self._ready(pair, shown, has_loss)
        loss = nothing if has_loss else None  # it tells how the model is called
        with telling(self.messages, self._team.job.task):
            output, _, like = passes.look(shown, loss, False, self.messages)
        output = told(self._line, output, like, self._last, self._team.device)
        if not batch.size:
            output = no_rows(output)
        return output if has_loss else without_loss(output)

    def _is_so_for_one(self, found: bool) -> bool:
        """Whether it is so for a task of this pipeline; all of it ask."""
        return bool(self._line.all_reduce(torch.tensor([float(found)])).item())

    def _look_at_norms(self, pair: Pair) -> None:
        if self._in_parts:
            look_at_norms(pair)

    def by_hand(self, call: str) -> WholeModel:
        """As `Computation.by_hand`: a task alone has no whole model."""
        raise UserError(
            f"{call}() under {self._team.name}, which owns the whole step",
            "Call step(), or choose mirrored or mesh for a loop of your own.",
        )

    def complete(self, pair: Pair) -> None:
        """As `Computation.complete`: what several stages use stays equal on all."""
        if not pair.passes:
            return
        passes = self.of(pair)
        parameters = dict(passes.piped.model.named_parameters())
        grads = {name: parameters[name].grad for name in passes.piped.tied()}
        for name, total in passes.tied_sums(grads, self.messages):
            parameters[name].grad = torch.empty_like(parameters[name]).copy_(total)

    @property
    def has_last_stage(self) -> bool:
        """Whether this task computes the outputs."""
        return self.shape.stages - 1 in self.own

    @property
    def messages(self) -> Messages:
        """Those of this task's pipeline."""
        self._team.groups.meet()
        return self.lines.messages

    def of_last_stage(self, parts: list[bytes]) -> list[bytes]:
        """What the task with the last stage has of ``parts``; all of a pipeline call it."""
        return told_bytes(self._line, parts, self._last)

    def keep_timeline(self) -> None:
        """At the end of an epoch: keep what tasks did in its last step, for the report."""
        team = self._team
        actions = [action for passes in self.passes.values() for action in passes.timeline()]
        own = {"name": str(team.job.task), "shard": team.data_shard[0], "actions": actions}
        own["line"] = list(self._line.ranks)
        said = [json.loads(text) for text in team.coordination.tell_all(json.dumps(own))]
        self.timelines = [said[rank] for rank in said[0].pop("line")][::-1]

    def describe(self) -> dict[str, Any]:
        """What a run's settings tell: of the first pipeline also what its tasks did when."""
        return {
            "schedule": self.schedule,
            "stages": self.shape.stages,
            "microbatches": self.shape.microbatches,
            "data_shards": self._team.num_replicas,
            "bound": schedules.bubble(self.schedule, self.shape),
            "tasks": self.timelines,
        }

    def _ready(self, pair: Pair, batch: Batch, has_loss: bool) -> StagePasses:
        """Divide the model when the first batch comes: the chief decides, all tasks call it."""
        passes, team = self.of(pair), self._team
        if passes.piped.starts is not None:
            pair.gradients.gather()
            return passes
        check_undivided(pair.model)  # another optimizer's first batch has, after it was prepared
        with team.coordination.during("prepare"):
            text = b""
            if team.is_chief or 0 in team.groups[LAYERS].ranks:
                shown, divides = of_spare_rows(batch), self._in_parts
                text = passes.planned(shown, has_loss, self._split, divides)
            plan = json.loads(team.groups.world.all_gather_bytes(text)[0])
            if "error" in plan:
                raise UserError(*plan["error"])
            self._divide(passes, plan)
            passes.couple(pair)
        give_back_memory()  # there was all of the model, and gradients of all of it
        with team.pairs.using(pair.optimizer):
            passes.read()
        pair.gradients.gather()
        return passes

    @property
    def _line(self) -> Collective:
        """The tasks of this one's pipeline."""
        return self._team.groups[AXIS + PIPELINE]

    @property
    def _last(self) -> int:
        """The rank in a pipeline of the task with the last stage."""
        return self.messages.rank_of(self.shape.stages - 1)


class StageAgreement:
    """As on every mesh; what is recorded tells how the last step went.

    Args:
        inside: How the tensors of a stage are placed.
        pipelines: What passes.
    """

    hides_outputs = True

    def __init__(self, inside: TensorParallel, pipelines: Pipelines) -> None:
        self._mesh, self._pipelines = inside.agreement, pipelines

    def settle(self) -> None:
        """As `Agreement.settle`."""
        self._mesh.settle()

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int | None:
        """As `Agreement.checksum`."""
        return self._mesh.checksum(parameters)

    def compare(self, order: int) -> None:
        """As `Agreement.compare`."""
        self._mesh.compare(order)

    def settle_buffers(self) -> None:
        """As `Agreement.settle_buffers`."""
        self._mesh.settle_buffers()

    @property
    def traffic(self) -> Traffic:
        """As `Account.traffic`: between the stages."""
        return self._pipelines.lines.traffic

    def describe(self) -> dict[str, Any]:
        """As `Account.describe`."""
        return {**self._mesh.describe(), "pipeline": self._pipelines.describe()}

    def conclude(self) -> None:
        """As `Account.conclude`."""
        self._pipelines.keep_timeline()

    @property
    def counts(self) -> bool:
        """As `Account.counts`."""
        return self._pipelines.has_last_stage

    def counted(self, parts: list[bytes]) -> list[bytes]:
        """As `Account.counted`: the last stage has the outputs in training."""
        return self._pipelines.of_last_stage(parts)


def layout_without_stages(rules: Sequence[tuple[str, Any]], mesh: Mesh, default: bool) -> Layout:
    """The rules on the axes of a pipeline's mesh that cut tensors.

    Args:
        rules: As `spartito.mesh.layout.read_rules` returns them.
        mesh: With an axis "pipeline".
        default: Whether nobody gave them: those about other axes are left out.
    """
    kept = [rule for rule in rules if not default or rule[1] in mesh.axes]
    return Layout(tuple(kept), {a: n for a, n in mesh.axes.items() if a != PIPELINE})
