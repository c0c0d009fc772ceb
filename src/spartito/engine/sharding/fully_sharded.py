"""Blocks that torch's FSDP2 gathers, reduces and frees: beside the computation, on accelerators.

FSDP2 (``torch.distributed.fsdp.fully_shard``) shows its own tensors in a module while that
computes. Before and after that the module has the user's own parameters, which show no values
until somebody asks, as those of `spartito.engine.sharding.homes.GatheredHome`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from threading import get_ident
from typing import Any, NoReturn, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from spartito.collectives.collective import HALF, left
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.engine.devices.memory_layout import viewing
from spartito.engine.meta.meta_models import make
from spartito.engine.modules.trial_passes import is_trial
from spartito.engine.sharding.block_transport import Stage
from spartito.engine.sharding.blocks import Members, RowLayout
from spartito.engine.sharding.fully_sharded_block import FullyShardedBlock
from spartito.engine.sharding.gathering import saving
from spartito.engine.sharding.hidden_parameters import computes_in, cover, no_copies, uncover
from spartito.engine.sharding.homes import BlockOfHome, Home, same_bits, shows, whole_homes

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_WANTED = ("reset_iter_state", "set_custom_reduce_scatter", "set_reduce_scatter_unused_params")


def _is_there() -> bool:
    """Whether this release of torch has all that is asked of FSDP2."""
    return hasattr(dist, "all_gather_single") and all(hasattr(FSDPModule, n) for n in _WANTED)


def why_not(model: nn.Module, blocks: Sequence[Members]) -> str:
    """What of a model FSDP2 cannot have in its blocks.

    Args:
        model: Any module.
        blocks: What `spartito.engine.sharding.blocks.units` makes of it.

    Returns:
        "" if it can have all.
    """
    if not _is_there():
        return f"torch {torch.__version__} has an earlier form of it"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "it is in torch's FSDP2 already"
    for block in blocks:
        if len({parameter.dtype for parameter in block.parameters}) > 1:
            return f"a {type(block.module).__name__} has parameters of several dtypes"
        for parameter in block.parameters:
            if found := _why_not(parameter):
                return f"a parameter of a {type(block.module).__name__} {found}"
    return ""


def _why_not(parameter: nn.Parameter) -> str:
    if type(parameter) is not nn.Parameter:
        return f"is a {type(parameter).__name__}"
    if is_lazy(parameter) or not parameter.numel():
        return "has no elements"
    if not parameter.dim():
        return "has no dimension"
    if not parameter.is_floating_point():
        return f"is of {parameter.dtype}"
    if not parameter.is_contiguous():
        return "is not contiguous"
    return ""


class FullyShardedHome(Home):
    """This replica's rows of each parameter, in tensors of FSDP2.

    Args:
        members: A block, as `spartito.engine.sharding.blocks.units` makes them.
        stage: How its values travel where nobody but the user's own code asks for them.
        mesh: The replicas, as FSDP2 knows them.
    """

    layout: RowLayout  # type: ignore[assignment]

    def __init__(self, members: Members, stage: Stage, mesh: DeviceMesh) -> None:
        super().__init__(members, stage)
        self._mesh = mesh
        shapes = tuple(tuple(parameter.shape) for parameter in members.parameters)
        self.layout = RowLayout(shapes, stage.group.world_size)
        self.used: set[int] = set()
        """The ids of the parameters that had a gradient in the last backward pass."""
        self.discards = False
        """Whether what this replica computes counts for nothing."""
        self.is_whole = False
        self._syncs, self._in_pass = True, False
        self.is_watched, self._is_needed = True, False
        """Whether autograd may ask for values that are freed: a first update finds out."""
        self._is_out_of_sight = False
        self.reset: Callable[[], None] = lambda: None
        """What to do when a pass has not come to its end."""

    # FSDP2's side

    def fill(self, values: Iterable[Tensor]) -> None:
        """Take these values, and give the block to FSDP2, whose children have been given to it."""
        for parameter, value in zip(self.parameters, values, strict=True):
            make(parameter, value.detach().to(self.stage.device))
        module = self.members.module
        positions = {
            (owner, name): parameter
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        }
        group = cast(ProcessGroupCollective, self.stage.group)
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if self.dtype in HALF else None)
        fsdp: Any = _shard(module, self._mesh, mp_policy=precision)
        fsdp.set_gradient_divide_factor(1.0)  # a sum
        fsdp.set_force_sum_reduction_for_comms(True)
        fsdp.set_reduce_scatter_unused_params(True)  # replicas may use different ones
        fsdp.set_custom_all_gather(_AllGather(group))
        fsdp.set_custom_reduce_scatter(_ReduceScatter(group, self))
        state: Any = fsdp._get_fsdp_state()
        _in_this_thread(module, state)
        self.fsdp, self.group = fsdp, state._fsdp_param_group
        inner: dict[int, Any] = {}
        for each in self.group.fsdp_params:
            own = positions[each._module_info.module, each._module_info.param_name]
            inner[id(own)] = each
            _show_own(each, own)
        self._inner = [inner[id(parameter)] for parameter in self.parameters]
        shards = (each.sharded_param.detach().to_local() for each in self._inner)
        self._locals: list[Tensor] = [shard.view(-1) for shard in shards]
        self._hooked: list[set[str]] = [set() for _ in self._inner]
        self._nothing = [
            torch.full((), float("nan"), dtype=self.dtype, device=self.stage.device).expand(p.shape)
            for p in self.parameters
        ]
        self._around = _Around(self)
        self._hide()

    @property
    def own(self) -> Tensor:  # type: ignore[override]
        """This replica's shard, flat: a copy."""
        return self.row(self._locals)

    def row(self, parts: Sequence[Tensor | None]) -> Tensor:
        """A flat shard.

        Args:
            parts: One for each of `sections`; None: zeros.
        """
        row = self._locals[0].new_zeros(self.layout.length)
        for section, part in zip(self.spans, parts, strict=True):
            if part is not None:
                row[section.offset : section.offset + part.numel()] = part
        return row

    @property
    def sections(self) -> list[Tensor]:
        return self._locals

    @property
    def sums(self) -> list[Tensor | None]:
        """The sums of the gradients of `sections`, as far as there are any."""
        grads = (each.sharded_param.grad for each in self._inner)
        with torch.no_grad():
            return [None if grad is None else grad.to_local().view(-1) for grad in grads]

    def clear_sums(self, of: Collection[int] | None = None) -> None:
        """Forget them.

        Args:
            of: The ids of parameters; None: all.
        """
        if self._in_pass:
            self.reset()
            self._in_pass = False
            for each in self._inner:
                each.unsharded_param.grad = None
        for own, each in zip(self.parameters, self._inner, strict=True):
            if of is None or id(own) in of:
                each.sharded_param.grad = None

    def add_to_sums(self, row: Tensor) -> None:
        """Add a flat shard of gradients.

        Args:
            row: One for `layout`.
        """
        spans = self.spans
        for number, (each, total) in enumerate(zip(self._inner, self.sums, strict=True)):
            local, section = self._locals[number], spans[number]
            part = row[section.offset : section.offset + local.numel()]
            if total is not None:
                total.add_(part)
            else:
                shaped = part.view(each.sharded_size).clone()
                each.sharded_param.grad = each.to_sharded_dtensor(shaped)

    def whole(self, rows: Tensor) -> list[Tensor]:
        """The parameters, or their gradients, of the shards of all.

        Args:
            rows: A flat shard of each replica.
        """
        parts = rows.split(list(self.layout.lengths), 1)
        return [
            part.reshape(-1)[: p.numel()].view(p.shape)
            for part, p in zip(parts, self.parameters, strict=True)
        ]

    def rows(self, whole: Sequence[Tensor | None]) -> Tensor:
        """A flat shard for each replica of whole gradients, zeros where there is none."""
        layout = self.layout
        made = self._locals[0].new_zeros(layout.shards, layout.length)
        for target, value in zip(made.split(list(layout.lengths), 1), whole, strict=True):
            if value is not None:
                flat, length = value.reshape(-1), target.shape[1]
                for row, part in zip(target, flat.split(length) if length else (), strict=False):
                    row[: part.numel()] = part
        return made

    def block(self, learn: set[int], used: set[int]) -> BlockOfHome:
        return FullyShardedBlock(self, learn, used)

    # Passes

    def begin_pass(self, syncs: bool) -> None:
        """Before a backward pass.

        Args:
            syncs: Whether FSDP2 sums the gradients in it; else they wait in ``.grad``.
        """
        self._in_pass = True
        self.used.clear()
        if self._is_out_of_sight:
            self._is_out_of_sight = False
            self.fsdp.unshard()
        if syncs != self._syncs:
            self.fsdp.set_requires_gradient_sync(syncs, recurse=False)
            self._syncs = syncs

    def lost_sight(self) -> None:
        """A module that nobody watches any more has an output that FSDP2 cannot look into.

        It would not hear that a backward pass wants the values: this pass has them from its
        beginning, and the module is watched from now on.
        """
        self._is_out_of_sight = self._is_needed = self.is_watched = True

    def end_pass(self) -> None:
        """After it: what FSDP2 did not see, of outputs that it cannot look into, waits too."""
        self._in_pass = False
        for number, each in enumerate(self._inner):
            unsharded = getattr(each, "_unsharded_param", None)
            if unsharded is not None and unsharded.grad is not None:
                self._keep(number, unsharded)
        self.fsdp.reshard()

    def came(self, number: int, unsharded: Tensor) -> None:
        """A parameter has its gradient of this pass."""
        own = self.parameters[number]
        if not self.discards:
            self.used.add(id(own))
        for hook in (own._post_accumulate_grad_hooks or {}).values():
            hook(unsharded)
        if not self._syncs:
            self._keep(number, unsharded)

    def _keep(self, number: int, unsharded: Tensor) -> None:
        own, grad = self.parameters[number], unsharded.grad
        unsharded.grad = None
        if grad is not None and not self.discards:
            own.grad = grad if own.grad is None else own.grad + grad

    def before(self) -> None:
        """Before the module computes: what is said of the user's parameters counts."""
        if self.is_whole:
            self._take()
        for own, each in zip(self.parameters, self._inner, strict=True):
            if own.requires_grad != each.sharded_param.requires_grad:
                each.sharded_param.requires_grad_(own.requires_grad)

    def gathered(self) -> None:
        """The module has its values."""
        for number, (own, each) in enumerate(zip(self.parameters, self._inner, strict=True)):
            unsharded, hooked = each.unsharded_param, self._hooked[number]
            if not unsharded.requires_grad:
                continue
            if "sum" not in hooked:
                hooked.add("sum")
                unsharded.register_post_accumulate_grad_hook(partial(_came, ref(self), number))
            if own._backward_hooks and "own" not in hooked:
                hooked.add("own")
                unsharded.register_hook(partial(_call_hooks, ref(own)))

    @property
    def held(self) -> list[tuple[int, Tensor]]:
        """What the module has, and how often something was written into it."""
        inner = [each.unsharded_param for each in self._inner]
        return [(each._version, each.data) for each in inner]

    @torch.no_grad()
    def computed(self, held: Sequence[tuple[int, Tensor]]) -> None:
        """The module has computed: take what it wrote into its parameters, as into an average.

        Args:
            held: As it was before.
        """
        counts = not is_trial()
        for number, (each, (version, there)) in enumerate(zip(self._inner, held, strict=True)):
            inner, local, section = each.unsharded_param, self._locals[number], self.spans[number]
            is_replaced = not shows(inner, there)
            if is_replaced:
                if counts:
                    there.copy_(inner)
                inner.data = there
            part = there.reshape(-1)[section.start : section.stop]
            # What was written by .data shows no version: a device is not waited for.
            moved = not (same_bits(part, local) if local.is_cpu else inner.requires_grad)
            if counts and (is_replaced or moved or inner._version != version):
                local.copy_(part)
                self.was_written = True
                if self.is_whole:  # what is shown is taken later
                    self.parameters[number].copy_(there)

    @property
    def storages(self) -> set[int]:
        """Where the values are while the module has them."""
        return {each.unsharded_param.untyped_storage().data_ptr() for each in self._inner}

    def saved(self, like: Tensor) -> Any:
        """As `GatheredHome.saved`."""
        storage = like.untyped_storage().data_ptr()
        number = next(
            n
            for n, each in enumerate(self._inner)
            if each.unsharded_param.untyped_storage().data_ptr() == storage
        )
        view = viewing(like)

        def again() -> Tensor:
            there = self._inner[number].unsharded_param.untyped_storage()
            if not there.size():
                self._is_needed = True
                self.fsdp.unshard()
            return view(there)

        return again

    # The user's side

    def gather(self) -> None:
        if self.is_whole:
            return
        rows = self._locals[0].new_empty(self.layout.shards, self.layout.length)
        self.stage.spread(self.own, rows)
        uncover(self.parameters)
        plain = torch.contiguous_format  # one element keeps its stride else
        self._show([value.clone(memory_format=plain) for value in self.whole(rows)])
        self.is_whole = True

    def gather_to_stay(self) -> None:
        with self.stage.group.current_call.during("parameter without its module"):
            self.gather()

    def leave(self) -> None:
        if not self.is_whole:
            uncover(self.parameters)

    def release(self) -> None:
        if self.is_whole:
            self._take()
        self.publish()

    def publish(self) -> None:
        if self.is_whole:
            self._hide()
        self.fsdp.reshard()

    def updated(self) -> None:
        self.is_watched = self._is_needed

    def _take(self) -> None:
        """Take what was written into the whole values: all replicas have."""
        self._take_moved()
        for section, local in zip(self.spans, self._locals, strict=True):
            shown = self.parameters[section.parameter].detach().reshape(-1)
            part = shown[section.start : section.stop]
            self._take_shown(part, local)

    def _hide(self) -> None:
        self._show(self._nothing)
        cover(self.parameters, self)
        self.is_whole = False


