"""What the dims of a model's parameters are called, by the type of their module.

Linear layers are found in the order in which the model has them. One whose input is as wide as the
output of the one before takes up its cut: column, row, column, ... (Shoeybi et al., "Megatron-LM",
2019). Names decide what is cut, never what is computed: a wrong guess costs time alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from spartito.engine.updates.optimizers import whole_shape
from spartito.errors import UserError
from spartito.mesh.layout import Dim
from spartito.names import nearest

Dims = tuple[Dim, ...]

FEATURES = Dim("features")
"""What a layer takes in, and the width of embeddings and norms; no default rule is about it."""

_QUERY = {"q", "query", "q_proj", "q_lin", "to_q", "wq", "query_proj"}
_KEY_VALUE = {"k", "v", "key", "value", "k_proj", "v_proj", "k_lin", "v_lin", "to_k", "to_v"} | {
    "wk", "wv", "key_proj", "value_proj",
}  # fmt: skip
_PACKED = {"qkv", "in_proj", "c_attn", "qkv_proj", "wqkv", "to_qkv"}
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "nhead")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


@dataclass(frozen=True, slots=True)
class _Cut:
    """The output of the last layer that may be cut: its width, and what its dim is called."""

    width: int
    dim: Dim


def name_dims(model: nn.Module, names: Mapping[str, Sequence[str | None]] = {}) -> dict[str, Dims]:
    """The dims of every parameter and buffer that has names.

    Args:
        model: Any module.
        names: Patterns of the parameters' paths, as ``"blocks.*.up.weight"``, with the dims that
            they have; the last that fits wins over all types.

    Returns:
        Dims by path, each tensor under the first of its names.

    Raises:
        UserError: For a pattern that fits nothing, or as many dims as a tensor has not.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    found: dict[str, Dims] = {}
    paths = {id(tensor): path for path, tensor in tensors.items()}
    for prefix, module, own in _by_type(model):
        for name, dims in own.items():
            tensor = module._parameters.get(name, module._buffers.get(name))
            path = paths.get(id(tensor), f"{prefix}{name}")
            if isinstance(tensor, Tensor) and tensor.dim() == len(dims):
                known = found.get(path)  # tied: the name that says more
                if known is None or _says(dims) > _says(known):
                    found[path] = dims
    for pattern, given in names.items():
        hits = [path for path in tensors if fnmatchcase(path, pattern)]
        if not hits:
            raise UserError(f"names: {pattern!r} fits no parameter", nearest(pattern, tensors))
        for path in hits:
            found[path] = _given(model, path, tensors[path], pattern, given)
    return found


def _says(dims: Dims) -> int:
    """A vocabulary is the name that tied weights share."""
    return sum(2 if dim.name == "vocab" else dim.name not in (None, "features") for dim in dims)


def _given(
    model: nn.Module, path: str, tensor: Tensor, pattern: str, given: Sequence[str | None]
) -> Dims:
    """The dims that a user gave to the tensors of a pattern."""
    if isinstance(given, str) or len(given) != tensor.dim():
        raise UserError(
            f"names: {pattern!r} gives {given!r} to {path} of shape {tuple(tensor.shape)}",
            "Give one name, or None, for each of its dims.",
        )
    parent = model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
    dims = tuple(map(Dim.read, given))
    return tuple(
        _of_heads(dim, parent, size) if dim.name == "heads" else dim
        for dim, size in zip(dims, whole_shape(tensor), strict=True)
    )


