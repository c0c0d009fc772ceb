"""Optimizers: what a strategy accepts, and their state under the user's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils._pytree import tree_map_only

from spartito.accelerators import kind_of
from spartito.engine.updates.fused_update import OurHook
from spartito.errors import UserError
from spartito.notes import warn

OptimizerLike = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]

WHOLE_SHAPE = "_spartito_whole_shape"
"""An attribute of parameters of which this task has a shard: the shape of the whole."""


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a whole parameter or buffer, also where this task has a shard of it."""
    return tuple(getattr(tensor, WHOLE_SHAPE, tensor.shape))


class NoOptimizer(Optimizer):
    """Stands where a model is only evaluated: it has no parameters, and refuses a step."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raises `UserError`."""
        raise UserError("a step without an optimizer", "Give the Trainer an optimizer.")


class Wrapper(nn.Module):
    """Stands around the user's own ``module``."""

    takes_batches = False
    """Whether a call gets a batch as its data came: a tuple of one part stays one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module: inside of what ``torch.compile`` or parallel wrappers hold."""
    if isinstance(model, Wrapper | DistributedDataParallel | nn.DataParallel):
        return unwrap(model.module)
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` has a model, or a module in it."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def takes_batches(model: nn.Module) -> bool:
    """Whether a call of ``model``, or of what stands around it, gets a batch as its data came."""
    if isinstance(model, Wrapper | DistributedDataParallel | nn.DataParallel):
        return bool(getattr(model, "takes_batches", False)) or takes_batches(model.module)
    inner = getattr(model, "_orig_mod", None)
    return isinstance(inner, nn.Module) and takes_batches(inner)


OWN_LOOP = (
    "Write several as a loop of your own: strategy.prepare(model, optimizer) for each, and in it "
    "strategy.backward(losses, batch) and strategy.update(optimizer)."
)
"""What to do with several optimizers."""


def _no_optimizer(given: Any) -> UserError:
    parts = given.values() if isinstance(given, Mapping) else given
    if isinstance(parts, Iterable) and any(isinstance(each, Optimizer) for each in parts):
        return UserError(f"optimizer= has {len(given)} in a {type(given).__name__}", OWN_LOOP)
    return UserError(
        f"optimizer={given!r} is no optimizer",
        "Give one, as torch.optim.Adam(net.parameters()), or a function of the parameters.",
    )


def make_optimizer(given: OptimizerLike, model: nn.Module) -> Optimizer:
    """The optimizer for ``model``: the one given, or what a function makes of its parameters."""
    if isinstance(given, Optimizer):
        return given
    if not callable(given):
        raise _no_optimizer(given)
    made = given(model.parameters())
    if not isinstance(made, Optimizer):
        raise UserError(
            f"the optimizer function returned {type(made).__name__}",
            "It takes the parameters and returns a torch.optim.Optimizer.",
        )
    return made


def check_initialized(model: nn.Module) -> None:
    """Refuse parameters without a size, which each replica would fill with values of its own."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UserError(
            f"{len(lazy)} lazy parameters, the first {lazy[0]!r}, on several tasks",
            "Let one batch go through the model before the Trainer is made: net(x[:1]).",
        )


LOADING = "trainer.load(path), or in a loop of your own strategy.load(path) after prepare"
"""How a checkpoint comes into a model that a strategy has."""

DIVIDED = "_spartito_divided"
"""An attribute of modules whose parameters a pipeline has given to several tasks: the id of the
optimizer for which it has."""


def check_undivided(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Refuse a model of which another training, not that of ``optimizer``, has left some stages."""
    own = id(optimizer)
    if any(vars(module).get(DIVIDED, own) != own for module in model.modules()):
        raise UserError(
            f"a {type(unwrap(model)).__name__} that an earlier Trainer has divided in a pipeline: "
            "each task has some of its stages",
            f"Build it anew, and load what that Trainer has saved: {LOADING}.",
        )


def check_no_script(model: nn.Module, deterministic: bool) -> None:
    """Refuse a model of TorchScript, whose modules show their tensors to Python as copies.

    Args:
        model: Any; a part of it may be a script where nothing looks into that.
        deterministic: Whether its buffers and random numbers are looked at.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and (deterministic or module is model):
            name = getattr(module, "original_name", type(module).__name__)
            raise UserError(
                f"{path or 'the model'}, {name}, is compiled by torch.jit",
                "Train the module that was given to torch.jit, and script or trace it afterwards. "
                "Or take torch.compile.",
            )


def has_part(model: nn.Module) -> bool:
    """Whether this task has shards of the model's parameters, or some of its stages."""
    return any(DIVIDED in vars(module) for module in model.modules()) or any(
        getattr(parameter, WHOLE_SHAPE, parameter.shape) != parameter.shape
        for parameter in model.parameters()
    )


def check_whole(model: nn.Module) -> None:
    """Refuse a model of which an earlier strategy has left this task shards."""
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, WHOLE_SHAPE, None)
        if shape is not None and tuple(shape) != tuple(parameter.shape):
            raise UserError(
                f"{name} is here a shard, {tuple(parameter.shape)} of {tuple(shape)}: the model "
                "was prepared on a mesh",
                f"Build it anew, and load what was saved under the mesh: {LOADING}.",
            )


def check_optimizer(optimizer: Optimizer, model: nn.Module, num_replicas: int) -> None:
    """Refuse an optimizer that would silently do nothing, or something else on each replica."""
    check_members(optimizer, model)
    state = [value for values in optimizer.state.values() for value in values.values()]
    if any(isinstance(value, Tensor) and value.is_meta for value in state):
        raise UserError(
            f"an {type(optimizer).__name__} with state of parameters that have no values yet",
            "Give a function of the parameters, as optimizer=torch.optim.Adagrad; in a pipeline "
            "build the model outside of sp.meta().",
        )
    if num_replicas == 1:
        return
    begun = sum(_has_begun(values) for values in optimizer.state.values())
    if begun:
        raise UserError(
            f"an {type(optimizer).__name__} with state of {begun} parameters "
            f"for {num_replicas} replicas",
            f"Give a fresh optimizer, and load the state of a saved one: {LOADING}.",
        )
    if isinstance(optimizer, LBFGS):
        raise UserError(
            f"LBFGS calls a closure several times a step, on {num_replicas} replicas",
            f"{_OWN_CLOSURE}, or choose Adam or SGD.",
        )


_OWN_CLOSURE = (
    "Use it on one device, in a loop of your own: optimizer.step(closure), with loss.backward() in "
    "the closure"
)


def check_computes_once(optimizer: Optimizer) -> None:
    """Refuse an optimizer that computes the loss several times a step, which we compute once."""
    if isinstance(optimizer, LBFGS):
        raise UserError(
            "LBFGS computes the loss of a batch several times in a step, and Spartito's steps "
            "compute it once",
            f"{_OWN_CLOSURE}, or choose Adam or SGD.",
        )


def check_by_parameter(optimizer: Optimizer, holder: str) -> None:
    """Refuse an optimizer that may look at all parameters at once.

    Args:
        optimizer: Whose parameters are divided.
        holder: Who will have some of them.

    Raises:
        UserError: It is not torch's, and does not say what it looks at.
    """
    kind = type(optimizer)
    says = getattr(kind, "by_parameter", False) or getattr(kind, "elementwise", False)
    if (
        not says
        and kind.__module__.partition(".")[0] != "torch"
        and optimizer_parameters(optimizer)
    ):
        raise UserError(
            f"{kind.__name__} may look at all parameters at once, of which each {holder} has some",
            "Choose one of torch's optimizers. If this one updates each parameter by itself, say "
            f"so: {kind.__name__}.by_parameter = True.",
        )


def check_members(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer of parameters that are not the model's."""
    known = {id(parameter) for parameter in model.parameters()}
    strange = [p for p in optimizer_parameters(optimizer) if id(p) not in known]
    if strange:
        raise UserError(
            f"{len(strange)} of the optimizer's parameters are not the model's, "
            f"the first of shape {tuple(strange[0].shape)}",
            "Build the optimizer from this model's parameters(), after its last .to() or "
            ".double(). Where a layer was replaced, put the new one's into "
            "optimizer.param_groups, and take the old one's out.",
        )


def _has_begun(values: dict[str, Any]) -> bool:
    """Whether a parameter's state is more than what a fresh optimizer (Adagrad) sets up."""
    step = values.get("step", 1)
    return bool(values) and float(step) > 0


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of ``optimizer``, in the order of its groups."""
    groups = optimizer.param_groups
    if len(groups) == 1:  # as most have, and every step asks several times
        return [*groups[0]["params"]]
    return list(chain.from_iterable([group["params"] for group in groups]))


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether a module of ``model``, as `nn.Embedding` may, gets gradients that are not dense."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def check_lookups(model: nn.Module) -> None:
    """Refuse an embedding that looks at all lookups of a batch, of which a replica has a part.

    Raises:
        UserError: A module of ``model`` has ``max_norm`` or ``scale_grad_by_freq``.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm is not None:
            raise UserError(
                f"max_norm={module.max_norm} of {path or 'the model'}, {type(module).__name__}: a "
                "forward pass shortens the rows that it looks up, and replicas look up others",
                "Leave max_norm out and shorten all rows after each update "
                "(torch.renorm in on_train_batch_end), or train on one device.",
            )
        check_frequencies(path, module)


def check_frequencies(path: str, module: nn.Module) -> None:
    """Refuse an embedding that divides by how often a batch has a row, where parts are counted.

    Raises:
        UserError: The module at ``path`` has ``scale_grad_by_freq``.
    """
    if getattr(module, "scale_grad_by_freq", False) is True:
        raise UserError(
            f"scale_grad_by_freq of {path or 'the model'}, {type(module).__name__}: it divides by "
            "how often the batch has a row, and a part of the batch is counted",
            "Leave scale_grad_by_freq out, or train on one device.",
        )


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether a user's hooks run at its steps; `fuse` may have one of ours there."""
    before = [
        hook for hook in optimizer._optimizer_step_pre_hooks.values() if hook != fill_momentum
    ]
    return bool(before or optimizer._optimizer_step_post_hooks)


def fuse(optimizer: Optimizer, model: nn.Module) -> None:
    """Let torch update all parameters in one pass where it can and the user did not choose."""
    if has_sparse_gradients(model):
        return
    for group in optimizer.param_groups:
        tensors: Sequence[Tensor] = group["params"]
        if isinstance(optimizer, SGD) and group["momentum"] and any(map(_is_half_on_cpu, tensors)):
            if group["fused"]:
                warn("fused SGD with momentum of 16-bit parameters is wrong on CPUs: not fused")
            group["fused"] = False
        if (
            group.get("fused", True) is None
            and not group.get("foreach")
            and not group.get("differentiable")
            and not group.get("dampening")
            and all(kind_of(p.device).fuses and p.is_floating_point() for p in tensors)
        ):
            group["fused"] = True
            group["foreach"] = False
            move_state(optimizer)
            if isinstance(optimizer, SGD) and not hasattr(optimizer, _FILLS):
                setattr(optimizer, _FILLS, optimizer.register_step_pre_hook(fill_momentum))


def _is_half_on_cpu(tensor: Tensor) -> bool:
    """Whether torch's fused SGD reads memory that nobody wrote, where it has a momentum."""
    return tensor.is_cpu and tensor.dtype in (torch.bfloat16, torch.float16)


def skipping(optimizer: Optimizer, weight: float | Tensor) -> AbstractContextManager[bool]:
    """A block in which a step of ``optimizer`` is left out where ``weight`` is 0.

    torch's fused optimizers look at it on the device. For others the host has to: the block gets
    whether the step is due.
    """
    if not isinstance(weight, Tensor) or not is_fused(optimizer):
        return nullcontext(float(weight) != 0)
    return _skipping_on_device(optimizer, weight)


@contextmanager
def _skipping_on_device(optimizer: Optimizer, weight: Tensor) -> Iterator[bool]:
    fill_momentum(optimizer, all_fresh=True)
    optimizer.found_inf = (weight == 0).float()  # type: ignore[attr-defined]
    try:
        yield True
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def is_fused(optimizer: Optimizer) -> bool:
    """Whether torch updates all of its parameters in one pass, and looks on the device if it may.

    What `fuse` has chosen ends where SGD has got dampening since: the momentum of a parameter that
    learns later begins with its gradient then, and a fused step wants it of all, or of none.
    """
    for group in optimizer.param_groups:
        if group.get("dampening") and group.get("fused") and hasattr(optimizer, _FILLS):
            group["fused"] = False  # `foreach` stays off: it writes into gradients
    return all(group.get("fused") for group in optimizer.param_groups)


_FILLS = "_spartito_fills_momentum"


@OurHook
def fill_momentum(optimizer: Optimizer, *_: object, all_fresh: bool = False) -> None:
    """Begin with zeros the momentum of parameters that learn later than others.

    torch's fused SGD wants it of all parameters or of none. Without dampening zeros are what a
    first step begins with. ``all_fresh``: where the first step may be left out, too.
    """
    is_fused(optimizer)
    for group in optimizer.param_groups:
        if not (group.get("fused") and group.get("momentum")):
            continue
        learn = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [optimizer.state[parameter] for parameter in learn]
        fresh = [state.get("momentum_buffer") is None for state in states]
        if any(fresh) and (all_fresh or not all(fresh)):
            for parameter, state, is_fresh in zip(learn, states, fresh, strict=True):
                if is_fresh:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state under the user's parameter names: ``{"state", "groups", "class"}``.

    Besides ``"other_dtype"``, what of it has a dtype that is not the parameter's, by parameter. And
    ``"own"`` instead of all state, what its own `state_dict` returns, where it has more to keep.

    Raises:
        UserError: The optimizer has parameters that the model has no more, or keeps a state of its
            own, of which this task has a part.
    """
    check_members(optimizer, model)
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        names[id(parameter)]: dict(values)
        for parameter, values in optimizer.state.items()
        if id(parameter) in names
    }
    groups = [
        {
            "params": [names[id(parameter)] for parameter in group["params"]],
            **{key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    found = {"state": state, "groups": groups, "class": type(optimizer).__name__}
    if keeps_its_own(optimizer):
        if has_part(model):
            raise UserError(
                f"an {type(optimizer).__name__} keeps more than a state for each parameter, and "
                "this task has a part of the model",
                "Choose mirrored, or an optimizer of torch.",
            )
        return {**found, "state": {}, "own": optimizer.state_dict()}
    others = {
        name: keys
        for name, values in state.items()
        if (keys := [key for key, value in values.items() if _differs(value, named[name])])
    }
    return {**found, "other_dtype": others} if others else found


def keeps_its_own(optimizer: Optimizer) -> bool:
    """Whether it has more to keep than a state for each parameter, as what stands around another.

    Then it says so itself, by a `state_dict` of its own, or has a state that is of no parameter.
    """
    return type(optimizer).state_dict is not Optimizer.state_dict or any(
        not isinstance(key, Tensor) for key in optimizer.state
    )


def _differs(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.dtype != parameter.dtype


def load_named_state(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load what `named_state` returned, from a model of the same names and shapes."""
    parameters = dict(model.named_parameters())
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise UserError(
            f"the checkpoint's optimizer has {len(saved['groups'])} parameter groups, "
            f"this one {len(optimizer.param_groups)}",
            "Build the optimizer as it was built when the checkpoint was written.",
        )
    _check_class(optimizer, saved.get("class"))
    if (own := saved.get("own")) is not None:
        optimizer.load_state_dict(tree_map_only(Tensor, Tensor.clone, own))
        return
    missing = [name for name in saved["state"] if name not in parameters]
    if missing:
        raise UserError(f"the checkpoint's optimizer has state of {missing[0]}, the model has not")
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        # How the update is computed belongs to this machine, the numbers to the checkpoint.
        group.update({k: v for k, v in old.items() if k not in ("params", "fused", "foreach")})
    optimizer.state.clear()
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, values in saved["state"].items():
        parameter = parameters[name]
        group, others = group_of.get(id(parameter), {}), saved.get("other_dtype", {}).get(name, ())
        optimizer.state[parameter] = {
            key: _like(value, parameter, counter_device(group, key, parameter), key in others)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in values.items()
        }


def move_state(optimizer: Optimizer) -> None:
    """Have the state of each parameter where torch's update reads it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if isinstance(value, Tensor):
                    state[key] = value.to(counter_device(group, key, parameter))


def counter_device(group: Mapping[str, Any], key: str, parameter: Tensor) -> torch.device:
    """Where torch's optimizers have a number of a parameter's state: a count of steps is on the
    host, unless the update itself counts."""
    counts_there = group.get("fused") or group.get("capturable")
    return torch.device("cpu") if key == "step" and not counts_there else parameter.device


def _check_class(optimizer: Optimizer, saved: str | None) -> None:
    """Refuse the state of another kind, also one whose tensors have the same names."""
    kind = type(optimizer)
    of_torch = kind.__module__.startswith("torch.")
    names = [kind.__name__] if of_torch else [each.__name__ for each in kind.__mro__]
    if saved not in (None, *names):  # earlier versions have not told
        raise UserError(
            f"the checkpoint has the state of an optimizer {saved}, this one is {kind.__name__}",
            "Build the optimizer as it was built when the checkpoint was written, or load the "
            'model alone: strategy.load({"model": ...}).',
        )


def _like(value: Tensor, parameter: Tensor, device: torch.device, keeps: bool) -> Tensor:
    """A copy for the state of a parameter, in its dtype unless it ``keeps`` its own."""
    if value.dim() == 0:  # a step counter: keeps its own dtype
        return value.to(device, copy=True)
    dtype = value.dtype if keeps else parameter.dtype
    if value.shape != parameter.shape:  # a shape of the optimizer's own
        return value.to(device=parameter.device, dtype=dtype).clone()
    made = torch.empty_like(parameter.detach(), dtype=dtype)
    return made.copy_(value)  # laid out as the parameter, whose update reads both together