def _shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Give a module to FSDP2, which changes its class: messages call it as the user does."""
    name = type(module).__name__
    found = fully_shard(module, mesh=mesh, reshard_after_forward=True, **options)
    type(module).__name__ = name
    return found


def _in_this_thread(module: nn.Module, state: Any) -> None:
    """Leave FSDP2 out of calls in other threads, which only count random numbers."""
    before, after = state._pre_forward_hook_handle, state._post_forward_hook_handle
    for hooks, key in ((module._forward_pre_hooks, before.id), (module._forward_hooks, after.id)):
        hooks[key] = in_this_thread(hooks[key])


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does nothing in calls of other threads, which only count random numbers.

    Args:
        hook: Of a module.
    """
    thread = get_ident()

    def guarded(*given: Any) -> Any:
        return hook(*given) if computes_in(thread) else None

    return cast(Callable[..., Any], torch.compiler.disable(guarded))


def _refuse_copies(memo: dict[int, Any]) -> NoReturn:
    raise no_copies()


def _came(home: ref[FullyShardedHome], number: int, unsharded: Tensor) -> None:
    if (found := home()) is not None:  # a hook of a tensor that holds it would keep both
        found.came(number, unsharded)


def _call_hooks(own: ref[nn.Parameter], grad: Tensor) -> Tensor:
    parameter = own()
    hooks = None if parameter is None else parameter._backward_hooks
    for hook in (hooks or {}).values():
        found = hook(grad)
        grad = grad if found is None else found
    return grad


