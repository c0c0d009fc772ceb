"""A model's forward pass as a row of operations, of which each task computes its stages.

The user's own ``forward`` runs on every task. A function mode of torch sees each operation that it
calls: those of other stages are left out and give what was noted of them, tensors without data, in
the first pass (`record`, which computes nothing and needs no values). So the model stays as it is,
and Python code in it runs as ever: loops, branches on shapes, dicts.

What depends on the model's input alone, as a mask or positions, is computed on every task; what
depends on parameters or on buffers that the pass changes, or draws at random, belongs to the stage
whose part of the row it is in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as regions
from torch.utils._pytree import tree_leaves, tree_map

from spartito.engine.logged import listening
from spartito.engine.randomness.keyed_draws import Draws, Recording
from spartito.errors import UserError
from spartito.mesh.functions import taking
from spartito.mesh.sharded_tensor import Sharded, as_it_is, here_of, is_transformed
from spartito.mesh.showing_modules import inside
from spartito.pipeline.kept_state import differing, held_by, untouched
from spartito.pipeline.microbatches import each_tensor

META, CPU = torch.device("meta"), torch.device("cpu")
_LOOKS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero"}
UNCOUNTED = {
    getattr(Tensor, name).__get__
    for name in "shape dtype device layout ndim requires_grad is_leaf grad_fn is_meta".split()  # noqa: SIM905
} | {Tensor.as_subclass}
"""What tells of a tensor without its values. It is no operation: a `Sharded` one tells itself."""
_PLAIN = (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout)


_NORMS = {F.batch_norm: 1, F.instance_norm: 1, torch.batch_norm: 3, torch.instance_norm: 3}
"""Norms with running statistics, and the position of the first of these among their arguments."""
_NOT_IN_PLACE = {"__invert__", "__index__", "__int__", "__iter__"}


def changes_first(func: Any) -> bool:
    """Whether an operation changes its first tensor, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """What this task has of each, also where a forward pass runs and shows them whole."""
    return {name: here_of(buffer) for name, buffer in model.named_buffers()}


def unchanged(value: Any) -> Any:
    """The value itself: what stands for nothing else."""
    return value


def _looks(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation gives a value to Python, or the shape of its result hangs on values."""
    name = getattr(func, "__name__", "")
    if name in _LOOKS:
        return True
    return name == "__getitem__" and any(_chooses(leaf) for leaf in tree_leaves(args[1]))


def _chooses(index: Any) -> bool:
    """Whether its values tell how much is taken: a mask, or a slice up to a value."""
    if isinstance(index, slice):
        ends = (index.start, index.stop, index.step)
        return any(isinstance(each, Tensor) for each in ends)
    return is_mask(index)


def is_mask(index: Any) -> bool:
    """Whether an index takes what is True in it; of a tensor without data if it is on the host."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _memory_of(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        raise UserError(
            f"a {str(tensor.layout).removeprefix('torch.')} tensor under pipeline, which records "
            "operations on dense ones",
            "Give its indices and values, or take mirrored or sharded.",
        )
    memory: int = tensor.untyped_storage()._cdata
    return memory


def tell(func: Any, args: tuple[Any, ...], device: torch.device) -> Any:
    """What one of `UNCOUNTED` says; of a tensor without data that it will be on ``device``."""
    made = func(*args)
    return device if isinstance(made, torch.device) and made.type == "meta" else made


_OF_HOOKS = {Tensor.detach, torch._C._set_grad_enabled}


