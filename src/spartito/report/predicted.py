"""What a plan predicted for a run, beside what the run did."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from spartito.errors import UserError
from spartito.names import size
from spartito.report.bars import Bar, Bars

PLAN = "plan.json"


def read_plan(path: Path) -> Mapping[str, Any]:
    """What ``spartito plan --out`` wrote.

    Args:
        path: The folder, or its ``plan.json``.

    Raises:
        UserError: There is none.
    """
    file = path / PLAN if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--plan {path}: {file} is no plan: {error}", "Name what spartito plan --out wrote."
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("choices"), list):
        raise UserError(f"--plan {path}: {file} is no plan", "Name what spartito plan --out wrote.")
    return found


def beside(
    plan: Mapping[str, Any],
    config: Mapping[str, Any],
    rates: Sequence[float],
    memory: Sequence[float],
    paints: tuple[str, str],
) -> list[Bars]:
    """Bars of what was predicted and measured: speed, and memory of the largest task.

    Args:
        plan: As `read_plan` returned it.
        config: The settings of the run.
        rates: Examples a second of its epochs.
        memory: Peak bytes of its tasks.
        paints: The colours of predictions and of measurements.

    Raises:
        UserError: The plan is of another job.
    """
    choice = _choice(plan, config)
    found = []
    if rates:
        # The first epoch makes caches and memory: it is none of the others where there are others.
        rate = median(rates[1:] or rates)
        step, batch = choice["step_seconds"], plan["batch_size"]
        low, high = batch / choice["step_seconds_high"], batch / choice["step_seconds_low"]
        error = batch / step / rate - 1
        note = (
            f"The prediction is {abs(error):.0%} {'above' if error > 0 else 'below'} the median "
            f"epoch; it said {low:,.0f} to {high:,.0f}."
        )
        pairs = (("predicted", batch / step, (low, high)), ("measured", rate, None))
        found.append(_bars("Examples a second", pairs, paints, note, lambda value: f"{value:,.0f}"))
    if memory:
        both = (("predicted", choice["memory_bytes"], None), ("measured", max(memory), None))
        note = "Of the task with the most; the prediction lacks what writes logs and reports."
        found.append(_bars("Memory", both, paints, note, size))
    return found


def _choice(plan: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    strategy = str(config.get("strategy"))
    cluster, fit = config.get("cluster") or {}, config.get("fit") or {}
    tasks = sum(len(names) for kind, names in (cluster.get("tasks") or {}).items() if kind != "ps")
    of_run = {"tasks": tasks, "batch_size": fit.get("batch_size")}
    planned = {"tasks": plan.get("tasks"), "batch_size": plan.get("batch_size")}
    choices = {str(each.get("strategy")): each for each in plan["choices"]}
    if strategy not in choices:
        raise UserError(
            f"the plan says nothing of {strategy}, under which the run was made",
            f"It has {', '.join([*choices][:5])}.",
        )
    if strategy == "one_device":
        of_run["tasks"] = planned["tasks"] = 1
    for name, value in of_run.items():
        if value is not None and value != planned[name]:
            raise UserError(
                f"the plan is of {name}={planned[name]}, and the run had {value}",
                "Plan what was run.",
            )
    found: Mapping[str, Any] = choices[strategy]
    return found


def _bars(title: str, rows: Any, paints: tuple[str, str], note: str, words: Any) -> Bars:
    most = max(max(value, *(span or (0.0,))) for _, value, span in rows)
    if not most or not math.isfinite(most):
        return Bars(title, [], note)
    return Bars(
        title,
        [
            Bar(
                name, value / most, words(value), paint,
                None if span is None else (span[0] / most, span[1] / most),
            )
            for (name, value, span), paint in zip(rows, paints, strict=True)
        ],
        note,
    )  # fmt: skip