def _show_own(inner: Any, own: nn.Parameter) -> None:
    """Let a module have the user's parameter where FSDP2 would show its shard."""
    show = inner._setattr_on_modules

    def shown(parameter: nn.Parameter) -> None:
        show(own if parameter is inner.sharded_param else parameter)

    inner._setattr_on_modules = shown
    inner.reset_sharded_param = lambda: None  # it would look for a shard in the module
    shown(inner.sharded_param)


class _Around:
    """The hooks of one module, around those of FSDP2."""

    def __init__(self, home: FullyShardedHome) -> None:
        self._home = home
        self._saving: list[tuple[saved_tensors_hooks | None, list[tuple[int, Tensor]]]] = []
        module, only = home.members.module, in_this_thread
        module.register_forward_pre_hook(only(self._before), prepend=True)
        module.register_forward_pre_hook(only(self._gathered))
        module.register_forward_hook(only(self._after), prepend=True, always_call=True)

    def _before(self, module: nn.Module, given: Any) -> None:
        self._home.before()

    def _gathered(self, module: nn.Module, given: Any) -> None:
        home = self._home
        home.gathered()
        found = saving() if home.is_watched and torch.is_grad_enabled() else None
        if found is not None:
            whole_homes.update(dict.fromkeys(home.storages, home))
            found.__enter__()
        self._saving.append((found, home.held))

    def _after(self, module: nn.Module, given: Any, output: Any) -> Any:
        home = self._home
        if not self._saving:  # nothing was gathered: an error is on its way
            return output
        found, held = self._saving.pop()
        home.computed(held)
        if found is not None:
            found.__exit__()
            for storage in home.storages:
                whole_homes.pop(storage, None)
        storages = home.storages

        def apart(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                if found is None and not isinstance(tensor, _PLAIN) and torch.is_grad_enabled():
                    home.lost_sight()
                return tensor
            if tensor.layout is not torch.strided:
                return tensor
            is_view = tensor.requires_grad and tensor._base is not None
            if is_view or tensor.untyped_storage().data_ptr() in storages:
                return tensor.clone()  # of what is freed, or of what FSDP2 could not follow
            return tensor

        return tree_map(apart, output)


class _Left:
    """What is there of a group that this task has left."""

    def size(self) -> NoReturn:
        """What FSDP2 asks first.

        Raises:
            UserError: It is left.
        """
        raise left()


def _allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for what comes."""
    return torch.empty(*size, dtype=dtype, device=device)


class _AllGather:
    """FSDP2's gathering, which names the task that does not come."""

    allocate = staticmethod(_allocate)

    def __init__(self, group: ProcessGroupCollective) -> None:
        self._group = group

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        with self._group.by_torch(input_tensor.nbytes):
            return dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )


