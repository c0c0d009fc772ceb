"""Which strategy to choose for a job, and why: plain sentences, each with its figures."""

from __future__ import annotations

from collections.abc import Sequence

from spartito.comparison.report.differences import (
    MARGIN,
    is_behind,
    is_close,
    is_number,
    is_same_speed,
    is_same_time,
    noise_known,
    noise_of,
    not_behind,
    ranked,
    rate_of,
    seconds_of,
    simplest,
    variation,
)
from spartito.comparison.report.outcome import DIVERGED, FAILED, UNFINISHED
from spartito.comparison.report.results import (
    SHORTEST_CURVE,
    Comparison,
    Figures,
    is_disturbed,
    is_same_engine,
)
from spartito.names import listed, plural, size
from spartito.registry import is_asynchronous
from spartito.report.figures import clock_time, figure, higher_is_better, label, points

UNSTEADY = 0.5
"""A speed whose epochs vary by this fraction of it says little: something disturbed the run."""

MOST = 6
"""Sentences that a reader takes in before the table."""


def sentences(found: Comparison) -> list[str]:
    """Three to six sentences (fewer when little ran), the recommendation first.

    Nothing is claimed from a run that failed, diverged or did not finish, nor from a difference
    within the noise, nor of speeds while other programs had a part of the machine.
    """
    if not found.done:
        return [_nothing(found), *_failures(found)]
    disturbed = [run for run in found.done if is_disturbed(run)]
    rules = (
        _goal,
        _line,
        _speed,
        _quality,
        _slow,
        _one_device,
        _batch,
        _workers,
        _memory,
        _staleness,
    )
    said = [
        words for rule in rules if not (disturbed and rule in _OF_TIMES) and (words := rule(found))
    ]
    failed = _failures(found)
    between = disturbed and len(found.done) > 1
    first = _undecided(disturbed) if between else _recommendation(found)
    headline = " ".join(filter(None, (first, _slowed(found), _unequal(found))))
    said = [headline, *said][: MOST - len(failed)]
    return said + failed


def _nothing(found: Comparison) -> str:
    """What to say where no run can be chosen."""
    if found.runs and all(run.ended.state == DIVERGED for run in found.runs):
        return (
            "All runs diverged, so there is nothing to choose from. Try a smaller learning rate, "
            "or look for samples that are not finite: spartito data check."
        )
    return "No run of this comparison ended well, so there is nothing to choose from."


def _undecided(disturbed: Sequence[Figures]) -> str:
    """That speeds say nothing, as other programs had a part of the machine."""
    shares = listed([f"{run.others:.0%} while {run.title} ran" for run in disturbed])
    return (
        f"Undecided: other programs took a part of the cores ({shares}), so no speed here can be "
        "relied on. Compare again on a machine that does nothing else."
    )


def _unequal(found: Comparison) -> str | None:
    """Which runs trained fewer epochs than others: their figures are of less work."""
    trained = {run.title: len(run.epochs) for run in found.done}
    most = max(trained.values())
    fewer = [run for run in found.done if len(run.epochs) < most]
    if not fewer:
        return None
    said = listed([f"{run.title} trained {plural(len(run.epochs), 'epoch')}" for run in fewer])
    return f"Note: {said}, and the longest run {most}."


def _recommendation(found: Comparison) -> str:
    done = found.done
    if len(found.runs) == 1:
        return f"Only {done[0].title} was run, so there is no other to compare it with."
    if len(done) == 1:
        return f"Only {done[0].title} ended well, so there is no other to choose."
    good = not_behind(done)
    reached = [run for run in good if run.seconds_to_goal is not None]
    if reached and found.goal is not None:
        first = min(reached, key=seconds_of)
        equal = [run for run in reached if is_same_time(run, first)]
        pick = simplest(equal)
        after = clock_time(seconds_of(pick))
        if len(equal) == 1:
            return f"Choose {pick.title}: it is the first to reach {found.goal}, after {after}."
        return (
            f"Choose {pick.title}: no other strategy reaches {found.goal} clearly earlier "
            f"({after}), and {_simplest_of(equal)} that take about as long." + _doubt(equal)
        )
    fastest = max(good, key=rate_of)
    equal = [run for run in good if is_same_speed(run, fastest)]
    pick = simplest(equal)
    faster = [run for run in done if run not in good and rate_of(run) > rate_of(pick)]
    speed = _per_second(pick)
    if faster:
        return (
            f"Choose {pick.title} ({speed}): {_names(faster)} "
            f"{'is' if len(faster) == 1 else 'are'} faster, but with a worse "
            f"{label(pick.quality)}."
        )
    if len(equal) > 1:
        return (
            f"Choose {pick.title}: no other strategy is clearly faster ({speed}), "
            f"and {_simplest_of(equal)} that are about as fast." + _doubt(equal)
        )
    return f"Choose {pick.title}: it is clearly the fastest ({speed})" + (
        f", and no other ends with a clearly better {label(pick.quality)}."
        if noise_known(done)
        else "."
    )


