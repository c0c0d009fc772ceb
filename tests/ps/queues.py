"""What tests of the work queue share."""

from __future__ import annotations

from spartito.ps.scheduler.plan import Plan

Item = tuple[int, int, int]
"""(pass, step, slice)"""


def batches(plan: Plan, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """(pass, step) of each global batch of each epoch, read one after another."""
    number, step = plan.start
    epochs = []
    for epoch in range(plan.epochs):
        before = plan.first_epoch_done if epoch == 0 else 0
        found: list[tuple[int, int]] = []
        while True:
            if plan.epoch_steps is not None and len(found) + before >= plan.epoch_steps:
                break
            if step >= lengths[number % len(lengths)]:
                number, step = number + 1, 0
                if plan.epoch_steps is None and number % (plan.passes_per_epoch or 1) == 0:
                    break
                continue
            found.append((number, step))
            step += 1
        epochs.append(found)
    return epochs
