"""What `python -m benchmarks.all` runs, in which order, how often and how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planned:
    """One command: ``rounds`` in the short form, and seconds after which it is ended.

    With 0 rounds it has its own number: where these are seeds or steps, not turns of a race.
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
"""The commands of the table, in its order: an hour at most."""

FURTHER = (
    Planned("other-trainers", "fit beside other trainers: the MLP", "other_trainers", 1, 900,
            takes=("keras",)),
    Planned("pushes", "A push of 11 MB to a parameter server and back", "transport", 2, 240,
            ("--size=11",)),
    Planned("slow-worker", "One of 2 workers at a quarter of the speed", "slow_worker", 1, 600),
    Planned("asynchronous", "Accuracy on the digits: asynchronous against synchronous",
            "asynchronous_accuracy", 0, 600),
    Planned("stale", "What to do with stale gradients: accuracy on the digits", "stale_accuracy",
            0, 900),
    Planned("compressed", "Accuracy on the digits: compressed against exact",
            "compressed_accuracy", 0, 600),
    Planned("hierarchical", "Two machines with two replicas each", "hierarchical", 1, 300),
    Planned("slow-line", "Groups that meet now and then, 100 Mbit/s: the MLP", "slow_line", 1, 200,
            ("--windows=10",)),
    Planned("slow-line-cats", "Groups that meet now and then, 100 Mbit/s: cats-vs-dogs",
            "slow_line", 1, 600, ("--model=cats",)),
    Planned("group-bytes", "Bytes that leave a machine: the MLP", "group_bytes", 1, 240),
    Planned("group-bytes-cats", "Bytes that leave a machine: cats-vs-dogs", "group_bytes", 1, 400,
            ("--model=xception",)),
    Planned("local-accuracy", "Accuracy on the digits: groups that meet, and mirrored",
            "local_accuracy", 0, 1200),
    Planned("decoupled-slow", "Groups over parameter servers: one at a quarter of the speed",
            "decoupled", 1, 400, ("--parts", "slow")),
    Planned("decoupled-killed", "Groups over parameter servers: one of them is killed",
            "decoupled", 1, 400, ("--parts", "killed")),
    Planned("gaussians", "Asynchronous local SGD on a mixture of Gaussians", "gaussian_mixture",
            1, 400),
    Planned("diloco", "Eight workers that meet after 20, 100 or 500 updates: a GPT", "diloco", 1,
            1500),
    Planned("diloco-long", "Eight workers that meet after 500 updates, 100 times: a GPT",
            "diloco_long", 1, 900),
    Planned("recovery", "SIGKILL of a worker: until all step again", "recovery", 1, 200),
    Planned("recovery-sharded", "The same, of replicas that keep shards", "recovery", 1, 200,
            ("--strategy=sharded",)),
    Planned("progress", "A failure every 60 s, 4 workers", "recovery", 1, 1800,
            ("--every=60", "--minutes=20", "--workers=4")),
    Planned("standing-still", "SIGSTOP of any task: until it is named", "standing_still", 1, 200),
    Planned("lost-task", "SIGKILL of a server with replicas=2", "lost_task", 1, 300),
    Planned("backup", "What backups every 100 steps cost: the MLP", "backup", 2, 240),
    Planned("backup-cats", "What backups every 100 steps cost: cats-vs-dogs", "backup", 1, 600,
            ("--model=cats-vs-dogs",)),
    Planned("tls-mlp", "TLS over the loopback: the MLP", "tls", 1, 240, ("--models", "mlp")),
    Planned("tls-cats", "TLS over the loopback: cats-vs-dogs", "tls", 1, 400,
            ("--models", "xception")),
    Planned("data-wait", "Time spent waiting for photos", "data_wait", 1, 400, takes=("data",)),
    Planned("packed-reading", "Packed files in shuffled order", "packed_reading", 1, 400,
            takes=("data",)),
    Planned("stores", "Data in stores: faults, memory, the first batch", "stores", 1, 200,
            ("--parts", "faults", "memory", "first")),
    Planned("block-order", "Accuracy on sorted digits: blocks permuted, or everything",
            "block_order", 0, 900),
    Planned("sharded", "Memory and time of a step under sharded, GPT", "sharded", 1, 300),
    Planned("step-cats", "One step of cats-vs-dogs in one process", "step_cats_vs_dogs", 1, 300),
    Planned("exact", "Losses of mirrored against one device", "equality", 1, 1200),
    Planned("exact-96", "The same, photos of 96x96", "equality", 1, 900, ("--size=96",)),
    Planned("exact-mesh", "Losses of a model on a mesh against plain torch",
            "model_parallel_equality", 0, 600),
    Planned("ray", "Ray, two nodes on this machine", "on_ray", 1, 400),
    Planned("containers", "MLP in two containers of one CPU each", "containers", 1, 600),
    Planned("beside", "Two machines: sums beside backward, or at its end", "beside_backward", 1,
            600),
    Planned("line-rate", "What comes through the lines of --link", "line_rate", 3, 120),
)  # fmt: skip
"""The commands behind all other figures of the docs: hours, with ``--all`` or by name."""

OF_THEIR_OWN = {
    "all": "runs the others",
    "gpu": "makes a page of its own, on a machine with a GPU",
    "predictions": "wants a machine without other work, and half an hour",
    "scales": "writes docs/explanation/scales.md, from profiles of a machine without other work",
    "slow_networks": "writes docs/guides/slow-networks.md, and goes on where it was ended",
    "step_parts": "prints parts of a step, nothing that has a target",
    "study": "writes docs/explanation/study.md, from photos and containers",
    "survival": "writes docs/explanation/survival.md, and goes on where it was ended",
    "tpu_memory": "wants two environments of its own, and has a table in docs/guides/tpu.md",
    "versions": "needs another checkout",
}
"""Commands that no list runs, and why: `benchmarks/README.md` has how to call them."""

LONGER = 4.0
"""How many times as long each may take with ``--long``, or with TensorFlow beside it."""
