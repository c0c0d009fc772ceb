"""What jobs survive: every fault, task and strategy in turn, as ``docs/explanation/survival.md``.

    python -m benchmarks.survival --out runs/survival --minutes 15

Each part is one command ``spartito chaos``; what ``--out`` has results of is not run again, so
that a run which was ended goes on where it was. The page is written after each part; of parts
that did not run it keeps what ran before.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs.survivor import draw
from spartito.chaos.picture import picture
from spartito.chaos.report import legend, summary, tables
from spartito.chaos.schedule import drawn, written
from spartito.chaos.suite import read_results

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "explanation" / "survival.md"
KEPT = ROOT / "docs" / "explanation" / "survival.jsonl"
FIELDS = (
    "strategy", "schedule", "code", "seconds", "restarts", "repeated", "lost", "doubled",
    "difference", "broken",
)  # fmt: skip
"""Of a result, what is kept beside the page."""
PICTURE = ROOT / "docs" / "pictures" / "survival.svg"
BEGIN = "<!-- results: python -m benchmarks.survival -->"
DETAILS = "<!-- each fault: python -m benchmarks.survival -->"
"""Where a line of the page says that what follows is written here; people write before it."""
SYNCHRONOUS = (
    "mirrored",
    "multi_worker_mirrored",
    "central_storage",
    "sharded",
    "mesh",
    "pipeline",
)
ALONE = "kill,stop,pause,term,exception,spin,clock,disk,slow,memory,torn"
MNIST = ("mnist", "--workers", "2")
SERVED = (*MNIST, "--strategy", "parameter_server", "--chief", "--ps", "2")
FILES = ("benchmarks/jobs/survivor.py", "--workers", "2")
PANELS = {
    "plain": (*SYNCHRONOUS, "local_sgd", "one_device", "parameter_server", "files"),
    "--recover": ("recover", "journal", "two_multi_worker_mirrored", "two_parameter_server"),
    "replicas=2": ("copies",),
    "groups": ("local_groups", "decoupled"),
    "BackupAndRestore": ("backups",),
    "a machine each": ("machines",),
}
"""What the picture shows, by the words above its columns."""


@dataclass(frozen=True)
class Part:
    """One command: what the page says above its tables, and its words."""

    title: str
    words: tuple[str, ...]
    arguments: tuple[str, ...] = ("--epochs", "3")


def parts(pictures: Path) -> dict[str, Part]:
    """All parts, by name."""
    found = {
        name: Part(
            f"`{name}`, two workers on one machine",
            (*MNIST, "--strategy", name, "--faults", ALONE),
        )
        for name in (*SYNCHRONOUS, "local_sgd")  # groups of one worker each
    }
    # Nobody waits for a task that is alone: one that is stopped is named, and stays.
    found["one_device"] = Part(
        "`one_device`",
        (*MNIST, "--strategy", "one_device", "--faults",
         "kill,pause,term,exception,clock,disk,slow,memory,torn"),
    )  # fmt: skip
    found["parameter_server"] = Part(
        "`parameter_server`: a chief, two workers, two servers, an evaluator",
        (*SERVED, "--evaluator", "--faults", f"{ALONE},nan"),
    )
    found["local_groups"] = Part(
        "`local_sgd`: two groups of two workers",
        ("mnist", "--workers", "4", "--strategy", "local_sgd", "--strategy-options",
         '{"groups": 2, "every": 20}', "--faults", "kill,stop,pause,exception,memory"),
    )  # fmt: skip
    found["decoupled"] = Part(
        "`parameter_server` with two groups that train apart: a chief, two workers, two servers",
        (*SERVED, "--strategy-options", '{"groups": 2, "every": 10}',
         "--faults", "kill,stop,pause,term,exception,slow,memory"),
    )  # fmt: skip
    found["evaluator"] = Part(
        "An evaluator beside `multi_worker_mirrored`",
        (*MNIST, "--strategy", "multi_worker_mirrored", "--evaluator", "--roles", "evaluator",
         "--faults", ALONE),
    )  # fmt: skip
    found["backups"] = Part(
        "With `BackupAndRestore(every=20, share=None)`",
        (*FILES, "--strategy", ",".join(SYNCHRONOUS),
         "--faults", "kill,stop,term,exception,torn,disk"),
        (str(pictures),),
    )  # fmt: skip
    found["recover"] = Part(
        "With `--recover`: who lives goes on",
        (*MNIST, "--strategy", "mirrored,multi_worker_mirrored,sharded", "--recover",
         "--roles", "worker,chief", "--faults", "kill,stop,pause,spin,exception,memory"),
    )  # fmt: skip
    found["copies"] = Part(
        "`parameter_server` with `replicas=2`: each value on two servers",
        (*SERVED, "--strategy-options", '{"servers": {"replicas": 2}}',
         "--roles", "ps", "--faults", "kill,stop,pause,term,spin,slow,memory"),
    )  # fmt: skip
    found["journal"] = Part(
        "`parameter_server` with `--recover`: the chief comes back",
        (*SERVED, "--recover", "--roles", "chief", "--faults", "kill,stop,pause,term,memory"),
    )  # fmt: skip
    for name, kinds in (
        ("multi_worker_mirrored", ("kill", "stop", "pause", "spin")),
        ("parameter_server", ("kill", "stop", "pause")),
    ):
        served = ["--ps", "2", "--chief"] * (name == "parameter_server")
        found[f"two_{name}"] = Part(
            f"Two faults by chance: `{name}`, three workers, `--recover`",
            ("mnist", "--workers", "3", "--strategy", name, "--recover", *served,
             "--schedule", by_chance(kinds, 8)),
        )  # fmt: skip
    found["machines"] = Part(
        "Each task on a machine of its own (network namespaces)",
        (*MNIST, "--strategy", "multi_worker_mirrored,sharded,mesh,pipeline,parameter_server",
         "--roles", "worker,chief,ps", "--faults", "loss,cut,partition"),
    )  # fmt: skip
    found["files"] = Part(
        "A file that cannot be read; a gradient that is not a number (`on_nonfinite=\"skip\"`)",
        (*FILES, "--strategy", ",".join(SYNCHRONOUS),
         "--faults", "corrupt,nan", "--sample", str(pictures / "dark" / "7.png")),
        (str(pictures),),
    )  # fmt: skip
    return found


def by_chance(kinds: Sequence[str], runs: int) -> str:
    """Schedules of two faults each, drawn from a fixed seed."""
    workers = [f"worker:{index}" for index in range(3)]
    early, late = (drawn(seed, runs, kinds, workers, range(begin, begin + 60))
                   for seed, begin in ((1, 130), (2, 250)))  # fmt: skip
    return ",".join(written(first + second) for first, second in zip(early, late, strict=True))


def write(out: Path, named: dict[str, Part]) -> None:
    """The page of all results so far, behind what people have written."""
    found = results(out, named)
    together = [one for part in found.values() for one in part]
    panels = {
        words: [one for name in names for one in found[name]] for words, names in PANELS.items()
    }
    KEPT.write_text(
        "".join(
            json.dumps({"part": name} | {field: one[field] for field in FIELDS}) + "\n"
            for name, part in found.items()
            for one in part
        )
    )
    PICTURE.write_text(picture({words: part for words, part in panels.items() if part}))
    shown = "![Faults by strategies](../pictures/survival.svg)"
    ran = {named[name].title: part for name, part in found.items() if part}
    text = (
        DOCS.read_text() if DOCS.exists() else f"# Survival\n\n{BEGIN}\n\n## Notes\n\n{DETAILS}\n"
    )
    head, _, rest = text.partition(BEGIN)
    notes = rest.partition("\n## ")[2].partition(DETAILS)[0].rstrip()
    said = [head.rstrip(), BEGIN]
    said += [summary(together), overview(ran), shown] if together else []
    said += [f"## {notes}", DETAILS]
    said += ["## Faults", legend(together)] if together else []
    for title, part in ran.items():
        said += [f"## {title}", summary(part), *(f"#{table}" for table in tables(part))]
    DOCS.write_text("\n\n".join(said) + "\n")


def overview(ran: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each part of the page, with a link to it."""
    head = [
        "| job | runs | as promised | went on by itself | started again |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| [{title}](#{anchor(title)}) | {len(part)} | {sum(not one['broken'] for one in part)} "
        f"| {sum(not one['restarts'] for one in part)} "
        f"| {sum(bool(one['restarts']) for one in part)} |"
        for title, part in ran.items()
    ]
    return "\n".join([*head, *rows])


