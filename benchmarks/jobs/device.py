"""One check of training on a device, by name; its last line is JSON with what it measured.

A check that does not hold raises; one that has nothing to check here raises `Skipped`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from benchmarks.jobs.divided import RACES, TASKS
from benchmarks.jobs.plain import make_work, mlp
from benchmarks.launching import ROOT, run_job, run_roles
from spartito.launch.processes.roles import Roles
from spartito.names import ENV_SHARE_DEVICES, ENV_STRATEGY

Found = dict[str, float | str]
"""What a check measured, by name; names end with what it is measured in."""

EXACT = 1e-10  # of losses in fp64, on devices that add up in other orders


class Skipped(Exception):
    """There is nothing to check here, and why."""


def facts(device: str) -> Found:
    """What the machine has."""
    found: Found = {"torch": torch.__version__, "Python": sys.version.split()[0]}
    for number in range(torch.cuda.device_count() if device == "cuda" else 0):
        seen = torch.cuda.get_device_properties(number)
        found[f"GPU {number}"] = f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB"
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def numbers(device: str) -> Found:
    """fp64 training: losses as in plain torch on the same device, and as on the CPU."""
    ours, plain, host = _train(device), _plain(device), _train("cpu")
    differences = _difference(ours, plain), _difference(ours, host)
    _check(max(differences) <= EXACT, f"losses {ours}, in plain torch {plain}, on the CPU {host}")
    return {"against plain torch": differences[0], "against the CPU": differences[1]}


def low_precision(device: str) -> Found:
    """bf16 and fp16: the loss falls, beside that of fp32."""
    found: Found = {}
    whole = _train(device, dtype=torch.float32)
    for precision in ("bf16", "fp16") if device == "cuda" else ("bf16",):
        losses = _train(device, dtype=torch.float32, precision=precision)
        _check(losses[-1] < losses[0], f"{precision}: the loss does not fall: {losses}")
        found[f"{precision}: last loss / fp32's"] = losses[-1] / whole[-1]
    return found


def compiled(device: str) -> Found:
    """torch.compile: the losses of the module as it is."""
    began = time.perf_counter()
    made = _train(device, dtype=torch.float32, change=torch.compile)
    seconds = time.perf_counter() - began
    difference = _difference(made, _train(device, dtype=torch.float32))
    _check(difference < 1e-4, f"losses differ by {difference}")
    return {"against eager": difference, "compiling and training (s)": seconds}


def checkpoints(device: str) -> Found:
    """From the CPU to the device and back: as if training had stayed on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for number, where in enumerate(("cpu", device, "cpu")):
            trainer = _trainer(where, torch.float64)
            if number:
                trainer.load(f"{folder}/{number - 1}")
            history = trainer.fit(_data(torch.float64), epochs=2 * number + 2, verbose=False)
            parts += history.history["loss"][-2:]
            trainer.save(f"{folder}/{number}")
            trainer.strategy.close()
    difference = _difference(parts, _train("cpu", epochs=6))
    _check(difference <= EXACT, f"losses differ by {difference}")
    return {"against 6 epochs on the CPU": difference}


def fit_speed(device: str) -> Found:
    """`fit` against a hand-written loop with the same batches, loss and accuracy."""
    found: Found = {}
    for name in ("mlp", "wide"):
        fit, loop = _seconds_per_step(name, device, steps=300 if device == "cuda" else 40)
        found[f"{name}: fit / hand-written loop (times)"] = loop / fit
        found[f"{name}: a step of fit (us)"] = fit * 1e6
    return found


