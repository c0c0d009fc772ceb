"""A plan as a person reads it, and as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spartito.names import aligned, duration, size
from spartito.planning.costs.parts import Situation
from spartito.planning.search import Choice, Goal, Outcome
from spartito.planning.simulation import simulate
from spartito.registry import strategy_info

WORTH = 1.03
"""An improvement below this is none."""
BUSY = 0.25
"""The width from which on a reader is told why it is so wide."""
MOST_LINES = 20
SHORT = 0.01
"""Seconds of a step in which meetings and Python weigh more than what was measured."""
COLUMNS = ("strategy", "step", "examples/s", "own work", "memory", "sent/update", "limited by")


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found, and what the user had asked for.

    Attributes:
        outcome: What was found.
        target: The script or recipe that the user would train.
        goal: How much of it.
        better: As `spartito.planning.search.improvements` found it.
        fail: Failures of one machine in a second.
    """

    outcome: Outcome
    target: str
    goal: Goal | None
    better: Sequence[tuple[str, float]]
    fail: float


def text(plan: Plan) -> str:
    """The plan as lines: table and sentences."""
    outcome, choices = plan.outcome, plan.outcome.choices
    rows = columns(plan)
    numbers = range(1, len(rows[0]) - 1)  # between the strategy and what limits it
    lines = [heading(outcome.situation), "", *aligned(rows, right=numbers)]
    if len(choices) > MOST_LINES:
        lines.append(f"and {len(choices) - MOST_LINES} slower ones (--json has all)")
    lines += ["", *(f"not possible: {each.strategy}: {each.reason}" for each in outcome.refusals)]
    lines += [""] if outcome.refusals else []
    lines += sentences(plan)
    lines += [
        "Only some seconds on this machine were run; how well a model learns is not known.",
        f"To run it:     {command(choices[0], plan.target)}",
        f"To be certain: {_compare(plan)}",
    ]
    return "\n".join(lines)


def sentences(plan: Plan) -> list[str]:
    """What to choose and why, and how far it may be trusted; the first one names the best."""
    best, better = plan.outcome.choices[0], plan.better
    rate = f"{_number(best.rate / (1 + best.width))} to {_number(best.rate * (1 + best.width))}"
    lines = [f"{best.strategy}: {rate} examples/s; each task {best.cost.limit}"]
    if best.width > BUSY:
        lines.append(
            f"the rounds of the profile differ by {best.width:.0%}: its machine had other work; "
            "profile again when it has none"
        )
    if best.cost.step < SHORT:
        lines.append(
            f"steps of {duration(best.cost.step)} are short: such predictions were off by 6 to "
            "16% in the median (docs/guides/plan.md), so compare those at the top"
        )
    if plan.outcome.situation.cluster.tasks > 1:
        lines.append(_simulated(best))
    lines += [f"{best.strategy}: {said}" for said in best.cost.said]
    if better and better[0][1] >= WORTH:
        lines.append(f"most would help {better[0][0]}: {better[0][1]:.2f} times the speed")
    if math.isfinite(best.loss.every):
        lines.append(f"save every {duration(best.loss.every)}: that loses the least to failures")
    return lines


def _simulated(choice: Choice) -> str:
    """What many steps of a strategy come to, where tasks vary and machines differ."""
    found = simulate(choice)
    return (
        f"{choice.strategy}, simulated task by task: {_number(found.rate)} examples/s; tasks wait "
        f"for each other {found.waiting:.0%} of the time"
    )


def record(plan: Plan) -> dict[str, Any]:
    """The plan as values that JSON can write: figures that are infinite are None."""
    outcome, situation = plan.outcome, plan.outcome.situation
    return {
        "target": situation.profile.target,
        "cluster": situation.cluster.spoken,
        "tasks": situation.cluster.tasks,
        "batch_size": situation.batch,
        "memory_limit": outcome.limit,
        "choices": [_choice(each, plan) for each in outcome.choices],
        "refusals": [
            {"strategy": each.strategy, "reason": each.reason} for each in outcome.refusals
        ],
        "improvements": [{"change": what, "times": times} for what, times in plan.better],
    }