class _ReduceScatter:
    """FSDP2's sums, to which a replica whose pass counts for nothing adds zeros."""

    allocate = staticmethod(_allocate)

    def __init__(self, group: ProcessGroupCollective, home: FullyShardedHome) -> None:
        self._group, self._home = group, home

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self._home.discards:
            input_tensor.zero_()
        with self._group.by_torch(input_tensor.nbytes):
            return dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )


def make_mesh(group: ProcessGroupCollective, device: torch.device) -> DeviceMesh:
    """What FSDP2 calls the replicas that have shards of a model between them.

    Args:
        group: These replicas.
        device: That of one of them.
    """
    return DeviceMesh.from_group(group.process_group, device.type)


class Enclosed:
    """A model whose blocks FSDP2 has, and which it has now too: its passes begin here.

    Args:
        model: The user's own module.
        homes: All its blocks, filled.
        mesh: The replicas.
    """

    def __init__(
        self, model: nn.Module, homes: Sequence[FullyShardedHome], mesh: DeviceMesh
    ) -> None:
        self.homes, self._mesh, self._is_open = homes, mesh, False
        self._fsdp: Any = model
        if not isinstance(model, FSDPModule):  # no parameter is its own
            self._fsdp = _shard(model, mesh)
            _in_this_thread(model, self._fsdp._get_fsdp_state())
        self._fsdp._get_fsdp_state()._lazy_init()  # before a block of it is called alone
        for module in (model, *(home.members.module for home in homes)):
            vars(module)["__deepcopy__"] = _refuse_copies
        model.register_forward_pre_hook(in_this_thread(self._before), prepend=True)
        model.register_forward_hook(in_this_thread(self._after))
        for home in homes:
            home.reset = self.reset

    def reset(self) -> None:
        """A pass has not come to its end."""
        self._fsdp.reset_iter_state()
        self._is_open = False

    @property
    def group_holders(self) -> list[Any]:
        """What of FSDP2 holds the group, for `let_go`."""
        groups = [home.group for home in self.homes]
        infos = [(group.mesh_info, group.post_forward_mesh_info) for group in groups]
        return [self._mesh, *chain.from_iterable(infos)]

    def _before(self, module: nn.Module, given: Any) -> None:
        if self._is_open:
            self.reset()
        self._is_open = True

    def _after(self, module: nn.Module, given: Any, output: Any) -> None:
        self._is_open = False


def let_go(holders: Sequence[Any]) -> None:
    """Have FSDP2 hold a group no more: who ends it wants to be the last.

    Args:
        holders: What `Enclosed.group_holders` gave, which holds no model.
    """
    mesh, *infos = holders
    mesh._pg_registry.clear()
    for info in infos:
        info.shard_process_group = _Left()