def _by_type(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Dims]]]:
    """The modules that have names, with those of their own parameters and buffers."""
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    before: _Cut | None = None
    of_attention: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            of_attention.add(id(module.out_proj))
            yield prefix, module, _attention(module)
            heads = Dim("heads", units=module.num_heads)
            yield f"{prefix}out_proj.", module.out_proj, _linear(FEATURES, heads)
            before = None
        elif id(module) in of_attention:
            continue
        elif (widths := _widths(module)) is not None:
            parent_path, _, name = path.rpartition(".")
            parent = model.get_submodule(parent_path)
            made, before = _role(name.lower(), parent, *widths, vocabularies, before)
            if made is not None:
                yield prefix, module, _transposed(made) if _is_conv1d(module) else made
        elif isinstance(module, _ConvNd):
            yield prefix, module, _convolution(module)
            before = _Cut(module.out_channels, Dim("channels", units=module.out_channels))
        else:
            for kind, named in _TYPES.items():
                if isinstance(module, kind):
                    yield prefix, module, named(module)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """What a linear layer takes in and gives out; None for another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if _is_conv1d(module):
        wide: Any = module
        shape = whole_shape(wide._parameters["weight"])
        return shape[0], shape[1]
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of transformers' GPT-2, whose weight is (in, out)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _role(
    name: str,
    parent: nn.Module,
    width: int,
    out: int,
    vocabularies: set[int],
    before: _Cut | None,
) -> tuple[dict[str, Dims] | None, _Cut | None]:
    """The dims of a linear layer, and the cut that the next one may take up."""
    if name in _PACKED:
        heads = _packed(parent, width, out)
        if heads is None:
            return None, None
        units = heads.units * math.gcd(*heads.parts)  # where keys are not cut, queries are not
        return _linear(heads, FEATURES), _Cut(heads.blocks(out)[0], Dim("heads", units=units))
    if name in _QUERY | _KEY_VALUE:
        heads = _of_heads(Dim("heads"), parent, out, name in _KEY_VALUE)
        return _linear(heads, FEATURES), before if name in _KEY_VALUE else _Cut(out, heads)
    if before is not None and (
        width == before.width or (before.dim.name == "channels" and width % before.width == 0)
    ):
        return _linear(FEATURES, before.dim), None
    if out in vocabularies:
        return _linear(Dim("vocab"), FEATURES), None
    return _linear(Dim("hidden"), FEATURES), _Cut(out, Dim("hidden"))


def _packed(parent: nn.Module, width: int, out: int) -> Dim | None:
    """The dim in which queries, keys and values lie; None where that is not clear."""
    heads, keys = _heads(parent), _heads(parent, of_keys=True)
    if heads and keys and heads != keys and out % (heads + 2 * keys) == 0:
        return Dim("heads", (heads, keys, keys), 1)
    if out != 3 * width:
        return None
    return _of_heads(Dim("heads", (1, 1, 1)), parent, out)


def _of_heads(dim: Dim, parent: nn.Module, size: int, of_keys: bool = False) -> Dim:
    """``dim`` with the number of heads that ``parent`` or its config tells, if it can have them."""
    heads = _heads(parent, of_keys)
    fits = heads and size % (heads * (sum(dim.parts) or 1)) == 0
    return replace(dim, units=heads) if fits else dim


def _heads(parent: nn.Module, of_keys: bool = False) -> int:
    """The number of heads, or of those of keys and values; 0 where nothing tells it."""
    for name in (*_KEY_HEADS, *_HEADS) if of_keys else _HEADS:
        for owner in (parent, getattr(parent, "config", None)):
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and heads > 0:
                return heads
    return 0


def _linear(out: Dim, into: Dim) -> dict[str, Dims]:
    return {"weight": (out, into), "bias": (out,)}


def _transposed(made: dict[str, Dims]) -> dict[str, Dims]:
    return made | {"weight": made["weight"][::-1]}


def _attention(module: nn.MultiheadAttention) -> dict[str, Dims]:
    heads = Dim("heads", units=module.num_heads)
    packed = replace(heads, parts=(1, 1, 1))
    own = {f"{name}_proj_weight": (heads, FEATURES) for name in "qkv"}
    return {**own, "in_proj_weight": (packed, FEATURES), "in_proj_bias": (packed,)}


def _convolution(module: _ConvNd) -> dict[str, Dims]:
    channels = Dim("channels", units=module.groups if module.groups > 1 else 0)
    kernel = (Dim(),) * len(module.kernel_size)
    dims = (channels, Dim("in_channels"))
    if isinstance(module, _ConvTransposeNd) and module.groups == 1:
        dims = dims[::-1]
    return {"weight": (*dims, *kernel), "bias": (channels,)}


def _channels(module: nn.Module, units: int = 0) -> dict[str, Dims]:
    own = ("weight", "bias", "running_mean", "running_var")
    return dict.fromkeys(own, (Dim("channels", units=units),))


def _group_norm(module: Any) -> dict[str, Dims]:
    return _channels(module, module.num_groups)


def _norm(module: Any) -> dict[str, Dims]:
    return dict.fromkeys(("weight", "bias"), (FEATURES,) * len(module.normalized_shape))


def _embedding(module: nn.Module) -> dict[str, Dims]:
    return {"weight": (Dim("vocab"), FEATURES)}


_TYPES: dict[type[nn.Module], Callable[[Any], dict[str, Dims]]] = {
    nn.Embedding: _embedding,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.GroupNorm: _group_norm,
    _NormBase: _channels,
}