def command(choice: Choice, target: str) -> str:
    """What starts a job under a strategy, as it is typed.

    Args:
        choice: The strategy, and on what.
        target: A script or a recipe.

    Returns:
        The line; of several machines the names are the user's to fill in.
    """
    cluster, info = choice.situation.cluster, strategy_info(choice.strategy.name)
    words = ["spartito", "run" if target.endswith(".py") else "train"]
    if cluster.machines > 1:
        words += ["--hosts", "HOST1,HOST2,..." if cluster.machines > 2 else "HOST1,HOST2"]
    words += ["--strategy", shlex.quote(str(choice.strategy))]
    words += ["--recover"] if choice.loss.recovers else []
    words += ["--workers", str(cluster.workers)]
    words += ["--ps", str(cluster.ps)] if info.needs_servers else []
    words.append(target)
    if not target.endswith(".py") and choice.situation.batch != choice.situation.profile.batch_size:
        words += ["--batch-size", str(choice.situation.batch)]
    return " ".join(words)


def _compare(plan: Plan) -> str:
    named = ", ".join(str(each.strategy) for each in plan.outcome.choices[:3])
    workers = plan.outcome.situation.cluster.workers
    return f"spartito compare {plan.target} --strategies {shlex.quote(named)} --workers {workers}"


def heading(situation: Situation) -> str:
    """What is planned, and on what, in a line."""
    profile = situation.profile
    return (
        f"{profile.target} ({profile.model.name}, {size(profile.model.parameters)} of parameters, "
        f"{profile.model.optimizer_name}), {situation.batch} examples for each step, on "
        f"{situation.cluster.spoken}"
    )


def columns(plan: Plan) -> list[list[str]]:
    """The table of a plan: its head, and a row for each of the fastest."""
    goal, situation = plan.goal, plan.outcome.situation
    priced = situation.cluster.price > 0
    head = [*COLUMNS]
    head[-1:-1] = ["to the goal"] if goal else []
    head[-1:-1] = ["price"] if goal and priced else []
    head[-1:-1] = ["lost"] if plan.fail else []
    rows = [head]
    for choice in plan.outcome.choices[:MOST_LINES]:
        cost = choice.cost
        row = [
            str(choice.strategy),
            f"{duration(cost.step)} {_width(choice.width)}",
            _number(cost.rate),
            f"{cost.efficiency:.0%}",
            f"{size(cost.bytes)} of {size(choice.limit)}",
            size(cost.sent) if cost.sent else "-",
        ]
        if goal:
            hours = choice.hours(goal.examples(situation))
            row.append(duration(hours * 3600) if math.isfinite(hours) else "never")
            row += [f"{hours * choice.situation.cluster.price:.4g}"] if priced else []
        row += [f"{choice.loss.fraction:.1%}"] if plan.fail else []
        rows.append([*row, cost.limit])
    return rows


def _choice(choice: Choice, plan: Plan) -> Mapping[str, Any]:
    cost, goal = choice.cost, plan.goal
    hours = choice.hours(goal.examples(choice.situation)) if goal else None
    finite = hours is not None and math.isfinite(hours)
    return {
        "strategy": str(choice.strategy),
        "step_seconds": cost.step,
        "step_seconds_low": cost.step / (1 + choice.width),
        "step_seconds_high": cost.step * (1 + choice.width),
        "examples_per_second": choice.rate,
        "efficiency": cost.efficiency,
        "seconds": dict(cost.seconds),
        "memory": dict(cost.memory),
        "memory_bytes": cost.bytes,
        "bytes_sent_per_update": cost.sent,
        "limited_by": cost.limit,
        "lost_to_failures": choice.loss.fraction,
        "save_every_seconds": choice.loss.every if math.isfinite(choice.loss.every) else None,
        "hours_to_goal": hours if finite else None,
        "price_to_goal": hours * choice.situation.cluster.price
        if finite and hours is not None
        else None,
        "not_known": list(cost.said),
        "command": command(choice, plan.target),
    }


def _width(width: float) -> str:
    return f"±{width:.0%}" if width < 1 else "±100% or more"


def _number(value: float) -> str:
    """As a table has it: three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
