"""What `python -m benchmarks.all` runs, in which order, how often and how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planned:
    """One command: ``rounds`` in the short form, and seconds after which it is ended.

    ``takes`` are the options that it is given where the user has named them.
    """

    name: str
    title: str
    module: str
    rounds: int
    limit: float
    options: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    def words(self, rounds: int | None, named: dict[str, str]) -> list[str]:
        """What follows ``python``; without ``rounds`` the command has its own default."""
        found = ["-m", f"benchmarks.{self.module}", *self.options]
        found += [f"--rounds={rounds}"] if rounds else []
        return found + [f"--{name}={named[name]}" for name in self.takes if name in named]


MLP = "MLP, 2 workers on one machine, local batch 32"
WIDE = "MLP of 10 million parameters, 2 workers, local batch 32"
CATS = "cats-vs-dogs, 2 workers, local batch 8"
FIT = "fit on one device against a hand-written loop"
LINES = {
    "cats-100": "cats-vs-dogs at 100 Mbit/s",
    "mlp-100": "the MLP at 100 Mbit/s",
    "mlp-1000": "the MLP at 1 Gbit/s",
}
PLAN = (
    Planned("mlp", MLP, "mlp_workers", 2, 240, takes=("tensorflow",)),
    Planned(
        "mlp-plain", f"{MLP}, each side as its plain user has it", "mlp_workers", 1, 150,
        ("--plain", "--windows=6"),
    ),
    Planned("mlp-10m", WIDE, "mlp_workers", 2, 240,
            ("--model=wide",)),
    Planned("fit", FIT, "fit_overhead", 3, 120),
    Planned(
        "fit-plain", f"{FIT}, as a plain user has them", "fit_overhead", 3, 150, ("--plain",)
    ),
    Planned("fit-gpt", f"{FIT}, the recipe's GPT", "fit_overhead", 3, 150, ("--model=gpt",)),
    Planned("divided-gpt", "Ways to divide a model: GPT, 2 processes", "model_parallel", 2, 200,
            ("--parts", "gpt")),
    Planned("divided-cnn", "Ways to divide a model: cats-vs-dogs, 2 processes", "model_parallel", 1,
            150, ("--parts", "cnn")),
    Planned("divided-memory", "Memory of sharded, GPT of 25 million parameters, 4 processes",
            "model_parallel", 1, 150, ("--parts", "memory")),
    Planned("pipeline", "A pipeline of 2 stages and 8 microbatches: GPT", "pipeline", 2, 150),
    Planned("servers", "MLP, 2 workers and 1 parameter server", "parameter_server", 2, 240,
            takes=("tensorflow",)),
    Planned("cats", f"{CATS}, fp32", "cats_vs_dogs_workers", 1, 150,
            takes=("tensorflow",)),
    Planned("cats-bf16", f"{CATS}, bf16", "cats_vs_dogs_workers", 1, 150,
            ("--precision=bf16",), ("tensorflow",)),
    *(
        Planned(f"line-{line}", f"Two machines on a thin line: {title}", "thin_lines", 1, 120,
                (f"--only={line}",))
        for line, title in LINES.items()
    ),
    Planned("images", "Photos from a folder", "images", 1, 200,
            takes=("data", "tensorflow", "grain")),
    Planned("backend", "Plain torch programs on our backend against gloo", "backend", 1, 200),
    Planned("between", "Our backend between 2 machines of 2 ranks, 1 Gbit/s", "between", 1, 180),
    Planned("collective", "All-reduce on one machine", "collective", 1, 60),
    Planned("storage", "central_storage against mirrored, and against one device",
            "central_storage", 1, 120),
    Planned("checkpoint", "Checkpoints of 1 GB", "checkpoint", 3, 120),
    Planned("start", "From the start of the processes to the first step", "start_up", 2, 90),
)  # fmt: skip
"""The commands of the table, in its order."""

LONGER = 4.0
"""How many times as long each may take with ``--long``, or with TensorFlow beside it."""
