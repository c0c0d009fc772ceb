"""One model on several tasks: each has a part of every tensor, as a layout by names says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.boxes import Cut, NestedCut
from spartito.checkpoint.saved import Saved
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.rendezvous import WORLD, Rendezvous
from spartito.engine.averages import watch_averages
from spartito.engine.buffers import shared_buffers
from spartito.engine.checksum import ROUNDING, checksum, different, outliers
from spartito.engine.divided import ELEMENTWISE
from spartito.engine.gradients import Gradients, Number, PackedGradients
from spartito.engine.optimizers import (
    OptimizerLike,
    has_sparse_gradients,
    optimizer_parameters,
    unwrap,
)
from spartito.engine.unmade import told
from spartito.errors import UserError
from spartito.log import warn
from spartito.mesh import apply
from spartito.mesh.axes import PIPELINE, Mesh
from spartito.mesh.collectives import Axis, summing_at_end
from spartito.mesh.describe import Description, describe, describe_tensors
from spartito.mesh.layout import DEFAULT, Layout, read_rules
from spartito.mesh.shown import inside, saving
from spartito.names import divisors
from spartito.steps.groups import DATA, MODEL, Connect, send
from spartito.steps.outer import Outer
from spartito.steps.pair import Pair
from spartito.steps.sharding import BLOCK, ShardingStep, check_shards
from spartito.steps.shards import COPIES, SHARDS, ShardedCoordination

AXIS = "axis:"
"""Before the name of an axis: the group of the tasks along it."""
LAYERS = "layers"
"""The tasks that compute the same layers of one data shard: all of `MODEL` but in a pipeline."""


class MeshStep(ShardingStep):
    """What a task does of each step under `MeshStrategy`."""

    name = "mesh"
    _takes_shards = True

    def __init__(
        self,
        mesh: Mapping[str, int] | None = None,
        layout: Any = DEFAULT,
        names: Mapping[str, Sequence[str | None]] | None = None,
        strict: bool = False,
        *,
        model: int | None = None,
        zero: int = 0,
        block_bytes: int = BLOCK,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        sync_batchnorm: bool | None = None,
        timeout: float | None = None,
        communication: str = "auto",
        flush_denormals: bool = True,
        outer: Outer | None = None,
    ) -> None:
        if mesh is not None and model is not None:
            raise UserError(
                f"mesh={dict(mesh)} and model={model}", "model=2 is short for a mesh: give one."
            )
        if communication == "ddp":
            raise UserError(
                "communication='ddp' on a mesh: DDP takes models that are whole",
                "Leave it out, or choose strategy 'mirrored'.",
            )
        self._asked = mesh, model, read_rules(layout)
        self._names, self._strict = dict(names or {}), strict
        if zero:
            check_shards(zero, block_bytes)
        super().__init__(
            zero,
            block_bytes,
            cluster=cluster,
            device=device,
            sync_batchnorm=sync_batchnorm,
            timeout=timeout,
            communication=communication,
            flush_denormals=flush_denormals,
            outer=outer,
        )
        self.coordination: MeshCoordination = MeshCoordination(
            self._called, self.job, self.cluster, self._pairs, self.groups, self._homes, zero < 3,
            self.outer,
        )  # fmt: skip

    def check(self, cluster: ClusterSpec) -> None:
        super().check(cluster)
        tasks = self.outer.inside(cluster).world_size
        self._layout_for(tasks)[0].check(tasks)

    def _layout_for(self, tasks: int) -> tuple[Mesh, Layout]:
        """The mesh of a job of so many tasks, and the rules on it."""
        given, model, rules = self._asked
        if self.is_evaluator:  # alone: it has the whole model
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

    @cached_property
    def mesh(self) -> Mesh:
        """The axes and their sizes."""
        return self._layout_for(self.tasks.world_size)[0]

    @cached_property
    def layout(self) -> Layout:
        """The rules on this mesh."""
        return self._layout_for(self.tasks.world_size)[1]

    @property
    def _own_shard(self) -> tuple[int, int]:
        axis = self.layout.batch_axis
        if axis is None:
            return 0, 1
        return self.mesh.coordinates(self.tasks.rank)[axis], self.mesh.axes[axis]

    @property
    def connect(self) -> Callable[..., Mapping[str, Collective]]:  # type: ignore[override]
        return self._sharing(partial(connect, self.mesh, self.layout.batch_axis))

    def _sharing(self, connect: Connect) -> Connect:
        """The data shards as those who have shards, where there are any."""
        zero = self._zero

        def connected(rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
            found = connect(rendezvous, cluster)
            shards = {SHARDS: found[DATA], COPIES: IdentityCollective()} if zero else {}
            return {**found, **shards}

        return connected

    @property
    def _owners(self) -> int:
        return self._own_shard[1] if self._zero else 1

    def prepare(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        deterministic: bool = False,
        seed: int = 0,
    ) -> tuple[nn.Module, Optimizer]:
        if self.cluster.world_size > 1 and has_sparse_gradients(unwrap(model)):
            raise UserError(
                f"sparse gradients under {self.name}",
                "Gradients of shards are dense tensors: build the Embedding with sparse=False.",
            )
        apply.check_same(unwrap(model), self.mesh.axes, self.mesh.coordinates(self.tasks.rank))
        apply.hide(unwrap(model))
        apply.plan(unwrap(model), self.layout, self._names, self._strict)
        watch_averages()
        return super().prepare(
            model,
            optimizer,
            accumulate=accumulate,
            clip_norm=clip_norm,
            precision=precision,
            deterministic=deterministic,
            seed=seed,
        )

    def _run_backward(self, value: Tensor, gradient: Tensor) -> None:
        with inside(), summing_at_end():
            super()._run_backward(value, gradient)

    def _end_together(self, stops: float, loss: Number) -> float:
        both = torch.tensor([stops, float(loss)], dtype=torch.float64)
        found = torch.stack(self._parts.all_gather(both))
        losses = found[:, 1].nan_to_num()
        gap, largest = (losses.max() - losses.min()).item(), losses.abs().max().item()
        if gap > ROUNDING * largest:
            raise UserError(
                f"the tasks of one model have different losses, up to {gap:.3g} apart",
                "A loss of parameters that is computed outside of forward(), as a penalty over "
                "net.parameters(), sees one task's shards: compute it in forward(), or use the "
                "optimizer's weight_decay.",
            )
        return found[:, 0].sum().item()

    def global_norm(self, pair: Pair) -> Tensor:
        if self._parts.world_size == 1:
            return super().global_norm(pair)
        found = list(pair.gradients.own_gradients())
        fractions = self.fractions(pair, [parameter for parameter, _ in found])
        of_fraction: dict[float, list[Tensor]] = {}
        for (_, grad), fraction in zip(found, fractions, strict=True):
            if fraction:
                of_fraction.setdefault(fraction, []).append(grad)
        total = torch.zeros(1, dtype=torch.float64)
        for fraction, grads in of_fraction.items():
            total += torch.nn.utils.get_total_norm(grads).double().square() * fraction
        return self._parts.all_reduce(pair.gradients.sum(total)).sqrt()[0]

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        specs, together = apply.specs_of(unwrap(pair.model)), self.groups[LAYERS].world_size
        cut = [specs.get(id(parameter)) for parameter in parameters]
        shards = [math.prod(self.mesh.axes[a] for a in how.axes) if how else 1 for how in cut]
        return [count / together for count in shards]

    @cached_property
    def _axes(self) -> dict[str, Axis]:
        batch = self.layout.batch_axis
        return {
            name: Axis(name, self.groups[AXIS + name], self._rows_from(name))
            for name in self.layout.axes
            if name != batch
        }

    def _rows_from(self, axis: str) -> float:
        """From how many bytes on a sum stays cut by rows."""
        return math.inf if PIPELINE in self.mesh.axes else self.layout.rows_from(axis)

    def describe(self, model: nn.Module, example: Any = None, loss: Any = None) -> Description:
        """What the layout does to a model, before any step and without the other tasks.

        Args:
            model: A whole one; it is not changed.
            example: An input, a tuple or a dict of inputs of one task, of which shapes matter
                alone; None tries some that the first layer could take.
            loss: A function of the output alone; None is the sum of all that is in it.

        Returns:
            What ``print`` shows: each tensor with its dims, where it lies and its bytes on a task,
            the collectives of one step by module, and warnings.

        Raises:
            UserError: For a layout that `prepare` would refuse.
        """
        own = unwrap(model)
        planned = apply.plan(own, self.layout, self._names, self._strict)
        return describe(own, planned, self.layout, example, loss)

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        own = unwrap(model)
        compiled = [m for m in own.modules() if m._compiled_call_impl is not None]
        if (own is not model or compiled) and self.is_chief:
            warn("torch.compile is left out on a mesh: it cannot look into the exchange of shards")
        for module in compiled:
            module._compiled_call_impl = None
        self._cut_state(own, optimizer)
        if self._own_shard[1] > 1 and self.device.type != "cpu":
            return own, PackedGradients(optimizer, self._group)
        return super()._gradients(own, optimizer)

    def _cut_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Leave this task its part of the state that a fresh optimizer has (Adagrad)."""
        specs, axes = apply.specs_of(model), self._axes
        kind = type(optimizer)
        for parameter in optimizer_parameters(optimizer):
            how = specs.get(id(parameter))
            if how is None:
                continue
            if kind not in ELEMENTWISE and not getattr(kind, "elementwise", False):
                raise UserError(
                    f"{kind.__name__} may look at whole parameters, of which each task has a part",
                    "Choose Adam, SGD or another of torch's elementwise ones. One of your own that "
                    "updates each element by itself says so: class Mine: elementwise = True.",
                )
            shape = how.global_shape(parameter.shape, self.mesh.axes)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == shape:
                    optimizer.state[parameter][key] = apply.shard_of(value, how, axes)

    @property
    def _state_fraction(self) -> float:
        return self._own_shard[1] / (self.mesh.size * self._owners)

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        own = unwrap(model)
        known, tensors = apply.specs_of(own), [each for each in tensors if not each.is_meta]
        cut = [tensor for tensor in tensors if id(tensor) in known]
        rest = [tensor for tensor in tensors if id(tensor) not in known]
        with self.coordination.during("prepare"):
            send(self.groups.data, cut)  # by those that have the same shards
            send(self.groups.world, rest)
        if known:
            apply.show(own, known, self._axes)
        elif len(tensors) == len(list(own.parameters())) + len(list(own.buffers())):
            self._cut(own, Tensor.detach)
        if self._has_shards:
            self._settle(own)
        if (layers := self.groups[LAYERS]).world_size > 1:
            torch.set_rng_state(layers.broadcast(torch.get_rng_state()))

    def _lay_out(self, model: nn.Module) -> None:
        self._cut(model, partial(told, self.groups.world))

    def _cut(self, model: nn.Module, whole: Callable[[Tensor], Tensor]) -> None:
        """Leave this task its shards of what ``whole`` gives for each tensor."""
        planned = apply.plan(model, self.layout, self._names, self._strict)
        self._say(planned)
        if self.is_chief and self.groups[LAYERS].world_size > 1:
            self.coordination.layout = describe_tensors(model, planned, self.layout).figures()
        with self.coordination.during("prepare"):
            apply.cut(model, planned, self._axes, whole)

    def keep(self) -> Callable[[], None]:
        pair = self._pairs.only
        model = unwrap(pair.model)
        tensors = [*model.parameters(), *model.buffers()]
        kept = [tensor.detach().clone() for tensor in tensors]

        @torch.no_grad()
        def put_back() -> None:
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
            pair.gradients.compared()

        return put_back

    def _state(self, pair: Pair) -> dict[str, Any]:
        with saving():
            return super()._state(pair)

    def _load(self, saved: Saved) -> None:
        with saving():
            super()._load(saved)

    def _cuts(self, pair: Pair, section: str) -> dict[str, Cut]:
        model = unwrap(pair.model)
        specs, here = apply.specs_of(model), self.mesh.coordinates(self.tasks.rank)
        tensors = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        found: dict[str, Cut] = {}
        for name, tensor in tensors:
            if (how := specs.get(id(tensor))) is not None and not tensor.is_meta:
                shape = how.global_shape(tensor.shape, self.mesh.axes)
                found[name] = apply.SpecCut(shape, how, self.mesh.axes, here)
        for name, span in super()._cuts(pair, section).items():
            found[name] = NestedCut(found[name], span) if name in found else span
        return found

    def _say(self, planned: Mapping[str, apply.Placed]) -> None:
        """Tell what stays whole though a rule is about it."""
        uneven = [placed for placed in planned.values() if placed.uneven]
        if uneven and self.is_chief:
            warn(
                "%d tensors stay whole where they do not divide: %s",
                len(uneven),
                "; ".join(apply.does_not_divide(one, self.layout) for one in uneven[:3]),
            )
        is_whole = all(placed.spec.is_replicated for placed in planned.values())
        if is_whole and self.is_chief and self.groups[LAYERS].world_size > 1:
            warn("no tensor of the model is cut: all tasks of the mesh compute all of it")


