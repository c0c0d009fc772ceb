"""What the steps of a training take, measured before the first one: for `spartito plan`.

``SPARTITO_PROFILE`` names the file. `fit` then trains for some seconds on the user's own data, at
two local batch sizes and with one thread and all of them, writes down what that took, and ends the
process. No callback is called, so nothing of the user's is written.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from msgspec import structs
from torch import Tensor, nn

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.reading.loader import Loader
from spartito.data.reading.placing import Placing
from spartito.engine.devices.precision import autocast
from spartito.engine.losses.loss import evaluate_loss, forward, in_dtype, weigh
from spartito.engine.updates.optimizers import optimizer_parameters, unwrap
from spartito.errors import UserError
from spartito.mesh import placing
from spartito.mesh.axes import Mesh
from spartito.mesh.collectives import summing_at_end
from spartito.mesh.describe import describe, first_of
from spartito.mesh.layout import DEFAULT, Layout
from spartito.names import ENV_CROWD, ENV_PROFILE
from spartito.notes import note
from spartito.pipeline.program import record
from spartito.pipeline.split import Part, parts_of, slowdowns
from spartito.report.lines import line_of
from spartito.steps.placements.computation import WholeModel
from spartito.storage.atomic import write_file_atomically
from spartito.system import anonymous_memory, file_memory, resident_memory
from spartito.system.capacity import available_cores, available_memory
from spartito.training.metrics.gathering import MetricSet
from spartito.training.trials.neighbours import Meeting, Neighbours

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

SECONDS = 6.0
"""Of all measurements together, where a step is short."""
ROUNDS = 5
"""Each setting is measured so often, in turns: what disturbs the machine disturbs all of them."""
LEAST = 2
"""Steps of a setting in a round, however long they take."""
WARM_UP = 3
DIVISIONS = 4
"""The second batch size is the first one divided by this, or by what it allows."""
AXES = (2, 4, 8)
"""Tasks among which tensors are cut, for the strategy mesh."""
MICROBATCHES = 8
"""In which a pipeline takes a batch."""
NEIGHBOURS = 7
"""Forks that train beside this process at most, ..."""
COPIES = 4
"""... each with its own parameters, gradients and optimizer's state."""
ALONG = 30
"""A model that is cut among some tasks has this part of the time, where its passes are short."""
UNCUT = "a pipeline cannot train the model"
SIZE = "size"
IQR = 1.349
"""Standard deviations between the quartiles of a normal distribution."""


def is_wanted() -> bool:
    """Whether this process is there to be measured."""
    return bool(os.environ.get(ENV_PROFILE))


def profile_and_end(trainer: Trainer, chain: Dataset, steps: int | None) -> NoReturn:
    """Measure, write the file that ``SPARTITO_PROFILE`` names, and end the process.

    Args:
        trainer: Whose `fit` begins.
        chain: What it would train on.
        steps: Of an epoch; None: as many as the data has.

    Raises:
        UserError: Several tasks are there, or parts of a pipeline.
        SystemExit: With 0, when the file is there.
    """
    if trainer.coordination.cluster.world_size > 1:
        raise UserError(f"{ENV_PROFILE} in a job of several tasks", "Profile one process.")
    if not isinstance(trainer.strategy.engine.computation, WholeModel):
        raise UserError(
            f"the script makes {trainer.strategy} itself, and a profile is of one device",
            "Take what the launcher decides, sp.strategy(), or leave the strategy out.",
        )
    began = time.monotonic()
    found = Profiler(trainer, chain).record()
    found["steps_per_epoch"] = steps or chain.steps_per_epoch
    found["seconds"] = time.monotonic() - began
    write_file_atomically(Path(os.environ[ENV_PROFILE]), line_of(found) + "\n")
    sys.exit(0)


