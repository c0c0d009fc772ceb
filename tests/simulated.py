"""A simulated accelerator: the device ``sim``, with memory that the host cannot touch.

Its kernels are torch's for CPUs (`simulated.cpp`, compiled once into ``build/``). Tensors of the
CPU beside its own are an error, as on a real one; `counts` has how often the host read values, what
went across, and how many operations there were. A process that has called `register` has the device
for as long as it lives, and torch takes it for the accelerator of this machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from spartito.names import ENV_SHARE_DEVICES

NAME = "sim"
DEVICES = 2
SOURCE = Path(__file__).with_name("simulated.cpp")
BUILD = Path(__file__).parents[1] / "build" / "simulated"

READS, OPERATIONS = "reads", "operations"
TO_HOST, TO_DEVICE = "copies to host", "copies to device"
BYTES_TO_HOST, BYTES_TO_DEVICE = "bytes to host", "bytes to device"
KINDS = (READS, OPERATIONS, TO_HOST, TO_DEVICE, BYTES_TO_HOST, BYTES_TO_DEVICE)

_registered = False


class Module:
    """``torch.sim``: what torch asks of the module of a device."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return DEVICES

    def get_device_name(self, device: Any = None) -> str:
        return "Simulated"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def current_device(self) -> int:
        return int(torch.ops.sim.device_now())

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            torch.ops.sim.choose(index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: Any = None) -> None:
        """Whatever was asked for is done."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.ops.sim.seed(seed & (2**63 - 1))

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        found: torch.Tensor = torch.ops.sim.state()
        return found

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.ops.sim.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register(module: Module | None = None) -> None:
    """Let torch have the device, with a module of its own; again changes nothing."""
    global _registered
    if _registered:
        return
    library = built()
    module = Module() if module is None else module
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.load_library(str(library))
    torch.ops.sim.have(module.device_count())
    _registered = True


def is_here() -> bool:
    """Whether this process has the device."""
    return _registered


def begin() -> None:
    """Be one of any number of tasks that compute on the device."""
    register()
    os.environ[ENV_SHARE_DEVICES] = "1"


def built() -> Path:
    """The compiled device, for this text and this torch; of several processes one compiles it."""
    text = SOURCE.read_bytes() + torch.__version__.encode()
    library = BUILD / f"{sha256(text).hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed
        if not library.exists():
            with TemporaryDirectory(dir=BUILD) as folder:
                made = Path(folder, "sim.so")
                _compile(made)
                made.replace(library)
    return library


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _compile(library: Path) -> None:
    home = Path(torch.__file__).parent
    folders = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include"]
    if compiler() is None:
        raise FileNotFoundError(
            "the simulated accelerator is compiled: install g++, or name a C++ compiler as CXX"
        )
    command = [str(compiler()), "-shared", "-fPIC", "-O0", "-std=c++20", "-w", str(SOURCE)]
    command += [f"-I{folder}" for folder in folders]
    command += ["-o", str(library), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True, capture_output=True, text=True)


class Counts(dict[str, int]):
    """What was done since `counting` began, by its kind."""


def _now() -> dict[str, int]:
    return {kind: torch.ops.sim.counted(kind) for kind in KINDS}


@contextmanager
def counting() -> Iterator[Counts]:
    """What a block does with the device; the counts are there when it ends."""
    counts, before = Counts(), _now()
    yield counts
    counts.update({kind: value - before[kind] for kind, value in _now().items()})