def _simplest_of(equal: Sequence[Figures]) -> str:
    """``it is the simpler of the two``, ``it is the simplest of the three``."""
    return f"it is the {'simpler' if len(equal) == 2 else 'simplest'} of the {_count(equal)}"


def _doubt(equal: Sequence[Figures]) -> str:
    """What to do where speeds that differ much look equal only because one of them jumps."""
    worst = max(equal, key=variation)
    if len(worst.rates) > 1 or variation(worst) < UNSTEADY:
        return ""
    return (
        f" But the speed of {worst.title} varied by {variation(worst):.0%} from epoch to "
        "epoch, so repeat this with --repeat 3 before you rely on it."
    )


def _slowed(found: Comparison) -> str | None:
    """Under which strategies tasks were slowed, and under which not: they are not alike."""
    slowed = [run for run in found.done if run.slow]
    spared = [run for run in found.done if not run.slow]
    if not slowed or not spared:
        return None
    had = f"{_given(slowed[0])} under {_names(slowed)}"
    return f"Note: {had}; {_names(spared)} had no task that was slowed."


def _given(run: Figures) -> str:
    """How ``run`` was slowed: ``worker 1 had 25% of its speed``."""
    return " and ".join(f"{task} had {share:.0%} of its speed" for task, share in run.slow.items())


def _goal(found: Comparison) -> str | None:
    """Who reached the goal, in which time, and who did not."""
    if found.goal is None:
        return None
    done = found.done
    reached = sorted((r for r in done if r.seconds_to_goal is not None), key=seconds_of)
    missed = [run for run in done if run.seconds_to_goal is None]
    if not reached:
        best = [run for run in done if run.best is not None]
        pick = max if higher_is_better(found.goal.name) else min
        if not best:
            return f"No run reports {label(found.goal.name)}."
        closest = pick(best, key=lambda run: run.best or 0.0)
        value = figure(closest.quality, closest.best)
        return f"No strategy reached {found.goal}; {closest.title} came closest with {value}."
    times = ", ".join(f"{run.title} after {clock_time(seconds_of(run))}" for run in reached)
    return f"Training until {found.goal}: {times}" + (
        f"; {_names(missed)} did not reach it." if missed else "."
    )


def _speed(found: Comparison) -> str | None:
    """The fastest, and by how much."""
    first, *others = sorted(found.done, key=rate_of, reverse=True)
    if not others:
        return f"{first.title} does {_per_second(first)}."
    second = others[0]
    near = [run for run in others if is_same_speed(run, first)]
    twins = [run for run in near if is_same_engine(run, first)]
    if near == twins and first.least_noise > MARGIN and twins and len(first.rates) < 2:
        return (
            f"{_names([first, *twins])} do the same on one machine; that they differ by "
            f"{first.least_noise:.0%} here is noise, so smaller differences say nothing."
        )
    if near and all(is_close(run, first) for run in near):
        return (
            f"{_names([first, *near])} are equally fast: "
            f"between {_per_second(first)} and {_per_second(near[-1])}."
        )
    if near:
        speeds = listed([f"{run.title} {_per_second(run)}" for run in (first, *near)])
        why = (
            "their repeats overlap"
            if all(len(run.rates) > 1 for run in (first, *near))
            else f"their epochs vary by up to {max(map(variation, (first, *near))):.0%}"
            + (
                f", and two runs of the same engine by {first.least_noise:.0%}"
                if first.least_noise > MARGIN
                else ""
            )
            + "; more epochs, or --repeat 3, may tell"
        )
        return f"Which is faster cannot be told: {speeds} ({why})."
    ratio = rate_of(first) / rate_of(second)
    return (
        f"{first.title} does {_per_second(first)}, {ratio:.2f} times as many as "
        f"{second.title} with {_per_second(second)}."
    )


