"""Asynchronous training: workers compute on their own, parameter servers hold the values."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from spartito.cluster.spec import ClusterSpec, Task, split_address
from spartito.collectives.collective import Traffic
from spartito.collectives.meeting import time_limit
from spartito.collectives.shared_memory import host_key, supported
from spartito.collectives.sockets import listen
from spartito.data.batch import Batch
from spartito.data.chain import Chain
from spartito.data.dataset import as_dataset
from spartito.data.loader import Loader
from spartito.engine.context import enter
from spartito.engine.gradients import Gradients, LocalGradients
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike, named_state, optimizer_parameters, plain
from spartito.errors import UserError
from spartito.log import note
from spartito.names import ENV_SNAPSHOT_DIR, nearest
from spartito.ps.chief import JOB, Chief, OnLost
from spartito.ps.client import Address, Control, Link, Servers
from spartito.ps.codec import check_wire_dtype
from spartito.ps.coordinator import Coordinator
from spartito.ps.layout import Layout, Span, cut, table
from spartito.ps.lease import Plan
from spartito.ps.link import LocalLink, WorkerLink
from spartito.ps.log import PushLog
from spartito.ps.messages import Hello, Push, Values
from spartito.ps.reception import Reception
from spartito.ps.server import RELEASE, Server
from spartito.ps.shard import Shard, is_elementwise, merge_state, settings, slots, split_state
from spartito.ps.store import ON_STALE, Rules, Store
from spartito.ps.vector import Copies, Vector, allocate, flat
from spartito.ps.work import WorkSource
from spartito.ps.worker import EXPIRED, RESTARTED, STALE, Exchange
from spartito.strategies.base import Distributed, StepResult
from spartito.strategies.leases import Leased, Place
from spartito.strategies.record import write_record
from spartito.strategies.replica import Pair, ReplicaStrategy
from spartito.strategies.sharing import Placed

T = TypeVar("T")


class ParameterServerStrategy(ReplicaStrategy):
    """Workers push gradients to parameter servers and pull values, each at its own pace.

    The batch size is global: one push is a worker's share of it. ``max_staleness`` None lets
    nobody wait for anybody; s >= 1 grants a pull only while no push can get staler than s
    updates; 0 averages one push per worker, which equals `MirroredStrategy`. ``on_stale`` says
    what becomes of a push beyond the bound: "wait" lets it not happen, "reject" has it computed
    again, "compensate" applies it with a learning rate that shrinks with its staleness.
    ``aggregate`` pushes make one update. Tensors are cut over the servers where each part keeps
    ``min_shard_bytes``. ``wire_dtype`` "bf16" halves what goes over a network.

    ``lease_seconds``: a worker that is silent so long is given up, and its work goes to others.
    ``snapshot_seconds``: how often a server writes what it goes on from when it is started
    again, into ``snapshot_dir`` (``SPARTITO_SNAPSHOT_DIR``). After more than ``nan_limit``
    pushes that were not finite, which are dropped, training ends. ``push_log``: a directory
    where every server records all its updates. ``shared_memory`` False sends everything by
    sockets, on one machine too.
    """

    name = "parameter_server"

    def __init__(
        self,
        *,
        cluster: ClusterSpec | None = None,
        max_staleness: int | None = None,
        on_stale: str = "wait",
        aggregate: int = 1,
        min_shard_bytes: int = 256 << 10,
        wire_dtype: str | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        lease_seconds: float = 10.0,
        snapshot_seconds: float = 10.0,
        snapshot_dir: str | None = None,
        nan_limit: int = 100,
        push_log: str | None = None,
        shared_memory: bool = True,
    ) -> None:
        _check_options(max_staleness, on_stale, aggregate, min_shard_bytes)
        super().__init__(cluster, device, False)
        if self.task.type == "ps":
            self.device = torch.device("cpu")
        self._max_staleness, self._on_stale, self._aggregate = max_staleness, on_stale, aggregate
        self._min_shard_bytes, self._wire_dtype = min_shard_bytes, check_wire_dtype(wire_dtype)
        self._timeout = time_limit() if timeout is None else timeout
        self._lease_seconds, self._snapshot_seconds = lease_seconds, snapshot_seconds
        self._snapshot_dir, self._nan_limit = snapshot_dir, nan_limit
        self._push_log, self._shared_memory = push_log, shared_memory
        self._workers = workers_of(self.cluster)
        self._rules = Rules(len(self._workers), max_staleness, on_stale, aggregate)
        self._vector: Vector | None = None
        self._spans: tuple[Span, ...] = ()
        self._exchange: Exchange | None = None
        self.chief: Chief | None = None
        self.work: WorkSource | None = None
        self.place: Place | None = None
        self._streams = self._leads = 0
        self._stepped = True  # by `step`, not by the parts of a custom loop
        self._batches: list[Batch] = []  # of the next push, or of the last one that was sent
        self._loss: LossFunction | None = None
        self._sent: Push | None = None
        self._told: list[dict[str, Any]] | None = None
        self._rates = b""
        self._seen = Values(0, 0, 0, 0)
        self._stopped = False
        atexit.register(self.close)

    @property
    def num_replicas_in_sync(self) -> int:
        """One: no worker waits for another to make an update."""
        return 1

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self._exchange is None else self._exchange.traffic

    def describe(self) -> dict[str, Any]:
        """Which server holds what: rows of server, tensor, which part of it, size."""
        if self._vector is None:
            return {}
        names = [f"ps {number}" for number in range(len(self._spans))]
        return {"servers": table(self._vector.layout, self._spans, names)}

    @property
    def leads(self) -> bool:
        """Only the chief evaluates and has callbacks."""
        return self.is_chief

    def check(self, cluster: ClusterSpec) -> None:
        if not cluster.addresses.get("ps") and cluster.task.type != "evaluator":
            raise UserError(
                f"parameter_server in a cluster without a ps ({cluster.source})",
                "Add one with --ps 1 or in TF_CONFIG, or choose mirrored.",
            )

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
        """As `Strategy.prepare`; a ps serves here until the job ends, and then exits with 0."""
        if self._pairs:
            raise UserError(
                "a second model under parameter_server",
                "It serves one model with one optimizer; a synchronous strategy takes several.",
            )
        if deterministic and not self._rules.together:
            raise UserError(
                f"deterministic training with max_staleness={self._max_staleness}",
                "Workers that do not wait for each other never run twice alike: "
                "use max_staleness=0, or a synchronous strategy.",
            )
        if deterministic and _has_batchnorm(model):
            raise UserError(
                "deterministic training of a model with BatchNorm under parameter_server",
                "Its replicas do not meet in the forward pass: leave deterministic out, "
                "or choose mirrored.",
            )
        means = self._rules.together or self._aggregate > 1
        if clip_norm is not None and means:
            if len(self.cluster.addresses.get("ps", ())) > 1:
                raise UserError(
                    f"clip_norm={clip_norm} of a mean over workers, on several servers",
                    "No server has the whole of it: use one ps, or neither max_staleness=0 "
                    "nor aggregate.",
                )
            self._rules = Rules(
                self._rules.workers, self._max_staleness, self._on_stale, self._aggregate, clip_norm
            )
        found = super().prepare(
            model,
            optimizer,
            accumulate=accumulate,
            clip_norm=None if means else clip_norm,
            precision=precision,
            deterministic=deterministic,
            seed=seed,
        )
        # Its steps are made on the servers: torch need not warn of schedules before the first.
        found[1]._opt_called = True  # type: ignore[attr-defined]
        self._join(self._pairs[0])
        return found

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        chain = as_dataset(dataset)
        order = self._seed if seed is None else seed
        if training and (self.work is not None or self.chief is not None):
            return Leased(self, chain, self._rules.workers, order)
        return Placed(Loader(chain, 0, 1, order), self.device, self.enter, self._collective)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        self.agree_to_stop(stop)
        if not batch.global_size:  # a tick of a chief that computes nothing
            return self._progress(None, 0.0, 0.0)
        self._ready(batch)
        self._stepped, self._loss = True, loss
        return super().step(batch, loss)

    def flush(self) -> StepResult | None:
        return None  # the last piece of a lease has everything pushed

    def evaluate(self, batch: Batch, loss: LossFunction | None) -> tuple[float, float, Any]:
        self._arrive()
        return super().evaluate(batch, loss)

    def backward(self, losses: Any, batch: Batch) -> None:
        self._ready(batch)
        self._stepped = False
        super().backward(losses, batch)
        self._pairs[0].passes += 1

    def update(self, optimizer: Optimizer) -> None:
        pair = self._pairs[0]
        if optimizer is not pair.optimizer:
            return super().update(optimizer)
        if self._is_due(pair):
            self._update(pair, None, 0, False)
        return None

    def reduce(self, op: str, value: Tensor) -> Tensor:
        """``value`` itself (the mean of its elements): workers do not meet."""
        if op not in ("sum", "mean", "max", "min"):
            raise UserError(f"reduce({op!r})", nearest(op, ("sum", "mean", "max", "min")))
        return value.detach().double().mean().to(value.dtype) if op == "mean" else value.detach()

    def gather(self, rows: Tensor) -> Tensor:
        """``rows`` themselves: workers do not meet."""
        return rows

    def synchronize(self) -> None:
        """The newest values into the model."""
        self._arrive()
        if self._exchange is not None:
            self._exchange.look()

    def lead(self, work: Callable[[], T]) -> T:
        if self.chief is not None:
            found = work()
            self.chief.publish(found)
            return found
        if self.work is None:  # an evaluator
            return work()
        self._leads += 1
        answer: T = json.loads(self.work.published(JOB + self._leads))
        return answer

    def agree_to_stop(self, asked: bool) -> bool:
        if asked and self.chief is not None and not self._stopped:
            self.chief.stop()
        self._stopped = self._stopped or asked
        return self._stopped

    def share_rates(self, optimizer: Optimizer) -> None:
        if self.chief is not None:
            self.chief.share_rates(settings(optimizer))

    def state(self) -> dict[str, Any]:
        pair = self._only_pair()
        if self.chief is not None:
            self._arrive()
            self._fetch(self.chief, pair)
        model = plain(pair.model)
        found = {"model": dict(model.state_dict()), "optimizer": named_state(model, pair.optimizer)}
        pair.optimizer.state.clear()  # it lives on the servers
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        pair = self._only_pair()
        if self.chief is not None:
            self._give(self.chief, pair)
        pair.optimizer.state.clear()

    def close(self) -> None:
        """Leave the job; the chief ends it once the workers have left."""
        enter(None)
        atexit.unregister(self.close)
        exchange, work, chief = self._exchange, self.work, self.chief
        self._exchange = self.work = self.chief = None
        if exchange is not None:
            exchange.servers.close()
        if work is not None:
            work.close()
        if chief is not None:
            chief.close()

    # What the leases ask for

    def plan(self, chain: Chain, count: int, steps: int | None) -> Plan:
        """How a stream is divided into pieces."""
        return Plan(
            slices=self._rules.workers,
            steps_per_pass=chain.steps_per_pass,
            passes_per_epoch=chain.repeats,
            epoch_steps=steps,
            epochs=count,
            gated=self._rules.max_staleness is not None,
            together=self._rules.together,
            multiple=self._pairs[0].accumulate,
        )

    def next_stream(self) -> int:
        """The number of a new stream, equal on all tasks."""
        self._streams += 1
        self._stopped = False
        return self._streams

    def settle(self) -> None:
        """Have everything pushed, and answered."""
        pair = self._pairs[0]
        if pair.passes:
            self._update(pair, None, 0, False)
        self._arrive()

    def leave(self) -> None:
        """What was not pushed is given up."""
        self._arrive()
        self._pairs[0].gradients.clear()
        self._pairs[0].passes = 0
        self.rest()

    def rest(self) -> None:
        """There is nothing to compute for now."""
        if self._exchange is not None:
            self._exchange.rest()

    def heed(self, rates: bytes) -> None:
        """Take over what the chief decided about learning rates."""
        if rates != self._rates:
            self._rates = rates
            groups = self._pairs[0].optimizer.param_groups
            for group, rate in zip(groups, json.loads(rates), strict=True):
                group["lr"] = rate

    def collect(self) -> None:
        """The newest values into the model."""
        self.synchronize()

    # Inside: one step

    def _ready(self, batch: Batch) -> None:
        """Have values to compute with before the gradients of ``batch``."""
        self._arrive()
        exchange = self._in_job()
        exchange.admit()
        if not self._pairs[0].passes:
            self._batches = []
        self._batches.append(batch)

    def _is_due(self, pair: Pair) -> bool:
        return super()._is_due(pair) or (self.place is not None and self.place.is_last)

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        """Push the gradients; the answer is awaited when the values are needed."""
        place = self.place
        if place is None:
            raise UserError(
                "an update outside of the batches that the chief gave out",
                "Iterate over strategy.distribute(data), and update once for each batch.",
            )
        lease, options = place.lease, settings(pair.optimizer)
        number = (place.first - lease.start) // pair.accumulate
        self._sent = Push(
            keys=place.keys,
            pulled=0,
            weight=0.0,
            examples=sum(batch.size for batch in self._batches),
            absent=[],
            settings=None if options == self._told else options,
            group=lease.group,
            index=number,
            parties=sum(size > number * pair.accumulate for size in lease.sizes),
        )
        self._told = options
        weight, loss = self._push(pair, place)
        place.first = place.step + 1
        if self._rules.together:  # nobody goes on before all have come
            self._arrive()
        return self._progress(output, loss, weight)

    def _push(self, pair: Pair, place: Place) -> tuple[float, float]:
        """Send the gradients that wait; answers their weight and loss, 0 if they are no numbers."""
        assert self._sent is not None
        exchange = self._in_job()
        weight, loss = pair.gradients.reduce()
        if weight and pair.clip_norm is not None:
            pair.gradients.clip(pair.clip_norm)
        absent, finite = exchange.servers.fill()
        if not finite:
            place.bad += 1
            place.detail = f"pass {place.lease.pass_}, step {place.step}, slice {place.lease.slice}"
            weight = loss = 0.0
        nothing = not weight and not self._sent.group
        exchange.push(replace(self._sent, weight=weight, dropped=not finite or nothing), absent)
        pair.gradients.clear()
        pair.passes = 0
        return weight, loss

    def _arrive(self) -> None:
        """Have the last push answered, and computed again if it was too stale."""
        if self._exchange is None:
            return
        status = self._exchange.arrive()
        while status == STALE and self._stepped:
            assert self.place is not None
            self._exchange.admit()
            for batch in self._batches:
                self._compute(self._pairs[0], batch, self._loss)
            self._push(self._pairs[0], self.place)
            status = self._exchange.arrive()
        if status in (STALE, EXPIRED, RESTARTED) and self.place is not None:
            self.place.abandoned = True
            self._told = None

    def _progress(self, output: Any, loss: float, weight: float) -> StepResult:
        """How far the whole training has come since the last result."""
        far, seen, slices = self._far(), self._seen, self._rules.workers
        self._seen = far
        return StepResult(
            output,
            examples=max(0, far.examples - seen.examples),
            batches=max(0, far.pieces // slices - seen.pieces // slices),
            updates=max(0, far.pushes // slices - seen.pushes // slices),
            loss=loss,
            weight=weight,
            stop=self._stopped,
        )

    def _far(self) -> Values:
        if self.work is None and self.chief is not None:
            return self.chief.far()
        return self._in_job().servers.far

    def _in_job(self) -> Exchange:
        if self._exchange is None:
            raise UserError(
                f"training on {self.task}, which has left the job or was never in it",
                "Train before strategy.close(), on a chief or worker.",
            )
        return self._exchange

    # Inside: the job

    def _share(self, model: nn.Module) -> None:
        """The chief's values come by the servers."""

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        return model, LocalGradients(optimizer_parameters(optimizer))

    def _join(self, pair: Pair) -> None:
        """Take our place in the job: a ps serves, all others come back with links."""
        if self.task.type == "evaluator":
            return
        vector = self._vector = Vector(plain(pair.model), pair.optimizer)
        addresses = self.cluster.addresses["ps"]
        whole = not is_elementwise(pair.optimizer)
        self._spans = cut(vector.layout, len(addresses), self._min_shard_bytes, whole)
        if self.task.type == "ps":
            self._serve(vector, pair.optimizer)
            sys.exit(0)
        index = self._workers.index(self.task) if self.task in self._workers else -1
        if self.is_chief:
            self.chief = self._begin(vector, pair, index)
            job = self.chief.job
            if index >= 0:
                self.work = LocalLink(self.chief.coordinator, index)
        else:
            host, port = split_address(self.cluster.rendezvous or "")
            name = self.cluster.name_of(0)
            self.work = WorkerLink(host, port, name, index, timeout=self._timeout)
            job = self.work.published(JOB).decode()
        links = [self._link(number, job, index, False) for number in range(len(addresses))]
        self._exchange = Exchange(Servers(links, vector, self._rules.waits), self._rules.waits)

    def _begin(self, vector: Vector, pair: Pair, index: int) -> Chief:
        """Open the job: let workers come, and give the servers our values."""
        host, port = split_address(self.cluster.rendezvous or "")
        listener = listen(host, port, str(self.task), anywhere=False)
        job = secrets.token_hex(8)

        def coordinator(on_lost: OnLost) -> Coordinator:
            return Coordinator(
                [str(task) for task in self._workers],
                lease_seconds=self._lease_seconds,
                timeout=self._timeout,
                on_lost=on_lost,
                expect_all=self._rules.together,
                bad_limit=self._nan_limit,
            )

        links = [self._link(number, job, index, True) for number in range(len(self._spans))]
        chief = Chief(coordinator, Control(links), job, self._rules.workers)
        self._give(chief, pair)
        chief.begin()
        Reception(chief.coordinator, listener)
        for line in shares(vector.layout, self._spans, [link.address.name for link in links]):
            note("%s", line)
        return chief

    def _link(self, number: int, job: str, index: int, control: bool) -> Link:
        vector = self._in_vector()
        address = Address.of(number, self.cluster.addresses["ps"][number])
        shares = self._shared_memory and supported() and not control
        hello = Hello(
            task=str(self.task),
            worker=index,
            chief=control,
            job=job,
            digest=vector.layout.digest,
            release=RELEASE,
            rules=str(self._rules),
            host=host_key() if shares else "",
        )
        span = self._spans[number]
        return Link(address, hello, span, vector, self._wire_dtype, self._timeout)

    def _give(self, chief: Chief, pair: Pair) -> None:
        """Our values and the state of our optimizer to the servers."""
        vector = self._in_vector()
        by_entry = [dict(pair.optimizer.state.get(tensor, {})) for tensor in vector.tensors]
        whole = not is_elementwise(pair.optimizer)
        values, states = [], []
        for span in self._spans:
            memory = allocate(span)
            Copies(vector, span, memory).store()
            values.append(memory)
            states.append(merge_state(slots(vector.layout, span, whole), by_entry))
        chief.control.load(chief.job, values, states, settings(pair.optimizer))

    @torch.no_grad()
    def _fetch(self, chief: Chief, pair: Pair) -> None:
        """The servers' values into the model, and their optimizers' state into ours."""
        vector = self._in_vector()
        whole = not is_elementwise(pair.optimizer)
        for span, (values, state) in zip(self._spans, chief.control.states(), strict=True):
            Copies(vector, span, values).load()
            for part, key, value in split_state(slots(vector.layout, span, whole), state):
                own = pair.optimizer.state[vector.tensors[part.entry]]
                if not value.dim():
                    own[key] = value
                    continue
                if key not in own:
                    like = vector.tensors[part.entry].detach()
                    own[key] = torch.zeros_like(like, dtype=value.dtype)
                flat(own[key])[part.begin : part.end] = value

    def _serve(self, vector: Vector, optimizer: Optimizer) -> None:
        """Be a parameter server until the job ends."""
        number = self.task.index
        address = self.cluster.addresses["ps"][number]
        host, port = split_address(address)
        folder = self._snapshot_dir or os.environ.get(ENV_SNAPSHOT_DIR) or _private_folder()
        log = PushLog(Path(self._push_log) / f"ps-{number}.log") if self._push_log else None
        shard = Shard(vector.layout, self._spans[number], optimizer, vector.tensors)
        server = Server(
            Store(shard, self._rules, gates=number == 0, log=log),
            listen(host, port, str(self.task), anywhere=False),
            name=f"{self.task} ({address})",
            chief=self.cluster.name_of(0),
            wire_dtype=self._wire_dtype,
            timeout=self._timeout,
            snapshots=Path(folder) / f"ps-{number}-{port}.safetensors",
            seconds=self._snapshot_seconds,
            shares=self._shared_memory,
        )
        server.serve()
        if self.record_to is not None:
            write_record(self.record_to, self.task, server.record())

    def _in_vector(self) -> Vector:
        assert self._vector is not None  # `_join` made it
        return self._vector