@dataclass
class _Sample:
    """The steps of one setting, round by round: seconds by what they are spent on."""

    threads: int
    rounds: list[dict[str, list[float]]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Means of the parts in the quickest round: other programs are no part of the training.

        They are means, as a step that waits for its data now and then waits in the mean.
        """
        medians = [median(_wholes(each)) for each in self.rounds]
        best = dict(self.rounds[medians.index(min(medians))])
        batch = fmean(best.pop(SIZE))
        whole = _wholes(best)
        low, _, high = quantiles(whole, n=4)
        deviation = (high - low) / IQR / median(whole)
        slower = median(medians) / min(medians) - 1 if len(medians) > 1 else deviation
        return {
            "threads": self.threads,
            "batch": batch,
            **{name: fmean(values) for name, values in best.items()},
            "steps": sum(len(_wholes(each)) for each in self.rounds),
            "deviation": deviation,
            "between_rounds": slower,
        }


def _wholes(times: dict[str, list[float]]) -> list[float]:
    """What each step took as a whole."""
    parts = [values for name, values in times.items() if name != SIZE]
    return [sum(step) for step in zip(*parts, strict=True)]


class Profiler:
    """Runs steps as the training loop does, and looks at the parts of each.

    Args:
        trainer: In whose `fit` we are, of one process.
        chain: What it trains on.
        seconds: Of all steps that are measured, where one is short.
    """

    def __init__(self, trainer: Trainer, chain: Dataset, seconds: float | None = None) -> None:
        self._trainer, self._chain = trainer, chain
        self._seconds = SECONDS if seconds is None else seconds
        self._engine: Any = trainer.strategy.engine
        self._model = unwrap(trainer.model)
        self._metrics = MetricSet(trainer.metrics)
        self._spent: dict[str, float] = {}
        self._device = self._engine.team.device
        self._fork_saves = 0
        self._before, self._libraries = anonymous_memory(), 0
        self._grown: list[tuple[float, int]] = []

    def record(self) -> dict[str, Any]:
        """All that a plan wants to know."""
        trainer, chain, cores = self._trainer, self._chain, available_cores()
        trainer.modes.begin(trainer.model, False)
        size = chain.batch_size
        divisions = 1 if size is None else next(d for d in (DIVISIONS, 3, 2, 1) if size >= d)
        settings = [(threads, d) for threads in sorted({1, cores}) for d in sorted({1, divisions})]
        with torch.enable_grad(), self._engine.denormals, self._watched():
            samples = self._samples(settings)
            batch = next(self._batches(1))
            torch.set_num_threads(1)  # parts are compared with each other alone
            kept = self._activations(batch)
            pipeline, adding = self._pipeline(), self._adding()
            contention = self._contention(min(2, divisions))
            crowds = {str(n): crowd for n in _crowds() if (crowd := self._crowd(n))}
            mesh = {str(size): found for size in AXES if (found := self._along(size, batch))}
        learned = optimizer_parameters(trainer.optimizer)
        parameters, buffers = list(self._model.parameters()), list(self._model.buffers())
        state = [t for held in trainer.optimizer.state.values() for t in _tensors(held)]
        program = self._libraries + self._before - sum(map(_nbytes, [*parameters, *buffers]))
        names = [[name, list(p.shape), str(p.dtype)] for name, p in self._model.named_parameters()]
        return {
            "model": {
                "name": type(self._model).__name__,
                "fingerprint": zlib.crc32(repr(names).encode()),
                "parameters": sum(map(_nbytes, parameters)),
                "gradients": sum(map(_nbytes, learned)),
                "tensors": len(learned),
                "largest_tensor": max(map(_nbytes, learned), default=0),
                "buffers": sum(map(_nbytes, buffers)),
                "optimizer": sum(map(_nbytes, state)),
                "optimizer_name": type(trainer.optimizer).__name__,
            },
            "batch_size": size or batch.size,
            "examples": chain.examples,
            "accumulate": self._engine.team.pairs.only.accumulate,
            "tokens_per_example": _tokens(batch),
            "example_bytes": sum(map(_nbytes, _tensors(batch.data))) / max(1, batch.size),
            "device": self._device.type,
            "cores": cores,
            "base_memory": max(0, program),
            "fork_saves": self._fork_saves,
            "activations": kept,
            "grown": self._grown,
            "samples": [sample.record() for sample in samples],
            "contention": contention,
            "crowds": crowds,
            "adding": adding,
            **pipeline,
            "mesh": mesh,
        }

    def _batches(self, divisions: int) -> Generator[Batch]:
        """The first data shard of so many, as a replica reads it."""
        chain = self._chain
        loader = Loader(chain, (0, divisions), self._trainer.seed, Placing(self._device))
        move = loader._placing.move if loader._placing.moves else None
        for batch in loader.endless():
            yield batch if move is None else structs.replace(batch, data=move(batch.data))

    def _samples(self, settings: list[tuple[int, int]]) -> list[_Sample]:
        before = torch.get_num_threads()
        streams = {divisions: self._batches(divisions) for _, divisions in settings}
        samples = {(threads, d): _Sample(threads) for threads, d in settings}
        try:
            torch.set_num_threads(1)
            for divisions in sorted(streams, reverse=True):  # few examples first: memory grows
                self._warm_up(streams[divisions])
            self._libraries = max(0, resident_memory() - anonymous_memory())
            spent, limit = dict.fromkeys(samples, 0.0), self._seconds / len(samples)
            for number in range(ROUNDS):
                note("measures steps: round %d of %d", number + 1, ROUNDS)
                for (threads, divisions), sample in samples.items():
                    if spent[threads, divisions] > limit:  # its steps are long: it has had its time
                        continue
                    torch.set_num_threads(threads)
                    self._step(streams[divisions])
                    own: dict[str, list[float]] = {}
                    start = time.perf_counter()
                    until = start + limit / ROUNDS
                    while len(own.get(SIZE, ())) < LEAST or time.perf_counter() < until:
                        for name, value in self._step(streams[divisions]).items():
                            own.setdefault(name, []).append(value)
                    sample.rounds.append(own)
                    spent[threads, divisions] += time.perf_counter() - start
        finally:
            torch.set_num_threads(before)
            for stream in streams.values():
                stream.close()
        return list(samples.values())

    def _warm_up(self, stream: Iterator[Batch]) -> None:
        """Some first steps, and by how many bytes this process has grown with them."""
        began, size = time.perf_counter(), 0.0
        for _ in range(WARM_UP):
            size = max(size, self._step(stream)[SIZE])  # the last batch of the data may be short
            if time.perf_counter() - began > self._seconds / WARM_UP / 2:
                break
        self._grown.append((size, max(0, anonymous_memory() - self._before)))

    def _contention(self, divisions: int) -> float | None:
        """By what part a step is slower for each other core that computes one; None: not known."""
        count = min(available_cores() - 1, NEIGHBOURS, self._most_forks())
        if count < 1:
            return None

        def work(number: int) -> Callable[[], object]:
            stream = self._batches(divisions)
            return lambda: self._step(stream)

        def forks() -> Iterator[float]:
            with Neighbours(count, work) as neighbours:
                for _ in self._rounds():
                    neighbours.go_on()
                    beside = self._steps_for(stream)
                    neighbours.pause()
                    yield beside / self._steps_for(stream)
                used = [file_memory(pid) for pid in (os.getpid(), neighbours.pids[0])]
            self._fork_saves = max(0, used[0] - used[1])

        stream = self._batches(divisions)
        slower = self._beside(forks, stream)
        return None if slower is None else max(0.0, slower - 1) / count

    def _crowd(self, tasks: int) -> float | None:
        """How many times as long a step takes with so many tasks, which meet after each.

        More tasks than cores take turns as the system has it: who sleeps wakes late, and a core may
        have one task more than another. None where that is not known.
        """
        if tasks - 1 > min(NEIGHBOURS, self._most_forks()):
            return None
        divisions = min(tasks, self._chain.batch_size or 1)

        def work(number: int) -> Callable[[], object]:
            stream, first = self._batches(divisions), iter([True])

            def turn() -> None:
                self._step(stream)
                if not next(first, False):  # the others are not there yet
                    meeting.come(number)

            return turn

        def forks() -> Iterator[float]:
            with Neighbours(tasks - 1, work) as neighbours:
                for _ in self._rounds():
                    neighbours.go_on()
                    together = self._steps_for(stream, meeting.gather)
                    neighbours.pause()
                    yield together / self._steps_for(stream)

        stream = self._batches(divisions)
        with Meeting(tasks - 1) as meeting:
            return self._beside(forks, stream)

    def _most_forks(self) -> int:
        """So many may train beside this process."""
        if self._device.type != "cpu":
            return 0
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return int(available_memory() / 2 / max(1, sum(map(_nbytes, tensors)) * COPIES))

    def _beside(
        self, forks: Callable[[], Iterator[float]], stream: Generator[Batch]
    ) -> float | None:
        """The median of what is measured beside forks, of two in a row: a machine changes."""
        try:
            return median(forks())
        except (OSError, RuntimeError) as error:  # as where data cannot be read in a fork
            note("nothing computes beside this process: %s", error)
            return None
        finally:
            stream.close()

    def _rounds(self) -> Iterator[int]:
        """All rounds, or fewer where steps are long: half of the seconds are enough."""
        until = time.perf_counter() + self._seconds / 2
        for number in range(ROUNDS):
            if not number or time.perf_counter() < until:
                yield number

    def _steps_for(
        self, stream: Iterator[Batch], after: Callable[[], object] = lambda: None
    ) -> float:
        """The seconds of a step and of what follows, the mean of some."""
        self._step(stream)
        after()
        steps, began = 0, time.perf_counter()
        until = began + self._seconds / NEIGHBOURS / ROUNDS
        while steps < LEAST or time.perf_counter() < until:
            self._step(stream)
            after()
            steps += 1
        return (time.perf_counter() - began) / steps

    def _step(self, stream: Iterator[Batch]) -> dict[str, float]:
        """One step of the training loop: its examples, and the seconds of its parts."""
        trainer, clock = self._trainer, time.perf_counter
        self._spent = dict.fromkeys(("forward", "passes", "update"), 0.0)
        began = clock()
        batch = next(stream)
        read = clock()
        self._engine.enter(batch)
        result = trainer.strategy.step(batch, trainer.loss)
        if result.output is not None:
            self._metrics.update(result.output, batch)
        self._synchronize()
        whole, spent = clock() - read, self._spent
        return {
            SIZE: batch.size,
            "input": read - began,
            "forward": spent["forward"],
            "backward": max(0.0, spent["passes"] - spent["forward"]),
            "update": spent["update"],
            "other": max(0.0, whole - spent["passes"] - spent["update"]),
        }

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Have the parts of a step tell how long they took."""
        engine = self._engine
        kept = engine.computation.train, engine.parts.exchange.optimize
        began = [0.0]

        def begin(*_: Any) -> None:
            self._synchronize()
            began[0] = time.perf_counter()

        def end(*_: Any) -> None:
            self._synchronize()
            self._spent["forward"] += time.perf_counter() - began[0]

        hooks = [
            self._model.register_forward_pre_hook(begin),
            self._model.register_forward_hook(end),
        ]
        engine.computation.train = self._timed("passes", kept[0])
        engine.parts.exchange.optimize = self._timed("update", kept[1])
        try:
            yield
        finally:
            del engine.computation.train, engine.parts.exchange.optimize
            for hook in hooks:
                hook.remove()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self._synchronize()
                self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began

        return timed

    def _activations(self, batch: Batch) -> dict[str, float]:
        """Bytes that autograd keeps of a forward pass: each memory once, no parameter."""
        own = {p.untyped_storage().data_ptr() for p in self._model.parameters()}
        own |= {t.untyped_storage().data_ptr() for t in _tensors(batch.data)}
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if type(tensor) is Tensor or isinstance(tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._trainer.strategy.step(batch, self._trainer.loss)
        return {"bytes": sum(seen.values()), "batch": batch.size}

    def _pipeline(self) -> dict[str, Any]:
        """The parts in a row between which a pipeline may cut: seconds, bytes of each.

        One, where no pipeline can train the model, and why. And how many times as slow the passes
        of so many stages are together as those of the model.
        """
        loss, pair, size = self._trainer.loss, self._engine.team.pairs.only, self._chain.batch_size
        batch = next(self._batches(min(MICROBATCHES, size or 1)))
        data = in_dtype(batch, pair.dtype).data

        def call() -> Any:
            with autocast(pair.precision, self._device):
                return forward(self._model, data, loss is not None)

        sizes = {name: _nbytes(parameter) for name, parameter in self._model.named_parameters()}
        uncut, slower = "", dict[int, float]()
        try:
            program = record(self._model, call, self._device)
            found = parts_of(program, self._model, call)
            slower = slowdowns(program, found, self._model, call, self._seconds / ROUNDS)
        except Exception as error:  # whatever the user's model says
            said = str(error).splitlines() or [type(error).__name__]
            uncut = said[0] if isinstance(error, UserError) else f"{UNCUT}: {said[0]}"
            found = [Part("", 0, 1.0, 0, tuple(sizes))]
        follows = [*(part.entering for part in found[1:]), 0]
        parts = [
            {
                "name": part.path,
                "seconds": part.cost,
                "parameters": sum(sizes[name] for name in part.parameters),
                "output": output / max(1, batch.size),
            }
            for part, output in zip(found, follows, strict=True)
        ]
        return {"parts": parts, "uncut": uncut, "slowdowns": slower}

    def _adding(self) -> float:
        """The seconds in which gradients are added to those that wait."""
        found = optimizer_parameters(self._trainer.optimizer)
        waiting, new = ([torch.zeros_like(p) for p in found] for _ in range(2))
        times = []
        for _ in range(ROUNDS):
            self._synchronize()
            began = time.perf_counter()
            torch._foreach_add_(waiting, new)
            self._synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    def _along(self, size: int, batch: Batch) -> dict[str, float] | None:
        """What ``mesh(model=size)`` does to the model: bytes of a task, collectives of a step.

        None where it cuts nothing, or the model cannot be looked at without values.
        """
        try:
            mesh = Mesh({"data": 1, "model": size})
            layout = Layout(tuple(rule for rule in DEFAULT if rule[1] in mesh.axes), mesh.axes)
            planned = placing.plan(self._model, layout, {}, False)
            found = describe(self._model, planned, layout, batch.x)
        except (UserError, RuntimeError, TypeError, ValueError):
            return None
        if found.nbytes == found.whole_nbytes or not found.costs:
            return None
        parameters = found.nbytes / found.whole_nbytes
        passes = self._passes_along(planned, layout, batch)
        return {
            "parameters": parameters,
            "calls": sum(cost.calls for cost in found.costs),
            "bytes": sum(cost.nbytes for cost in found.costs) / max(1, batch.size),
            "passes": parameters if passes is None else passes,
        }

    def _passes_along(
        self, planned: Mapping[str, placing.Placed], layout: Layout, batch: Batch
    ) -> float | None:
        """What a forward and backward pass of the first task takes, as a part of a whole model's.

        None where that cannot be tried here.
        """
        nbytes = sum(map(_nbytes, [*self._model.parameters(), *self._model.buffers()]))
        if nbytes * COPIES > available_memory() / 2:
            return None
        shares: list[float] = []
        try:
            whole = copy.deepcopy(self._model).train()
            cut = first_of(self._model, planned, layout)
            until = time.perf_counter() + self._seconds / ALONG
            while len(shares) <= LEAST or time.perf_counter() < until:
                seconds = [self._pass(model, batch) for model in (cut, whole)]
                shares.append(seconds[0] / seconds[1])
        except Exception as error:  # whatever the user's model says
            note("the time of a cut model is not measured: %s", error)
            return None
        return median(shares[1:])  # the first ones take new memory

    def _pass(self, model: nn.Module, batch: Batch) -> float:
        """The seconds of a forward and a backward pass."""
        loss, pair = self._trainer.loss, self._engine.team.pairs.only
        batch = in_dtype(batch, pair.dtype)
        for parameter in model.parameters():
            parameter.grad = None
        self._synchronize()
        began = time.perf_counter()
        with autocast(pair.precision, self._device), summing_at_end():
            output = forward(model, batch.data, loss is not None)
            found = weigh(evaluate_loss(loss, output, batch), batch)
            found.value.backward()
        self._synchronize()
        return time.perf_counter() - began


def _crowds() -> list[int]:
    """Of how many tasks a step is measured, too."""
    return [int(count) for count in os.environ.get(ENV_CROWD, "").split(",") if count]


def _nbytes(tensor: Tensor) -> int:
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def _tokens(batch: Batch) -> int | None:
    """Numbers of an example, where they are whole: tokens of a text."""
    found = _tensors(batch.x)
    if len(found) != 1 or found[0].is_floating_point() or found[0].dim() != 2:
        return None
    return found[0].shape[1]