def is_of_torch(func: Any) -> bool:
    """Whether a region of `torch.utils.checkpoint` keeps a tensor, which is nothing of the model's.

    It does so in another way where the region is computed again.
    """
    if func not in _OF_HOOKS:
        return False
    callers = islice(walk_stack(sys._getframe(2)), 3)  # no_grad() is two of them
    codes = ((frame.f_code.co_name, frame.f_globals["__name__"]) for frame, _ in callers)
    return ("pack_hook", regions.__name__) in codes


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a module is called.

    Args:
        path: Its name in the model.
        call: How often it was called before.
        index: The operations before.
    """

    path: str
    call: int
    index: int


@dataclass(slots=True)
class Value:
    """A result without data, and where it is made and used last."""

    tensor: Tensor
    born: int
    last: int

    @property
    def here(self) -> Tensor:
        """What a task has of it: all, or the shard of a tensor that is cut."""
        return here_of(self.tensor)


@dataclass
class Program:
    """The operations of one forward pass, by their index.

    Attributes:
        functions: What torch was asked for.
        results: What came of it; tensors without data where it belongs to a stage.
        shared: Whether every task computes it.
        draws: How many random numbers or tensors it draws.
        takes: The ids of the values that it takes.
        names: The modules that are called, and when.
        values: Results that belong to a stage, by their id.
        parameters: The operations that use a parameter, by its name.
        buffers: The same of buffers, where it belongs to a stage.
        changed: The buffers that are changed in place, once for each microbatch.
        set: The buffers that are replaced by others, of which each task makes its own.
        looks: The operations after which shapes or branches may depend on the values of the input.
        output: What the model returns.
        drawn: What all of it draws at random.
        device: Where it is computed.
    """

    functions: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    shared: list[bool] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    takes: list[tuple[int, ...]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    parameters: dict[str, list[int]] = field(default_factory=dict)
    buffers: dict[str, list[int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    set: list[str] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    output: Any = None
    drawn: Draws = field(default_factory=list)
    device: torch.device = CPU

    def crossing(self, index: int) -> list[Value]:
        """What is made before the operation ``index`` and used from it on, in order."""
        return [value for value in self.values.values() if value.born < index <= value.last]

    def find(self, path: str, call: int) -> int | None:
        """The operation with which a call of the module ``path`` begins; None: it is not called."""
        for entry in self.entries:
            if (entry.path, entry.call) == (path, call):
                return entry.index
        return None


def record(model: nn.Module, call: Callable[[], Any], device: torch.device = CPU) -> Program:
    """Note the operations of ``call``, a forward pass of ``model``, without computing them.

    Args:
        model: Some of its parameters may be without data already.
        call: Makes the pass, with its data.
        device: Where it is computed.

    Returns:
        The operations; they are those of any pass with data of the same shapes, unless it looks
        at its input (`spartito.pipeline.branches`).

    Raises:
        UserError: Names the module whose forward pass looks at values, so that its operations
            cannot be known before.
    """
    before = held_by(model)
    mode = _recorded(model, call, device, ())
    if mode.program.changed or differing(before, held_by(model)):
        before = held_by(model)
        mode = _recorded(model, call, device, mode.program.changed)
        for path, key in differing(before, held_by(model)):
            old = before.get((path, key))
            if isinstance(old, Tensor) and id(old) not in mode.given:
                continue  # it is left there for others
            raise UserError(
                f"a pipeline cannot train the model: each forward pass changes {key!r} of "
                f"{path or 'the model'}, and tasks make other numbers of passes, and parts of them",
                "Make it a buffer (register_buffer), and change its elements in place.",
            )
    return mode.program


def _recorded(
    model: nn.Module, call: Callable[[], Any], device: torch.device, changing: Collection[str]
) -> _Recorder:
    """One pass, in which what uses the buffers ``changing`` belongs to a stage."""
    mode = _Recorder(model, device, changing)
    before = _buffers_of(model)
    empty = {name for name, buffer in before.items() if buffer.is_meta}
    with untouched(model):
        with (
            mode.watching(),
            Recording() as mode.recording,
            listening(None),
            inside(),
            taking(unchanged),
            mode,
        ):
            output = call()
        for name, buffer in _buffers_of(model).items():
            if buffer.is_meta and name not in empty:
                raise UserError(
                    f"a pipeline cannot train the model: its forward pass sets the buffer {name!r} "
                    "to a tensor that comes of parameters, and one task alone has its values",
                    "Change the elements in place, as buffer.copy_() does.",
                )
            if before.get(name) is not buffer:
                mode.program.set.append(name)
    mode.program.output, mode.program.drawn = output, mode.recording.made
    each_tensor(output, lambda leaf: mode.use(leaf, len(mode.program.functions)))
    return mode


class _Recorder(TorchFunctionMode):
    """Notes each operation, and computes those of stages on tensors without data."""

    recording: Recording

    def __init__(self, model: nn.Module, device: torch.device, changing: Collection[str]) -> None:
        super().__init__()
        self.program, self._changing = Program(device=device), changing
        buffers = _buffers_of(model)
        self._names = {id(here_of(tensor)): name for name, tensor in model.named_parameters()}
        self._buffers = {id(tensor): name for name, tensor in buffers.items()}
        self._memory = {_memory_of(tensor): name for name, tensor in buffers.items()}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._fresh: set[int] = set()  # the memory of what is made on every task in this pass
        self.given: set[int] = set()
        """The ids of all that operations took."""
        self._calls: dict[str, int] = {}
        self._inside: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which modules are called."""

        def enters(module: nn.Module, args: Any) -> None:
            path = self._paths.get(id(module))
            self._inside.append(path or type(module).__name__)
            if path:
                number = self._calls[path] = self._calls.get(path, -1) + 1
                self.program.entries.append(Entry(path, number, len(self.program.functions)))

        def leaves(*_: object) -> None:
            self._inside.pop()

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(enters).remove)
            stack.callback(register_module_forward_hook(leaves, always_call=True).remove)
            yield

    def use(self, leaf: Any, index: int) -> None:
        """Note that an operation uses a value."""
        if (value := self.program.values.get(id(leaf))) is not None:
            value.last = max(value.last, index)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        program, kwargs = self.program, kwargs or {}
        if func in UNCOUNTED:
            return tell(func, args, program.device)
        if is_of_torch(func):
            return func(*args)
        if is_transformed():
            raise UserError(
                f"a pipeline cannot split the model: {self._here!r} calls "
                f"{getattr(func, '__name__', func)}() inside of torch.vmap, or another transform "
                "of torch.func",
                "Compute the rows at once without it, or choose mirrored or sharded.",
            )
        index, drawn = len(program.functions), len(self.recording.made)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        own = [here_of(leaf) for leaf in given]
        self.given.update(map(id, given))
        buffer = self._note_changes(func, args, kwargs)
        staged = any(
            leaf.is_meta
            or isinstance(leaf, nn.Parameter)
            or self._buffers.get(id(leaf)) in self._changing
            for leaf in own
        )
        if staged:
            self._refuse_writing(func, args, kwargs.get("out"))
            args, kwargs = self._without_data(func, args, kwargs)
            try:
                made = func(*args, **kwargs)
            except Exception as error:
                raise self._refusal(func, str(error).partition("\n")[0]) from error
            made = made if buffer is None or made is None else buffer
        else:
            before = set(map(_memory_of, own))
            made = func(*args, **kwargs)
            found = (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
            self._fresh |= {memory for leaf in found if (memory := _memory_of(leaf)) not in before}
        draws = len(self.recording.made) - drawn
        if draws and not staged:  # each task would draw its own
            staged, made = True, tree_map(self._twin, made)
        plain = isinstance(made, _PLAIN)
        if _looks(func, args):
            program.looks.append(index)
        program.functions.append(func)
        program.results.append(made)
        program.shared.append(not staged)
        program.draws.append(draws)
        program.takes.append(tuple(id(leaf) for leaf in given if id(leaf) in program.values))
        if not plain:
            self._note_uses(given, index, staged)
        if staged:
            for leaf in tree_leaves(made):
                if (
                    isinstance(leaf, Tensor)
                    and leaf is not buffer
                    and id(leaf) not in program.values
                ):
                    program.values[id(leaf)] = Value(leaf, index, -1)
        return made

    def _note_changes(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        """Note the buffers that an operation changes; the one that it returns, if it is one."""
        changed = [args[0]] if args and changes_first(func) else []
        if changed and isinstance(args[0], list | tuple):  # those of torch._foreach_...
            changed = [*args[0]]
        if (position := _NORMS.get(func)) is not None:
            given = kwargs.get("training", kwargs.get("use_input_stats", func is F.instance_norm))
            if args[5] if len(args) > 5 else given:
                own = args[position : position + 2]
                changed = [*own, kwargs.get("running_mean"), kwargs.get("running_var")]
        for each in changed:
            if not isinstance(each, Tensor):
                continue
            memory = _memory_of(here_of(each))
            if name := self._memory.get(memory):
                self.program.changed.add(name)
            elif func is not Tensor.requires_grad_ and (
                parameter := self._names.get(id(here_of(each)))
            ):
                raise UserError(
                    f"a pipeline cannot train the model: {getattr(func, '__name__', func)}() "
                    f"writes into its parameter {parameter!r}, once for each microbatch instead of "
                    "once for each batch",
                    "Take a strategy that sees whole batches, as mesh or sharded.",
                )
            elif not self._may_change(here_of(each), memory):
                raise UserError(
                    f"a pipeline cannot split the model: {getattr(func, '__name__', func)}() "
                    "changes its input in place, or a tensor that no buffer is",
                    "Each stage makes a pass of its own, and would change it again: take "
                    "x = x - 1 instead of x -= 1, and register_buffer for what is kept.",
                )
        first = changed[0] if len(changed) == 1 and isinstance(changed[0], Tensor) else None
        return first if first is not None and id(here_of(first)) in self._buffers else None

    def _may_change(self, tensor: Tensor, memory: int) -> bool:
        """Whether no other pass sees it, as it would a batch's data that are changed in place."""
        return tensor.is_meta or id(tensor) in self._names or memory in self._fresh

    def _note_uses(self, given: Sequence[Tensor], index: int, staged: bool) -> None:
        for leaf in given:
            self.use(leaf, index)
            own = id(here_of(leaf))
            if name := self._names.get(own):
                self.program.parameters.setdefault(name, []).append(index)
            elif staged and (name := self._buffers.get(own)):
                self.program.buffers.setdefault(name, []).append(index)

    def _twin(self, value: Any) -> Any:
        """A tensor without data instead of one with; anything else as it is."""
        if isinstance(value, Sharded):
            return value if value.local.is_meta else as_it_is(self._twin(value.local), value)
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        if id(value) not in self._twins:
            made = torch.empty_like(value, device=META).requires_grad_(value.requires_grad)
            self._twins[id(value)] = value, made
            if name := self._buffers.get(id(value)):
                self._memory[_memory_of(made)] = name
        return self._twins[id(value)][1]

    def _without_data(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def plain(value: Any) -> Any:
            return META if isinstance(value, torch.device) else self._twin(value)

        def index(value: Any) -> Any:  # the values of a mask tell how much it takes
            return value.cpu() if is_mask(value) and not value.is_meta else plain(value)

        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            return (plain(args[0]), tree_map(index, args[1])), kwargs
        args, kwargs = tree_map(plain, (args, kwargs))
        if name in _LOOKS:
            raise self._refusal(func, "it is a value")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        if name == "to":
            args = tuple(META if isinstance(arg, str) else arg for arg in args)
        return args, kwargs

    def _refuse_writing(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Each task makes what has no parameters in it, but only one has what goes into it."""
        name = getattr(func, "__name__", "")
        if (buffer := self._buffers.get(id(out))) is not None:
            raise UserError(
                f"a pipeline cannot train the model: {name}() writes into its buffer {buffer!r} "
                "by out=, once for each microbatch instead of once for each batch",
                "Spectral norm does so. Leave it out, or take a strategy that sees whole batches, "
                "as mesh or sharded.",
            )
        first = args[0] if changes_first(func) and args else None
        first = here_of(first) if isinstance(first, Tensor) else None
        if first is None or first.is_meta:
            return
        if id(first) not in self._names and id(first) not in self._buffers:
            raise self._refusal(func, "it writes into a tensor that does not come of parameters")

    @property
    def _here(self) -> str:
        """The module that runs."""
        return self._inside[-1] if self._inside else "the model"

    def _refusal(self, func: Any, why: str) -> UserError:
        name = getattr(func, "__name__", str(func))
        return UserError(
            f"a pipeline cannot split the model: {self._here!r} calls {name}(), and {why}",
            "A stage runs without the values of the others: its shapes and branches may depend on "
            "the model's input alone. Move such a call behind the model, into the loss.",
        )