def memory(device: str) -> Found:
    """The device's peak in `fit` against a hand-written loop."""
    if device != "cuda":
        raise Skipped("only a GPU counts its memory")
    x, y = torch.rand(512, 784), torch.randint(0, 10, (512,))
    peaks = []
    for ours in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = mlp((4096, 4096, 4096))
        if ours:
            trainer = sp.Trainer(
                model,
                optimizer=_adam(model),
                loss=nn.CrossEntropyLoss(),
                metrics=["accuracy"],
                strategy=sp.OneDeviceStrategy(device=device),
            )
            trainer.fit(sp.data.arrays(x, y).batch(64), epochs=2, verbose=False)
            trainer.strategy.close()
            del trainer
        else:
            model = model.to(device)
            _epoch(model, _adam(model), x, y, 64, device)
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        del model
    _check(peaks[1] < 1.1 * peaks[0], f"MiB of the loop and of fit: {peaks}")
    return {"fit (MiB)": peaks[1], "hand-written loop (MiB)": peaks[0]}


def denormals(device: str) -> Found:
    """Training leaves the flag of this thread, and the device's denormal numbers, as they were."""
    small = {where: torch.tensor([1e-39], device=where) for where in {"cpu", device}}
    before = {where: (tensor * 0.5).cpu().item() for where, tensor in small.items()}
    _train(device, dtype=torch.float32)
    after = {where: (tensor * 0.5).cpu().item() for where, tensor in small.items()}
    _check(before == after, f"half of 1e-39 was {before}, and is {after} after training")
    return {f"half of 1e-39 on {where}": value for where, value in after.items()}


STRATEGIES = {
    "mirrored": 2,
    "mirrored(communication='ddp')": 2,
    "multi_worker_mirrored(communication='sockets')": 2,
    "central_storage": 2,
    "sharded(zero=3, block_bytes=1000)": 2,
    "sharded(zero=1)": 2,
    "sharded(communication='fsdp', block_bytes=1000)": 2,
    "mesh(mesh={'data': 2, 'model': 2}, zero=1)": 4,
    "pipeline(stages=2)": 2,
    "local_sgd(groups=1, inside=sharded)": 2,
    "parameter_server(max_staleness=0)": 2,
}
"""Each with the tasks that compute; all have the numbers of one device. Those of local_sgd with
several groups are its own, which tests compare with the published algorithms."""


def strategies(device: str) -> Found:
    """Each strategy in fp64: losses as on one device; fewer GPUs than tasks are shared."""
    alone = _train(device, epochs=3)
    chosen = list(STRATEGIES) if device == "cuda" else list(STRATEGIES)[:2]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as several:
        found = dict(zip(chosen, several.map(partial(_told, device), chosen), strict=True))
    differences = {name: _difference(losses, alone) for name, losses in found.items()}
    _check(max(differences.values()) <= EXACT, f"losses differ: {differences}")
    return {"strategies": float(len(found)), "the largest difference": max(differences.values())}


def _told(device: str, name: str) -> list[float]:
    """The losses under a strategy, in a program of its own: several run beside each other."""
    command = [sys.executable, "-m", "benchmarks.jobs.device", "strategy", f"--device={device}"]
    done = subprocess.run([*command, f"--name={name}"], cwd=ROOT, capture_output=True, text=True)
    _check(done.returncode == 0, f"{name}: {done.stdout[-1000:]} {done.stderr[-1000:]}")
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def _strategy(device: str, name: str) -> list[float]:
    """The losses under a strategy, of its tasks."""
    tasks = STRATEGIES[name]
    env = {ENV_STRATEGY: name, ENV_SHARE_DEVICES: "1"}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    words = ["-m", "benchmarks.jobs.device", "replica", f"--device={device}"]
    if name.startswith("parameter_server"):
        roles = Roles(tasks, ps=1)
        told = run_roles(words, roles=roles, limit=150.0, env=env, ends_alone=True)
    else:
        told = run_job(words, workers=tasks, limit=150.0, env=env)
    _check(told["ok"], str(told))
    losses: list[float] = told["losses"]
    return losses


def nccl(device: str) -> Found:
    """A sum by torch's process group for the devices (NCCL): as many tasks as there are devices."""
    count = 2 if device == "cpu" else torch.accelerator.device_count()
    words = ["-m", "benchmarks.jobs.device", "join", f"--device={device}"]
    found: Found = run_job(words, workers=count, limit=50.0)
    return found