def _quality(found: Comparison) -> str | None:
    """Whether the models differ by more than their curves jump."""
    runs = [run for run in found.done if is_number(run.final)]
    if len(runs) < 2:
        return None
    name = runs[0].quality
    best, worst = ranked(runs)[0], ranked(runs)[-1]
    ends = f"{figure(name, best.final)} ({best.title})"
    ends += f" and {figure(name, worst.final)} ({worst.title})"
    if not noise_known(runs):
        return (
            f"The final {label(name)} lies between {ends}; with fewer than {SHORTEST_CURVE} "
            "epochs and no repeats nobody can tell whether that is more than noise."
        )
    spread = noise_of(best, worst)
    behind = [run for run in ranked(runs) if is_behind(run, best)]
    if behind:
        return (
            f"{_names(behind)} {'ends' if len(behind) == 1 else 'end'} at a worse {label(name)}: "
            f"{_values(behind)} against {figure(name, best.final)} of {best.title}, "
            f"and the noise of this difference is {points(name, spread)}."
        )
    return (
        f"The final {label(name)} does not differ beyond the noise: between {ends}, "
        f"where the noise of a difference is {points(name, spread)}."
    )


def _slow(found: Comparison) -> str | None:
    """What one slow worker costs the synchronous strategies, and spares the others."""
    slowed = [run for run in found.done if run.slow]
    if not slowed:
        return None
    task, share = next(iter(slowed[0].slow.items()))
    given = f"With {task} at {share:.0%} of its speed"
    waiting = [run for run in slowed if not is_asynchronous(run.strategy.name)]
    free = [run for run in slowed if is_asynchronous(run.strategy.name)]
    if not waiting:
        return None
    synchronous = max(waiting, key=rate_of)
    if free:
        other = max(free, key=rate_of)
        if rate_of(other) > rate_of(synchronous) and not is_same_speed(other, synchronous):
            return (
                f"{given}, {other.title} does {rate_of(other) / rate_of(synchronous):.2f} times "
                f"the examples/s of {synchronous.title}, whose replicas wait for the slowest "
                "at every step."
            )
        return f"{given}, {other.title} is still not faster than {synchronous.title}."
    if synchronous.waited_for_tasks is None:
        return None
    return (
        f"{given}, the tasks of {synchronous.title} spend "
        f"{synchronous.waited_for_tasks:.0%} of their time waiting for one another."
    )


HELD_UP = 0.2
"""The fraction of its time from which a line holds a strategy up."""


def _line(found: Comparison) -> str | None:
    """What the line costs those that send at every step, and spares the others."""
    runs = [run for run in found.done if run.workers > 1 and run.waited_for_tasks is not None]
    if not found.link or not runs:
        return None
    at = f"On a line of {found.link}"
    most = max(runs, key=lambda run: run.waited_for_tasks or 0.0)
    best = max(runs, key=rate_of)
    if (most.waited_for_tasks or 0.0) < HELD_UP:
        return f"{at} nobody is held up: {_sends(most)}, which is the most."
    if best is most or is_same_speed(best, most):
        couples = any(run.strategy.name == "local_sgd" for run in runs)
        return f"{at} {_sends(most)}." + (
            ""
            if couples
            else " local_sgd, which sends once in so many updates, is not among these."
        )
    times = rate_of(best) / rate_of(most)
    return f"{at} {_sends(most)}; {_sends(best)}, and does {times:.1f} times the examples/s."


def _sends(run: Figures) -> str:
    """How much of its time a run spends on the line, and for how many bytes."""
    moved = "" if run.bytes_per_step is None else f" ({size(run.bytes_per_step)} a step)"
    return f"{run.title} spends {run.waited_for_tasks:.0%} of its time sending and waiting{moved}"


def _one_device(found: Comparison) -> str | None:
    """Where the exchange eats what more workers gain."""
    alones = [run for run in found.done if run.strategy.name == "one_device"]
    others = [run for run in found.done if run.workers > 1]
    if not alones or not others:
        return None
    alone = max(alones, key=rate_of)
    best = max(others, key=rate_of)
    if rate_of(best) > rate_of(alone) and not is_same_speed(best, alone):
        return None
    waits = best.waited_for_tasks
    why = "" if waits is None else f"; {waits:.0%} of their time goes into waiting for one another"
    slowed = "".join(f", of which {_given(best)}," for _ in best.slow)
    at = f" on a line of {found.link}" if found.link else ""
    return (
        f"One device is enough here: {best.workers} workers under {best.title}{at}{slowed} do no "
        f"more ({_per_second(best)} against {_per_second(alone)}){why}."
    )