def anchor(title: str) -> str:
    """The address of a heading on the site, and on code hosts."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def results(out: Path, named: dict[str, Part]) -> dict[str, list[dict[str, Any]]]:
    """Those in ``out``, by part, and those beside the page of parts that did not run there."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    kept = [json.loads(line) for line in lines]
    return {
        name: read_results(out / name) or [one for one in kept if one["part"] == name]
        for name in named
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit code: 0 when all promises were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/survival"))
    parser.add_argument("--only", nargs="+", metavar="PART", help="some parts alone")
    parser.add_argument("--minutes", type=float, default=15.0, help="begin no fault after that")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    pictures = options.out / "pictures"
    named = parts(pictures)
    if wrong := set(options.only or ()) - set(named):
        parser.error(f"{', '.join(sorted(wrong))}: the parts are {', '.join(named)}")
    draw(pictures)
    end = time.monotonic() + 60 * options.minutes
    for name in options.only or named:
        part = named[name]
        left = max(0.0, end - time.monotonic()) / 60
        words = [sys.executable, "-m", "spartito", "chaos", *part.words]
        words += ["--limit", "5", "--minutes", f"{left:.2f}", "--out", str(options.out / name)]
        code = subprocess.run([*words, "--", *part.arguments], cwd=ROOT).returncode
        write(options.out, named)
        if code not in (0, 1):
            return code
    ran = [one for name in named for one in read_results(options.out / name)]
    print(summary(ran))
    if options.json:
        print(json.dumps(ran))
    return int(any(one["broken"] for one in ran))


if __name__ == "__main__":
    sys.exit(main())