def _join(device: str) -> None:
    """One task of `nccl`."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend := dist.get_default_backend_for_device(device))
    tensor = torch.full((1000,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    total = tensor.mean().item()
    dist.destroy_process_group()
    _check(total == size * (size + 1) / 2, f"the sum is {total}")
    if rank == 0:
        print(json.dumps({"backend": backend, "tasks": float(size)}), flush=True)


def sharded_speed(device: str) -> Found:
    """`sharded` by FSDP2 against torch's bare `fully_shard`, on two devices: time, peak memory."""
    return _race("sharded", device)


def mesh_speed(device: str) -> Found:
    """`mesh` against torch's `parallelize_module`, on two devices: time and peak memory."""
    return _race("mesh", device)


def pipeline_speed(device: str) -> Found:
    """`pipeline` against torch's own 1F1B, on two devices: time and peak memory."""
    return _race("pipeline", device)


def _race(name: str, device: str) -> Found:
    """A strategy against what torch has, in turns; a ratio below 1 is in our favour."""
    if device != "cpu" and torch.accelerator.device_count() < TASKS:
        raise Skipped("it needs two GPUs, one for each task")
    sides = name, RACES[name]
    size = ["--size=tiny", "--windows=1", "--steps=2"] if device == "cpu" else ["--size=gpt-25M"]
    told: dict[str, list[Any]] = {side: [] for side in sides}
    for turn in range(1 if device == "cpu" else 2):
        for side in sides if turn == 0 else reversed(sides):
            words = ["-m", "benchmarks.jobs.divided", side, f"--device={device}", *size]
            told[side].append(run_job(words, workers=TASKS, limit=80.0))
    losses = [runs[0]["loss"] for runs in told.values()]
    _check(abs(losses[0] / losses[1] - 1) < 1e-4, f"losses of the first step: {losses}")
    ours, theirs = (min(min(run["seconds"]) for run in told[side]) for side in sides)
    found: Found = {f"{name} / {sides[1]}: time (times)": ours / theirs}
    if device != "cpu":
        peaks = [max(run["peak"] for run in told[side]) for side in sides]
        found[f"{name} / {sides[1]}: peak memory (times)"] = peaks[0] / peaks[1]
    return found | {
        f"{side}: a step (us)": value * 1e6
        for side, value in zip(sides, (ours, theirs), strict=True)
    }


def contracts(device: str) -> Found:
    """The contract suite of the strategies on this device."""
    env = {**os.environ, "SPARTITO_TEST_DEVICE": device}
    quick = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    quick += ["--numprocesses", str(min(8, os.cpu_count() or 1))]
    only = [] if device == "cuda" else ["-k", "one_device and plain"]
    command = [sys.executable, "-m", "pytest", *quick, *only, "tests/strategies/test_contracts.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    _check(done.returncode == 0, "\n".join([last, *failed]))
    return {"pytest": last.strip("= ")}


def _replica(device: str) -> None:
    """One task of `strategies`."""
    strategy = sp.strategy()
    losses = _train(device, epochs=3, strategy=strategy)
    if strategy.is_chief:
        print(json.dumps({"ok": True, "losses": losses}), flush=True)


def _seconds_per_step(name: str, device: str, steps: int) -> tuple[float, float]:
    """Of `fit` and of a hand-written loop: the fastest of three epochs in turns, after one."""
    work, ours = make_work(name, 1), make_work(name, 1)
    trainer = sp.Trainer(
        ours.model,
        optimizer=_adam(ours.model),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=sp.OneDeviceStrategy(device=device),
    )
    size = work.local_batch
    rows = torch.arange(steps * size) % len(work.x)
    x, y = work.x[rows], work.y[rows]
    chain = sp.data.arrays(x, y).shuffle().batch(size)
    model = work.model.to(device)
    optimizer = _adam(model)

    def timed(run: Callable[[], Any]) -> float:
        began = time.perf_counter()
        run()
        _wait(device)
        return (time.perf_counter() - began) / steps

    def fit() -> float:
        return timed(lambda: trainer.fit(chain, epochs=1, verbose=False))

    def loop() -> float:
        return timed(lambda: _epoch(model, optimizer, x, y, size, device))

    pairs = [(fit(), loop()) for _ in range(4)][1:]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def _data(dtype: torch.dtype) -> sp.data.Dataset:
    x, y = _rows(dtype)
    return sp.data.arrays(x, y).batch(24)


def _rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ten classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(7)
    y = torch.arange(240) % 10
    centres = torch.randn(10, 784, generator=generator, dtype=torch.float64)
    x = centres[y] + 2 * torch.randn(240, 784, generator=generator, dtype=torch.float64)
    return x.to(dtype), y


def _trainer(
    device: str,
    dtype: torch.dtype,
    precision: str = "fp32",
    change: Callable[[nn.Module], Any] = lambda model: model,
    strategy: Any = None,
) -> sp.Trainer:
    torch.manual_seed(3)
    model = change(mlp((32, 32)).to(dtype))
    return sp.Trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        strategy=sp.OneDeviceStrategy(device=device) if strategy is None else strategy,
        precision=precision,
    )


