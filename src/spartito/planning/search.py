"""All strategies that a job could have, by what a step takes; and why not the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spartito.declared import Declared, parse, parse_all
from spartito.errors import UserError
from spartito.launch.lines.line import MOST, Link
from spartito.names import nearest, size
from spartito.planning.costs import local_sgd, mesh, pipeline, replicas, servers, sharded
from spartito.planning.costs.compute import turns
from spartito.planning.costs.failures import Loss, lost
from spartito.planning.costs.parts import OVERHEAD, Cost, Costs, LosesParts, Situation
from spartito.registry import names_anywhere, strategy_info

ALL = "all"
COSTS: Mapping[str, Costs] = {
    "one_device": replicas,
    "mirrored": replicas,
    "multi_worker_mirrored": replicas,
    "central_storage": replicas,
    "mesh": mesh,
    "sharded": sharded,
    "pipeline": pipeline,
    "local_sgd": local_sgd,
    "parameter_server": servers,
}
"""Who knows what a strategy costs."""
GOALS = ("epochs", "steps", "examples", "tokens")
LEAST_WIDTH = 0.05
"""The interval is as wide as this at least: closed forms are no better."""


@dataclass(frozen=True, slots=True)
class Goal:
    """How much is to be trained: a number of `GOALS`."""

    name: str
    value: float

    @classmethod
    def read(cls, text: str) -> Goal:
        """The goal that ``--goal`` says.

        Args:
            text: As ``epochs=5`` or ``tokens=1e9``.

        Raises:
            UserError: It is another figure, which no profile knows, or no number.
        """
        name, _, number = text.partition("=")
        if name not in GOALS:
            raise UserError(
                f"--goal {text!r}: a plan knows how fast examples pass, and not what they teach",
                f"Give {', '.join(GOALS)}. How soon a figure is reached, spartito compare tells.",
            )
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--goal {text!r} has no number above 0", f"As {name}=1000.")
        return cls(name, value)

    def examples(self, situation: Situation) -> float:
        """How many examples that is.

        Args:
            situation: What is planned.

        Raises:
            UserError: The profile does not know that.
        """
        profile = situation.profile
        if self.name == "steps":
            return self.value * situation.batch
        if self.name == "tokens":
            if profile.tokens_per_example is None:
                raise UserError(
                    f"--goal tokens: the examples of {profile.target} are no tokens",
                    "Give examples or epochs.",
                )
            return self.value / profile.tokens_per_example
        if self.name == "epochs":
            if profile.steps_per_epoch is None:
                raise UserError(
                    f"--goal epochs: the data of {profile.target} has no known length",
                    "Give examples or steps.",
                )
            return self.value * profile.steps_per_epoch * profile.batch_size
        return self.value


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy that the job could have.

    Attributes:
        strategy: With its options.
        situation: For which it was predicted.
        cost: What a step takes.
        width: By what part the prediction may be off, by the variation that was measured.
        loss: What failures cost.
        limit: Bytes that a task may have.
    """

    strategy: Declared
    situation: Situation
    cost: Cost
    width: float
    loss: Loss
    limit: float = math.inf

    @property
    def rate(self) -> float:
        """Examples a second, failures counted."""
        return self.cost.rate * (1 - self.loss.fraction)

    def hours(self, examples: float) -> float:
        """How long so many examples take; infinite where failures leave no time."""
        return examples / self.rate / 3600 if self.rate else math.inf


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that the job cannot have, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan: what can be, the fastest first, and what cannot."""

    situation: Situation
    limit: float
    choices: Sequence[Choice]
    refusals: Sequence[Refusal]


def search(
    situation: Situation, strategies: str = ALL, limit: float | None = None, fail: float = 0.0
) -> Outcome:
    """Predict all strategies, or some.

    Args:
        situation: What is planned.
        strategies: "all", or those that ``--strategies`` names.
        limit: Bytes that a task may have; None: what its machine has for it.
        fail: Failures of one machine in a second.

    Returns:
        The choices by their speed, and the refusals with their reasons.

    Raises:
        UserError: A strategy that the user named cannot be at all, or none fits.
    """
    if situation.batch < 1:
        raise UserError(f"--batch-size {situation.batch} is less than 1")
    bound = situation.cluster.memory if limit is None else limit
    choices: list[Choice] = []
    refusals: list[Refusal] = []
    smallest: Choice | None = None
    for strategy in _wanted(strategies, situation):
        try:
            choice = predict(strategy, situation, fail)
        except UserError as error:
            if strategies != ALL:
                raise
            refusals.append(Refusal(str(strategy), str(error).split("\n")[0]))
            continue
        if smallest is None or choice.cost.bytes < smallest.cost.bytes:
            smallest = choice
        choice = replace(choice, limit=choice.situation.cluster.memory if limit is None else limit)
        if choice.cost.bytes > choice.limit:
            why = f"it needs {size(choice.cost.bytes)} for a task, which has {size(choice.limit)}"
            refusals.append(Refusal(str(strategy), why))
        else:
            choices.append(choice)
    if not choices:
        raise UserError(*_nothing(smallest, refusals, bound))
    choices.sort(key=lambda choice: -choice.rate)
    return Outcome(situation, bound, choices, refusals)


def predict(strategy: Declared, situation: Situation, fail: float = 0.0) -> Choice:
    """What one strategy takes.

    Args:
        strategy: With its options.
        situation: What is planned.
        fail: Failures of one machine in a second.

    Raises:
        UserError: It cannot run there, or nobody knows what it costs.
    """
    info, cluster = strategy_info(strategy.name), situation.cluster
    costs = COSTS.get(strategy.name)
    if costs is None:
        raise UserError(f"{strategy.name}: a plan does not know what it costs", nearest("", COSTS))
    if info.most_replicas == 1:
        cluster = cluster.alone()
        situation = replace(situation, cluster=cluster)
    tasks = cluster.tasks
    info.check(tasks, cluster.workers, cluster.ps if info.needs_servers else 0)
    if situation.batch < tasks and not info.divides_model:
        raise UserError(
            f"a global batch of {situation.batch} for {tasks} replicas: each needs an example",
            "Take fewer workers, or a larger --batch-size.",
        )
    found = _with_overhead(costs.cost(strategy, situation), strategy, situation)
    width = max(LEAST_WIDTH, situation.profile.uncertainty(cluster.threads))
    if isinstance(costs, LosesParts):
        loss = costs.lost(strategy, situation, fail, found)
    else:
        recovers = info.recovers and found.rhythm.replicas > 1
        loss = lost(situation, fail, info.asynchronous, recovers)
    return Choice(strategy, situation, found, width, loss)


def _with_overhead(cost: Cost, strategy: Declared, situation: Situation) -> Cost:
    """A step with what a small model took under its strategy beyond the closed form."""
    machine, is_alone = situation.profile.machine, situation.cluster.machines == 1
    known = machine.overheads if is_alone else machine.overheads_between
    exact = [text for text in known if _holds(parse(text), strategy)]
    if not exact:
        return cost
    found = known[max(exact, key=len)]
    steps = situation.steps_per_epoch
    own = found.meeting / cost.rhythm.every + (found.epoch / steps if steps else 0.0)
    return replace(cost, seconds={**cost.seconds, OVERHEAD: own * turns(situation)})


def _holds(tried: Declared, strategy: Declared) -> bool:
    """Whether what was tried is the strategy, but for options that it left as they are."""
    return tried.name == strategy.name and tried.options.items() <= strategy.options.items()


def improvements(
    outcome: Outcome, strategies: str = ALL, limit: float | None = None, fail: float = 0.0
) -> list[tuple[str, float]]:
    """What would make the job faster, each simulated with the strategy that is best then.

    Args:
        outcome: The plan.
        strategies: As for `search`.
        limit: As for `search`.
        fail: As for `search`.

    Returns:
        What changes, and how many times as many examples a second that gives; the most first.
    """
    now, best = outcome.situation, outcome.choices[0]
    cluster = now.cluster
    tried: dict[str, Situation] = {}
    if cluster.link is not None and cluster.machines > 1:
        faster = Link(min(MOST, 10 * cluster.link.rate), cluster.link.delay)
        tried[f"a line of {faster.spoken}"] = replace(now, cluster=replace(cluster, link=faster))
        if cluster.link.delay:
            near = Link(cluster.link.rate, cluster.link.delay / 10)
            tried[f"a line with {near.spoken}"] = replace(now, cluster=replace(cluster, link=near))
    what = "one more machine" if cluster.machines > 1 else "one more worker"
    tried[what] = replace(now, cluster=cluster.one_more())
    tried[f"a global batch of {2 * now.batch}"] = replace(now, batch=2 * now.batch)
    found = []
    for name, situation in tried.items():
        try:
            other = search(situation, strategies, limit, fail).choices[0]
        except UserError:
            continue
        found.append((f"{name} ({other.strategy})", other.rate / best.rate))
    return sorted(found, key=lambda each: -each[1])


def _wanted(strategies: str, situation: Situation) -> Iterator[Declared]:
    if strategies != ALL:
        yield from parse_all(strategies, "--strategies")
        return
    for name in names_anywhere():
        if name not in COSTS:
            yield Declared(name)
            continue
        known = strategy_info(name).options or ()
        found = (
            Declared(name, dict(each))
            for each in COSTS[name].candidates(situation)
            if set(each) <= set(known)
        )
        yield from {str(each): each for each in found}.values()


def _nothing(smallest: Choice | None, refusals: Sequence[Refusal], bound: float) -> tuple[str, str]:
    if smallest is None:
        said = "\n".join(f"  {each.strategy}: {each.reason}" for each in refusals)
        return f"no strategy can be:\n{said}", "Change --workers, --machines or --batch-size."
    return (
        f"no strategy fits into {size(bound)} for each task",
        f"{smallest.strategy} needs the least: --memory {_rounded(smallest.cost.bytes)} would do.",
    )


def _rounded(nbytes: float) -> str:
    """As ``--memory`` takes it, no less."""
    return f"{math.ceil(nbytes / 1e8) / 10:g}GB"
