"""Operations on each element for itself, with operands that are broadcast; in place too."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.operand_plan import NOTHING, Plan, axes_of, finished, moved, order, plan, spec_of
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import Sharded, made, rule
from spartito.mesh.spec import Spec

_NAMES = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square
reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh arctan arcsin arccos erf
erfc erfinv sigmoid logit relu selu sign sgn signbit ceil round trunc frac fix deg2rad
rad2deg isnan isinf isfinite isposinf isneginf isreal logical_not bitwise_not nan_to_num clamp
clip clamp_min clamp_max threshold digamma lgamma i0 sinc hardshrink add sub subtract mul multiply
div divide true_divide floor_divide remainder fmod pow float_power atan2 arctan2 hypot maximum
minimum fmax fmin logaddexp logaddexp2 xlogy copysign rsub ldexp eq ne lt le gt ge equal_
not_equal less less_equal greater greater_equal logical_and logical_or logical_xor bitwise_and
bitwise_or bitwise_xor addcmul addcdiv lerp where masked_fill isclose celu elu gelu silu mish
softplus hardtanh hardswish hardsigmoid leaky_relu relu6 logsigmoid softsign tanhshrink softshrink
prelu_ heaviside clone contiguous detach
"""

_OPERATORS = """
add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs
invert eq ne lt le gt ge and or xor rand ror rxor
"""

_IN_PLACE = """
add_ sub_ mul_ div_ true_divide_ floor_divide_ remainder_ fmod_ pow_ relu_ sigmoid_ tanh_ exp_
log_ sqrt_ rsqrt_ neg_ abs_ clamp_ clamp_min_ clamp_max_ masked_fill_ addcmul_ addcdiv_ lerp_
square_ reciprocal_ sin_ cos_ ceil_ round_ trunc_ nan_to_num_ sign_ zero_ fill_ copy_
logical_not_ logical_and_ logical_or_ eq_ ne_ lt_ le_ gt_ ge_ erf_ log1p_ expm1_ threshold_
multiply_ divide_ subtract_ negative_ clip_
"""

_IN_PLACE_OPERATORS = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor"


def _functions(names: str, *homes: Any, form: str = "{}") -> list[Any]:
    found = [getattr(home, form.format(name), None) for name in names.split() for home in homes]
    return [function for function in found if function is not None]


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on the shards, all operands cut like one of them."""
    first = args[0]
    if not kwargs and len(args) == 2 and type(args[1]) is Sharded is type(first):
        second = args[1]
        if first.spec is second.spec and first.local.shape == second.local.shape:
            return made(func(first.local, second.local), first.spec, first.axes)
    elif type(first) is Sharded and not any(
        isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())
    ):
        local = func(first.local, *args[1:], **kwargs)
        if local is first.local or local is NotImplemented:
            return local if local is NotImplemented else first
        return made(local, first.spec, first.axes)
    return _joined(func, args, kwargs, False)


def in_place(func: Any, *args: Any, **kwargs: Any) -> Any:
    """As `elementwise`; the first operand stays cut as it is."""
    return _joined(func, args, kwargs, True)


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stays: bool) -> Any:
    named = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    spots = [n for n, value in enumerate(args) if isinstance(value, Tensor)]
    operands = [args[n] for n in spots] + [kwargs[name] for name in named]
    specs = tuple(map(spec_of, operands))
    decided = _decided(specs, tuple(operand.shape for operand in operands), stays)
    axes = axes_of(*operands)
    locals_ = moved(operands, decided, axes)
    given = list(args)
    for n, local in zip(spots, locals_, strict=False):
        given[n] = local
    named_locals = dict(zip(named, locals_[len(spots) :], strict=True))
    local = func(*given, **{**kwargs, **named_locals})
    return operands[0] if stays and local is locals_[0] else finished(local, decided, axes)


@lru_cache(4096)
def _decided(specs: tuple[Spec | None, ...], shapes: tuple[torch.Size, ...], stays: bool) -> Plan:
    """How operands of these shapes meet; what is large stays where it is."""
    shape = torch.broadcast_shapes(*shapes)
    out = order(len(shape))
    letters = tuple(broadcast(own, shape, out) for own in shapes)
    sizes = [own.numel() for own in shapes]
    first = (0, -1) if stays else tuple(sorted(range(len(sizes)), key=lambda n: -sizes[n]))
    return plan(specs, letters, out, "", first)


def broadcast(own: torch.Size, shape: torch.Size, out: str) -> str:
    """The letters of an operand of a broadcast operation."""
    skip = len(shape) - len(own)
    return "".join(
        letter if size == whole else NOTHING
        for size, whole, letter in zip(own, shape[skip:], out[skip:], strict=True)
    )


def _where(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Elements of two tensors; of a condition alone where it holds."""
    names = ("condition", "input", "other")[len(args) :]
    given = (*args, *(kwargs[name] for name in names if name in kwargs))
    return elementwise(func, *given) if len(given) > 1 else compute_whole(func, given, {})


_DOWN = torch.floor.__name__

rule(*_functions(f"{_NAMES} {_DOWN}", torch, Tensor, F, torch._C._nn, torch.special))(elementwise)
rule(*_functions(_OPERATORS, Tensor, form="__{}__"))(elementwise)
rule(*_functions(f"{_IN_PLACE} {_DOWN}_", torch, Tensor, F))(in_place)
rule(torch.where)(_where)
rule(*_functions(_IN_PLACE_OPERATORS, Tensor, form="__{}__"))(in_place)
