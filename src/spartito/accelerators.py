"""What the kinds of devices can do, as torch says of them: nobody else asks for one by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from spartito.errors import UserError
from spartito.names import ENV_SHARE_DEVICES, plural


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What torch can do on the devices of a type.

    Attributes:
        name: What torch calls the type, as ``"cuda"``.
        has_memory: Whether its memory is its own, so that the host's kernels cannot read it.
        has_streams: Whether work can run beside other work on it.
        pins: Whether it copies from and to the host's memory by itself, where that is pinned.
        fuses: Whether torch's optimizers update all parameters in one kernel there.
        has_doubles: Whether it computes in fp64.
        compiles: Whether it compiles a program for each shape, and for each offset in a tensor at
            which a view begins.
    """

    name: str
    has_memory: bool
    has_streams: bool
    pins: bool
    fuses: bool
    has_doubles: bool
    compiles: bool = False

    @property
    def exact(self) -> torch.dtype:
        """The widest floating-point numbers that it has."""
        return torch.float64 if self.has_doubles else torch.float32


def kind_of(device: torch.device | str) -> DeviceKind:
    """What the devices of a type can do; torch is asked once.

    Args:
        device: One of them, which this process can use.

    Returns:
        The same for all of its type.
    """
    return _kind(torch.device(device).type)


_COMPILED = ("tpu",)
"""The types of which torch does not tell that each operation is compiled first."""


@cache
def _kind(name: str) -> DeviceKind:
    if name in ("cpu", "meta"):
        return DeviceKind(name, False, False, False, True, True)
    return DeviceKind(
        name,
        has_memory=True,
        has_streams=hasattr(module_of(name), "Stream"),
        pins=_succeeds(lambda: torch.empty(1, pin_memory=True)),
        fuses=name in _fused_types(),
        has_doubles=_succeeds(lambda: torch.empty(1, dtype=torch.float64, device=name)),
        compiles=name in _COMPILED,
    )


def exact(tensor: Tensor) -> torch.dtype:
    """The widest floating-point numbers of a tensor's device."""
    return kind_of(tensor.device).exact


def wide(tensor: Tensor) -> Tensor:
    """A tensor in the widest floating-point numbers that its device has, in which sums are made."""
    return tensor.to(exact(tensor))


def group_backend(name: str) -> str | None:
    """The backend of ``torch.distributed`` for tasks with a device of a type each, as "nccl".

    Args:
        name: The type; this process need not have any.

    Returns:
        None where torch has none.
    """
    own = dist.Backend.default_device_backend_map.get(name, "")
    return own if name in dist.Backend.backend_capability.get(own, ()) else None


_INTERFACES = {"nccl": "NCCL_SOCKET_IFNAME"}
"""The variable by which a backend is told its network interface."""


def go_over(name: str, interface: str) -> None:
    """Have torch's process group for devices of a type use a network interface, unless one is said.

    Args:
        name: The type.
        interface: As the system calls it.
    """
    if variable := _INTERFACES.get(group_backend(name) or ""):
        os.environ.setdefault(variable, interface)


def gloo_takes(name: str) -> bool:
    """Whether gloo takes tensors of devices of a type, which several tasks may share."""
    return name in dist.Backend.backend_capability["gloo"]


def _succeeds(make: Callable[[], object]) -> bool:
    """Whether torch has it here: it says so in several kinds of errors."""
    try:
        make()
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _fused_types() -> list[str]:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return _get_fused_kernels_supported_devices()


def module_of(device: torch.device | str) -> ModuleType:
    """What torch calls ``torch.cuda`` for NVIDIA's devices.

    Args:
        device: Of the type.

    Raises:
        UserError: If torch has none for it.
    """
    name = torch.device(device).type
    try:
        found: ModuleType = torch.get_device_module(name)
    except RuntimeError as error:
        raise UserError(f"this torch has no module for devices {name!r}", "Install it.") from error
    return found


_PACKAGES = {"tpu": "spartito[tpu]"}
"""What brings torch kinds of devices that it does not know by itself, on machines with one."""

