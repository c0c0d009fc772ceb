"""The fraction of time that a replica waits for data: cats-vs-dogs from JPEG files of 500x375."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.common import Figure, announce, conclude, has_bf16, parser, positive, progress
from benchmarks.launching import run_job
from benchmarks.photos import make_photos

WORKERS = 2
PRECISIONS = ("fp32", "bf16")
TARGET = 0.03


def main() -> None:
    """Print the fraction in the first epoch, with and without its first step, and in the later."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--data", type=Path, help="photos to enlarge, one folder per class")
    options.add_argument("--photos", type=positive, default=400, help="how many files")
    options.add_argument("--epochs", type=positive, default=4)
    options.add_argument("--steps", type=positive, default=12, help="steps of an epoch")
    options.add_argument(
        "--precision", choices=PRECISIONS, help="default: both, where bf16 is native"
    )
    given = options.parse_args()
    here = announce(__doc__)
    usual = PRECISIONS if has_bf16() else ("fp32",)  # emulated bf16 would leave ages to read
    precisions = (given.precision,) if given.precision else usual
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in precisions}
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder), given.photos, given.data)
        sizes = [path.stat().st_size for path in Path(folder).glob("*/*.jpg")]
        print(f"{len(sizes)} files of {statistics.mean(sizes) / 1e3:.0f} kB on average", flush=True)
        for number in range(given.rounds):
            for precision in precisions:
                amount = [f"--epochs={given.epochs}", f"--steps={given.steps}"]
                epochs = run_job(
                    ["-m", "benchmarks.jobs.waiting", folder, f"--precision={precision}", *amount],
                    workers=WORKERS,
                )
                found[precision].append(epochs)
                shares = {f"epoch {n}": epoch["share"] for n, epoch in enumerate(epochs, 1)}
                progress(number, given.rounds, shares, f"share waited, {precision}")
    figures = [figure for name in precisions for figure in summarize(name, found[name])]
    conclude(here, figures, given.json, epochs=found)


def summarize(precision: str, runs: list[list[dict[str, float]]]) -> list[Figure]:
    """The fractions of one precision, medians over rounds and epochs."""
    first = [epochs[0] for epochs in runs]
    later = [epoch for epochs in runs for epoch in epochs[1:]] or first

    def median(epochs: list[dict[str, float]], name: str) -> float:
        return statistics.median(epoch[name] for epoch in epochs)

    return [
        Figure(f"{precision}: first epoch", median(first, "share")),
        Figure(
            f"{precision}: first epoch without its first step",
            median(first, "without_first_step"),
            TARGET,
            "<=",
        ),
        Figure(f"{precision}: later epochs", median(later, "share"), TARGET, "<="),
        Figure(f"{precision}: later epochs, worst replica", median(later, "worst_replica")),
        Figure(f"{precision}: images/s", median(later, "images_per_second")),
    ]


if __name__ == "__main__":
    main()