def _batch(found: Comparison) -> str | None:
    """What the largest batch does to the model, against the batch that served it best."""
    for strategy, runs in found.points("batch_size").items():
        known = [run for run in runs if is_number(run.final)]
        if len(known) < 2:
            continue
        best, largest = ranked(known)[0], known[-1]
        if noise_known([best, largest]) and is_behind(largest, best):
            name = best.quality
            return (
                f"A batch of {largest.batch_size:,} is too large for this training: under "
                f"{strategy} it ends at {figure(name, largest.final)}, a batch of "
                f"{best.batch_size:,} at {figure(name, best.final)}."
            )
    return None


def _workers(found: Comparison) -> str | None:
    """How far the fastest strategy grows with its workers."""
    curves = list(found.points("workers").values())
    if not curves:
        return None
    runs = max(curves, key=lambda runs: rate_of(runs[-1]))
    first, last = runs[0], runs[-1]
    grown = last.workers / first.workers
    return (
        f"From {first.workers} to {last.workers} workers {last.title} goes from "
        f"{_per_second(first)} to {_per_second(last)}, {rate_of(last) / rate_of(first):.2f} times; "
        f"{grown:g} times would be ideal."
    )


_KEEPS = {
    "central_storage": "keeps the parameters once",
    "sharded": "keeps a shard of the parameters on each task",
    "mesh": "keeps a shard of each large tensor on each task",
    "pipeline": "keeps some of the layers on each task",
}


def _memory(found: Comparison) -> str | None:
    """What it saves to keep the parameters once, or in parts."""
    peaks = {run.strategy.name: run.peak_memory for run in found.done if run.memory}
    whole = peaks.get("mirrored") or peaks.get("multi_worker_mirrored")
    kept = {name: peaks[name] or 0 for name in _KEEPS if peaks.get(name)}
    if not whole or not kept:
        return None
    less = sorted((peak, name) for name, peak in kept.items() if peak <= (1 - MARGIN) * whole)
    if less:
        (peak, best), *others = less
        also = ", ".join(f"{name} {size(peak)}" for peak, name in others)
        return (
            f"{best} {_KEEPS[best]}: its largest task takes {size(peak)}, "
            f"that of mirrored {size(whole)}" + (f" ({also})." if also else ".")
        )
    parts = {name: peak for name, peak in kept.items() if name != "central_storage"}
    if not parts:
        return None
    best = min(parts, key=lambda name: parts[name])
    return (
        f"This model is too small to save memory by dividing it: the largest task of {best} takes "
        f"{size(parts[best])}, that of mirrored {size(whole)}."
    )


def _staleness(found: Comparison) -> str | None:
    """How late the updates of an asynchronous run were."""
    run = next((r for r in found.done if r.mean_staleness), None)
    if run is None or run.mean_staleness is None:
        return None
    return (
        f"Under {run.title} a gradient is {run.mean_staleness:.1f} updates late on average, "
        f"and {max(run.staleness)} at most."
    )


def _failures(found: Comparison) -> list[str]:
    failed = [run for run in found.runs if run.ended.state == FAILED]
    some = [run for run in found.done if run.failures]
    said = []
    for state, verb in ((DIVERGED, "diverged"), (UNFINISHED, "did not finish")):
        those = [run for run in found.all_runs if run.ended.state == state]
        if those:
            named = [f"{_with_sweep(run)} ({run.ended.reason})" for run in those]
            said.append(f"{listed(named)} {verb} and cannot be chosen.")
    if failed:
        verb = "failed and says" if len(failed) == 1 else "failed and say"
        said.append(f"{_names(failed)} {verb} nothing here; the table has the reason.")
    if some:
        parts = [f"{len(run.failures)} of {run.title}" for run in some]
        said.append(f"Some repeats failed and are left out: {listed(parts)}.")
    return said


def _with_sweep(run: Figures) -> str:
    """A run and what a sweep changed: ``mirrored with batch size 8,192``."""
    if run.sweep is None:
        return run.title
    return f"{run.title} with {label(run.sweep)} {getattr(run, run.sweep):,}"


def _per_second(run: Figures) -> str:
    return f"{figure('examples_per_second', run.rate)} examples/s"


def _values(runs: Sequence[Figures]) -> str:
    return listed([figure(run.quality, run.final) for run in runs])


def _names(runs: Sequence[Figures]) -> str:
    return listed([run.title for run in runs])


def _count(runs: Sequence[Figures]) -> str:
    words = {2: "two", 3: "three", 4: "four", 5: "five"}
    return words.get(len(runs), str(len(runs)))


_OF_TIMES = (_goal, _line, _speed, _slow, _one_device, _workers)
"""The rules that tell of speeds and times."""