def _train(
    device: str, *, dtype: torch.dtype = torch.float64, epochs: int = 4, **options: Any
) -> list[float]:
    """The loss of each epoch."""
    trainer = _trainer(device, dtype, **options)
    history = trainer.fit(_data(dtype), epochs=epochs, verbose=False)
    trainer.strategy.close()
    losses: list[float] = history.history["loss"]
    return losses


def _plain(device: str) -> list[float]:
    """As `_train`, in plain torch."""
    torch.manual_seed(3)
    model = mlp((32, 32)).double().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = (part.to(device) for part in _rows(torch.float64))
    losses = []
    for _ in range(4):
        total = 0.0
        for first in range(0, 240, 24):
            loss = nn.functional.cross_entropy(model(x[first:][:24]), y[first:][:24])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * 24
        losses.append(total / 240)
    return losses


def _epoch(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, size: int, device: str
) -> tuple[float, float]:
    """One pass in a new order, with loss and accuracy, read at its end."""
    order = torch.randperm(len(x))
    total, right = torch.zeros(2, device=device)
    for first in range(0, len(x), size):
        rows = order[first : first + size]
        inputs, labels = x.index_select(0, rows).to(device), y.index_select(0, rows).to(device)
        output = model(inputs)
        loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach() * len(rows)
        right += (output.detach().argmax(1) == labels).sum()
    return total.item() / len(x), right.item() / len(x)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _difference(left: list[float], right: list[float]) -> float:
    """The largest between two lists of losses, NaN if there is one."""
    pairs = list(zip(left, right, strict=True))
    return torch.tensor(pairs, dtype=torch.float64).diff(dim=1).abs().max().item()


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


CHECKS: Mapping[str, Callable[[str], Found]] = {
    check.__name__: check
    for check in (
        *(facts, numbers, denormals, low_precision, checkpoints, nccl, strategies),
        *(compiled, fit_speed, memory, sharded_speed, mesh_speed, pipeline_speed, contracts),
    )
}
"""All checks, the quick ones first; each is given the kind of device."""


def main() -> None:
    """Run the check that the command line names."""
    options = argparse.ArgumentParser()
    options.add_argument("check", choices=[*CHECKS, "replica", "strategy", "join"])
    options.add_argument("--name", choices=list(STRATEGIES), default="mirrored")
    options.add_argument("--device", choices=("cuda", "cpu"), required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.check in ("replica", "join"):
        (_replica if given.check == "replica" else _join)(given.device)
        return
    if given.check == "strategy":
        print(json.dumps(_strategy(given.device, given.name)), flush=True)
        return
    try:
        found: dict[str, Any] = {"status": "ok", "found": CHECKS[given.check](given.device)}
    except Skipped as reason:
        found = {"status": "skipped", "reason": str(reason)}
    except AssertionError as reason:
        found = {"status": "failed", "reason": str(reason)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(ROOT)))
    main()