def workers_of(cluster: ClusterSpec) -> list[Task]:
    """The tasks that compute: the workers, or a chief that is alone."""
    workers = [Task("worker", index) for index in range(len(cluster.addresses.get("worker", ())))]
    return workers or list(cluster.replica_tasks)


def shares(layout: Layout, spans: Sequence[Span], names: Sequence[str]) -> list[str]:
    """A line for each server: how much it holds, and of which tensors."""
    rows = table(layout, spans, names)
    lines = []
    for span, name in zip(spans, names, strict=True):
        held = [tensor if which == "all" else f"{tensor} ({which})"
                for server, tensor, which, _ in rows if server == name]  # fmt: skip
        more = f" and {len(held) - 4} more" if len(held) > 5 else ""
        shown = held if len(held) <= 5 else held[:4]
        lines.append(f"{name} holds {span.size / 1e6:.2f} MB: {', '.join(shown)}{more}")
    return lines


def _check_options(
    max_staleness: int | None, on_stale: str, aggregate: int, min_shard_bytes: int
) -> None:
    if max_staleness is not None and (
        isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0
    ):
        raise UserError(
            f"max_staleness={max_staleness!r}",
            "0 averages all workers' pushes, n bounds the staleness, None lets nobody wait.",
        )
    if on_stale not in ON_STALE:
        raise UserError(f"on_stale={on_stale!r}", nearest(on_stale, ON_STALE))
    if aggregate < 1:
        raise UserError(f"aggregate={aggregate}", "At least one push makes an update.")
    if aggregate > 1 and max_staleness == 0:
        raise UserError(
            f"aggregate={aggregate} with max_staleness=0",
            "That averages one push of every worker already: leave aggregate out.",
        )
    if min_shard_bytes < 1:
        raise UserError(f"min_shard_bytes={min_shard_bytes}", "A part has at least one byte.")


def _has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _private_folder() -> str:
    """Where a server's snapshots lie when nobody says it: found again by this user alone."""
    return str(Path(tempfile.gettempdir()) / f"spartito-{os.getuid()}")