_ONE_EACH = frozenset({"tpu"})
"""Kinds of which a process gets one, with number 0, from those of its machine."""


def own_device(
    name: torch.device | str | None, number: int, count: int, *, computes: bool = True
) -> torch.device:
    """The device that a user named for a task, or that of the machine's which is its own.

    Args:
        name: As torch takes it; None is an accelerator, if the machine has one that knows fp64,
            else the CPU.
        number: The task's among those that compute on this machine, from 0.
        count: How many these are.
        computes: Whether it computes at all.

    Returns:
        The device, with its number where it is an accelerator's.

    Raises:
        UserError: If torch knows no such device, this machine has none, or fewer than tasks.
    """
    device = _named(name) if computes else torch.device("cpu")
    if device.type == "cpu":
        return device
    if device.type == "meta":
        raise UserError("device='meta': tensors there have no values", "Take device='cpu'.")
    there = device_count(device.type)
    if there == 0:
        found = torch.accelerator.current_accelerator(check_available=True)
        raise UserError(
            f"device={str(device)!r}: this machine has none that torch can use",
            f"It has {_listed(found.type)}; or take 'cpu'." if found else "Take device='cpu'.",
        )
    if _has_number(device):
        if device.index >= there:
            raise UserError(
                f"device={str(device)!r}, where torch sees {_listed(device.type)}",
                f"They are numbered from 0 to {there - 1}.",
            )
        return device
    if count > there and not is_set(ENV_SHARE_DEVICES):
        raise UserError(
            f"{count} tasks compute on this machine, where torch sees {_listed(device.type)}",
            f"Start {there}, or let them share: --share-devices, or {ENV_SHARE_DEVICES}=1. "
            "On CPUs: device='cpu'.",
        )
    index = 0 if device.type in _ONE_EACH else max(0, number) % there
    return torch.device(device.type, index)


def use(device: torch.device) -> None:
    """Have torch take a device wherever none is said, so that nothing lands on another one."""
    if _has_number(device) and kind_of(device).has_memory:
        torch.accelerator.set_device_index(device.index)


def begin_backward(device: torch.device) -> None:
    """Let torch's thread for backward passes on a device begin, where that wants something first.

    On some a product of matrices must not be the first that it does: torch warns of that.
    """
    if kind_of(device).has_streams:
        (torch.ones(1, device=device, requires_grad=True) * 2).sum().backward()


def are_shared(device: torch.device, count: int) -> bool:
    """Whether some of ``count`` tasks of this machine compute on one device."""
    return kind_of(device).has_memory and count > device_count(device.type)


@cache
def device_count(name: str) -> int:
    """How many devices of a type this process sees, or saw before it had one of its own."""
    module, current = module_of(name), torch.accelerator.current_accelerator()
    if current is not None and current.type == name:  # some kinds let only torch count them
        return torch.accelerator.device_count()
    return int(module.device_count()) if module.is_available() else 0


