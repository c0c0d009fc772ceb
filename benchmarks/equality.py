"""The losses of mirrored, 2 and 3 workers, against one device: deterministic, fp64, 30 steps."""

from __future__ import annotations

from benchmarks.common import Figure, announce, conclude, parser, positive
from benchmarks.launching import run_job

WORKERS = (1, 2, 3)
TARGET = 1e-12
LIMIT = 1800.0


def main() -> None:
    """Print the largest differences of the training loss, and of the validation loss."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--size", type=positive, default=180, help="pixels of the photos' sides")
    options.add_argument("--model", choices=("mlp", "cats_vs_dogs"), help="one instead of both")
    given = options.parse_args()
    here = announce(__doc__)
    figures, curves = [], {}
    for model in (given.model,) if given.model else ("mlp", "cats_vs_dogs"):
        size = f"--size={given.size}"
        runs = {}
        for workers in WORKERS:
            runs[workers] = run_job(
                ["-m", "benchmarks.jobs.losses", model, size], workers=workers, limit=LIMIT
            )
            losses = runs[workers]["loss"]
            print(f"{model}, {workers} replicas: {len(losses)} steps, loss {losses[0]:.6f} "
                  f"to {losses[-1]:.6f}", flush=True)  # fmt: skip
        name = model if model == "mlp" else f"{model} {given.size}x{given.size}"
        for workers in WORKERS[1:]:
            figures += compare(f"{name}, {workers} workers", runs[1], runs[workers])
        curves[name] = runs
    conclude(here, figures, given.json, curves=curves)


def compare(name: str, one: dict[str, list[float]], many: dict[str, list[float]]) -> list[Figure]:
    """The largest difference over all steps, and over the validations after each epoch.

    A bias that BatchNorm takes away again has the gradient 0, so what is left is rounding noise,
    and Adam divides that by something as small as its eps. Running means follow these steps a
    little late, which only validation sees.
    """
    return [
        Figure(f"{name}: training loss", largest(one["loss"], many["loss"]), TARGET, "<="),
        Figure(f"{name}: validation loss", largest(one["validation"], many["validation"])),
    ]


def largest(one: list[float], other: list[float]) -> float:
    """The largest absolute difference of two curves of equal length."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
