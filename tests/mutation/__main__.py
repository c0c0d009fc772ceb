"""Change the sources in small ways, one at a time, and see whether a test notices.

``scripts/mutate --count 100 --seed 1``. A mutant that survives is a missing test, or has a reason
in ``tests/mutants.md``; the command fails where there is neither.
"""

from __future__ import annotations

import argparse
import queue
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tests.mutation.mutants import Mutant, mutants, sample
from tests.mutation.trees import ROOT, Map, Tree, tree

SOURCES = ROOT / "src" / "spartito"
EXPLAINED = ROOT / "tests" / "mutants.md"
MAP = ROOT / "build" / "mutation" / "map.json"


def explained(text: str) -> dict[str, str]:
    """The reasons of ``tests/mutants.md``, by the mutant's key."""
    return dict(re.findall(r"^\* `(.+?)`: (.+)$", text, re.MULTILINE))


def verdict(
    results: Iterable[tuple[str, str]], reasons: dict[str, str], known: Iterable[str]
) -> list[str]:
    """What is wrong with ``results``, pairs of a mutant's key and what became of it."""
    results = list(results)
    survived = [key for key, outcome in results if outcome in ("survived", "untested")]
    wrong = [f"survived, without a reason: {key}" for key in survived if key not in reasons]
    wrong += [f"a reason for what is no mutant: {key}" for key in sorted({*reasons} - {*known})]
    wrong += [
        f"killed, though there is a reason why not: {key}"
        for key, outcome in results
        if key in reasons and key not in survived
    ]
    return wrong


def folders_of(tests: Sequence[str]) -> list[list[str]]:
    """What is recorded together: each folder of tests below those that are named, and its files."""
    found: list[list[str]] = []
    for name in tests:
        below = sorted(one.parent.relative_to(ROOT) for one in (ROOT / name).glob("*/test_*.py"))
        files = sorted(one.relative_to(ROOT) for one in (ROOT / name).glob("test_*.py"))
        found += [[str(one)] for one in dict.fromkeys(below)]
        found += [[str(one) for one in files]] if below and files else []
        found += [] if below else [[name]]
    return found


def run_all(
    chosen: Sequence[Mutant], trees: Sequence[Tree], tests: Map, budget: float
) -> list[tuple[Mutant, str]]:
    """What becomes of each mutant, one at a time in each tree."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for one in trees:
        free.put(one)

    def outcome(mutant: Mutant) -> tuple[Mutant, str]:
        names = tests.tests_of(mutant, budget)
        if not names:
            return mutant, "untested"
        tree, begin = free.get(), time.monotonic()
        try:
            found, failure = tree.run(mutant, {name: tests.seconds[name] for name in names})
        finally:
            free.put(tree)
        print(f"{found:9}{time.monotonic() - begin:6.0f} s  {mutant.key}  {failure}", flush=True)
        return mutant, found

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(outcome, chosen))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--packages", nargs="+", help="of which packages (default: of all)")
    parser.add_argument("--only", metavar="TEXT", help="only those whose name has this text")
    parser.add_argument(
        "--budget", type=float, default=300, help="seconds of tests per mutant (default: 300)"
    )
    parser.add_argument(
        "--keep-map",
        action="store_true",
        help="go on with the last run's list of which test comes where, if there is one",
    )
    parser.add_argument(
        "--forms", type=int, help="record so many forms of each test with parameters (default: all)"
    )
    parser.add_argument("--record", action="store_true", help="make that list, and run nothing")
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], help="the tests that may notice (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="name the mutants, and run nothing")
    chosen = parser.parse_args()
    every = mutants(SOURCES, ["."])
    drawn = [
        one
        for one in sample(SOURCES, every, chosen.count, chosen.seed)
        if (chosen.only or "") in one.key
        and (chosen.packages is None or one.path.split("/")[0] in chosen.packages)
    ]
    if chosen.list:
        print(*(one.key for one in drawn), sep="\n")
        return 0
    with ExitStack() as stack:
        trees = [stack.enter_context(tree()) for _ in range(chosen.jobs)]
        tests = Map.load(MAP) if chosen.keep_map and MAP.exists() else Map({}, {}, [])
        for target in folders_of(chosen.tests):
            if not {*target} <= {*tests.targets}:
                print(f"Which test comes where: {', '.join(target)}", flush=True)
                tests |= trees[0].record(target, chosen.jobs, drawn, chosen.forms)
                tests.save(MAP)
        if chosen.record:
            return 0
        if tests.failed:
            print(f"left out, as they fail without a mutant: {', '.join(tests.failed)}")
        results = run_all(drawn, trees, tests, chosen.budget)
    counts = Counter(outcome for _, outcome in results)
    packages = Counter((mutant.path.split("/")[0], outcome) for mutant, outcome in results)
    print(f"\n{'':14}{'killed':>9}{'timeout':>9}{'survived':>9}{'untested':>9}")
    for name in sorted({package for package, _ in packages}):
        print(f"{name:14}", *(f"{packages[name, x]:8}" for x in OUTCOMES))
    print(f"{'all':14}", *(f"{counts[x]:8}" for x in OUTCOMES))
    full = [(mutant.key, outcome) for mutant, outcome in results]
    reasons = explained(EXPLAINED.read_text())
    wrong = verdict(full, reasons, [one.key for one in every])
    print(*wrong, sep="\n")
    return bool(wrong)


OUTCOMES = ("killed", "timeout", "survived", "untested")

if __name__ == "__main__":
    sys.exit(main())