def accelerators() -> tuple[str, list[tuple[str, int]]]:
    """What torch knows of the accelerators of this machine, of which it takes one kind.

    Returns:
        The type, "" without any, and each device's name and bytes of memory, 0 where nobody tells.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "", []
    module = module_of(found)
    name_of = getattr(module, "get_device_name", lambda index: found.type)
    return found.type, [
        (str(name_of(index)), _memory_of(module, index))
        for index in range(device_count(found.type))
    ]


def _memory_of(module: ModuleType, index: int) -> int:
    if hasattr(module, "get_device_properties"):
        return int(getattr(module.get_device_properties(index), "total_memory", 0))
    if hasattr(module, "recommended_max_memory"):  # there is one of them
        return int(module.recommended_max_memory())
    return 0


def device_memory(device: torch.device) -> tuple[int, int, float] | None:
    """What this process has in use on a device, the most that it had, and what is left there.

    Args:
        device: One that this process uses.

    Returns:
        Bytes; None where its memory is the host's, or torch does not tell.
    """
    if not kind_of(device).has_memory:
        return None
    try:
        used = torch.accelerator.memory_allocated(device)
        peak = torch.accelerator.max_memory_allocated(device)
        kept = torch.accelerator.memory_reserved(device) - used
        free, _ = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None
    return used, peak, free + kept


def is_set(variable: str) -> bool:
    """Whether a variable of the environment says yes.

    Raises:
        UserError: If it says neither yes nor no.
    """
    text = os.environ.get(variable, "").lower()
    if text not in ("", "0", "1", "false", "true"):
        raise UserError(f"{variable}={text!r}", "It is 1 or 0.")
    return text in ("1", "true")


def _named(name: torch.device | str | None) -> torch.device:
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        # One without fp64, as a Mac's, is taken where it is asked for: sums are less exact there.
        is_exact = found is not None and kind_of(found).has_doubles
        return torch.device(found.type if found is not None and is_exact else "cpu")
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        if package := _PACKAGES.get(str(name).partition(":")[0]):
            raise UserError(
                f"device={name!r}: torch sees none on this machine",
                f"It does where there is one, after pip install '{package}'. Or take 'cpu'.",
            ) from error
        hint = "As 'cpu', 'cuda' for NVIDIA's and AMD's, 'cuda:1', 'xpu' for Intel's, 'mps', 'tpu'."
        raise UserError(f"device={name!r} is none of torch's", hint) from error


def _has_number(device: torch.device) -> bool:
    return ":" in str(device)


def _listed(name: str) -> str:
    return plural(device_count(name), f"{name} device")


def rounding_id(device: torch.device) -> int:
    """A number that devices share which round alike, so that their replicas stay equal in bits."""
    if kind_of(device).has_memory:
        name = getattr(module_of(device), "get_device_name", lambda each: each.type)
        return crc32(str(name(device)).encode())
    # A kernel's loop over the rest of a thread's part rounds differently from its vector loop.
    return crc32(f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}".encode())


def random_states() -> dict[str, list[Tensor]]:
    """Where the generators of this process's accelerators are, by type; those in use alone."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return {}
    module = module_of(found)
    if not getattr(module, "is_initialized", lambda: True)():
        return {}
    if hasattr(module, "get_rng_state_all"):
        return {found.type: list(module.get_rng_state_all())}
    return {found.type: [_state_of(found)]}


def set_random_states(name: str, states: list[Tensor]) -> None:
    """Put the generators of a type where `random_states` found them."""
    module = module_of(name)
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    else:
        _put(torch.device(name), *states)


def _state_of(device: torch.device) -> Tensor:
    """Where a device's generator is. Some kinds tell nobody but torch itself."""
    module = module_of(device)
    if not hasattr(module, "device"):  # there is one of them
        only: Tensor = module.get_rng_state()
        return only
    states: list[Tensor] = get_device_states(torch.empty(0, device=device))[1]
    return states[0]


def _put(device: torch.device, state: Tensor) -> None:
    module = module_of(device)
    if not hasattr(module, "device"):
        module.set_rng_state(state)
    else:
        index = torch.empty(0, device=device).get_device()
        set_device_states([index], [state], device_type=device.type)


def seed_generators(device: torch.device, number: int) -> None:
    """Have what this process draws, on the CPU and on its device, follow from a number alone."""
    torch.default_generator.manual_seed(number)
    if kind_of(device).has_memory:
        module_of(device).manual_seed(number)


def generator_states(device: torch.device) -> list[Tensor]:
    """Where the generators of the CPU and of this process's device are."""
    states = [torch.get_rng_state()]
    if kind_of(device).has_memory:
        states.append(_state_of(device))
    return states


def set_generator_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Put the generators where `generator_states` found them, here or in another process."""
    torch.set_rng_state(states[0])
    if kind_of(device).has_memory:
        _put(device, states[1])


class SideStream:
    """Work that runs on a device beside what the caller has it do; on others it is done at once."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def beside(self, device: torch.device) -> AbstractContextManager[None]:
        """A block whose work begins when all that was asked for before is done.

        Args:
            device: Where it is done.
        """
        return self._on(device) if kind_of(device).has_streams else nullcontext()

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            yield