class MeshCoordination(ShardedCoordination):
    """Tasks of one model have parameters in common, and must draw the same random numbers."""

    layout: Mapping[str, Any] | None = None
    """What `MeshStep.describe` found of the model that was prepared last."""

    def describe(self) -> dict[str, Any]:
        return super().describe() | ({"layout": self.layout} if self.layout else {})

    def compare(self, order: int = 0) -> None:
        super().compare(order)
        self.attempt(lambda: self._compare_parts(order))

    def _settle_buffers(self) -> str:
        super()._settle_buffers()
        for pair in self._pairs.all:
            model = unwrap(pair.model)
            own = shared_buffers(model, without=apply.specs_of(model))
            self._settle(self.groups[LAYERS], own, pair.randomness is not None)
        return ""

    def _compare_parts(self, order: int) -> str:
        specs = {key for pair in self._pairs.all for key in apply.specs_of(unwrap(pair.model))}
        common = [parameter for parameter in self._parameters() if id(parameter) not in specs]
        group = self.groups[LAYERS]
        self._compare_in(group, common, order)
        if group.world_size > 1:
            drawn = group.all_gather(torch.tensor([checksum([torch.get_rng_state()])]))
            if unlike := outliers([each.item() for each in drawn]):
                raise different(
                    group,
                    unlike,
                    "has drawn other random numbers than",
                    "Tasks of one model draw the same, as for dropout: use a generator of your own "
                    "where one task alone draws.",
                )
        return ""


def connect(
    mesh: Mesh, batch: str | None, rendezvous: Rendezvous, cluster: ClusterSpec
) -> Mapping[str, Collective]:
    """The groups of a task on a mesh: all, its data shards, its model, and each axis."""
    rank = cluster.rank
    here = mesh.coordinates(rank)
    beside = [
        r for r in range(mesh.size) if batch is None or mesh.coordinates(r)[batch] == here[batch]
    ]
    found = {WORLD: rendezvous.group()}
    found[DATA] = rendezvous.group(DATA, mesh.along(batch, rank) if batch else [rank])
    found[MODEL] = rendezvous.group(MODEL, beside)
    there = here.get(PIPELINE)
    layers = [r for r in beside if mesh.coordinates(r).get(PIPELINE) == there]
    wanted = {AXIS + axis: mesh.along(axis, rank) for axis in mesh.axes if axis != batch}
    made = {tuple(beside): found[MODEL]}
    for name, ranks in {LAYERS: layers, **wanted}.items():
        key = tuple(ranks)
        made[key] = found[name] = made.get(key) or rendezvous.group(name, ranks)
    return found
