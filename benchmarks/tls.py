"""MLP and cats-vs-dogs, 2 workers by sockets over the loopback: TLS on, off, and no records.

Off is what a job on one machine has: every record is authenticated. "No records" is the bare
socket after the handshake, which no job has.
"""

from __future__ import annotations

from statistics import median

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive, progress, rates
from benchmarks.launching import run_job
from benchmarks.race import WORKERS
from spartito.names import ENV_SECRET, ENV_TLS

SIDES = {"tls": ("sockets", "on"), "off": ("sockets", "off"), "no records": ("bare_sockets", "off")}
MODELS = {"mlp": (32, 0.6, 3, 300), "xception": (8, 0.95, 2, 3)}
"""Local batch, target, windows of a turn, steps of a window."""


def main() -> None:
    """Print the ratios of examples per second."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    options.add_argument("--windows", type=positive, help="windows of a turn")
    given = options.parse_args()
    here = announce(__doc__)
    figures: list[Figure] = []
    seconds: dict[str, Windows] = {}
    for model in given.models:
        local_batch, target, windows, steps = MODELS[model]
        found = seconds[model] = {side: [] for side in SIDES}
        for number in range(given.rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                found[side] += _turn(model, side, given.windows or windows, steps)
            values = rates(found, local_batch * WORKERS)
            progress(number, given.rounds, values, f"examples/s, {model}")
        middle = {side: median(values) for side, values in found.items()}
        figures += [
            Figure(f"{model}: TLS / off", middle["off"] / middle["tls"], target),
            Figure(f"{model}: off / no records", middle["no records"] / middle["off"]),
        ]
    conclude(here, figures, given.json, seconds_per_step=seconds)


def _turn(model: str, side: str, windows: int, steps: int) -> list[float]:
    job, tls = SIDES[side]
    amount = [f"--windows={windows}", f"--steps={steps}"]
    env = {ENV_SECRET: "known to the two of this benchmark", ENV_TLS: tls}
    found: list[float] = run_job(
        ["-m", "benchmarks.jobs.steps", job, model, *amount], workers=WORKERS, env=env
    )
    return found


if __name__ == "__main__":
    main()
