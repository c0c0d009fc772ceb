"""A task's own part of model and optimizer: taken apart to be saved, and put back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from spartito.checkpoint.cuts import Cut
from spartito.checkpoint.saved_state import Saved, copy_cut, of_cut, whole
from spartito.checkpoint.saving import Attempt
from spartito.checkpoint.write_plan import Local
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import UserError
from spartito.storage.tensors import same_tensors, unpack_state

Cuts = Callable[[str], Mapping[str, Cut]]
"""Which tensors of a section a task has a part of: `spartito.steps.parts.Parts.cuts` of a pair."""

SHOWN = 3  # differences that an error lists


def take_apart(state: Mapping[str, Any], cuts: Cuts) -> dict[str, Local]:
    """Make of a local state what is told to the others, and written.

    Args:
        state: "model", "optimizer", ... with this task's own tensors.
        cuts: How those are cut.

    Raises:
        UserError: If something cannot be saved.
    """
    found: dict[int, Cut] = {}
    for name, cut in cuts("model").items():
        _take(found, name, state["model"][name], cut)
    for name, cut in cuts("optimizer").items() if "optimizer" in state else ():
        for key, value in state["optimizer"]["state"].get(name, {}).items():
            if isinstance(value, Tensor) and value.numel() == 1 and tuple(value.shape) != cut.local:
                continue  # a step counter
            if isinstance(value, Tensor):
                _take(found, f"state {key!r} of {name}", value, cut)
    for name, cut in cuts("accumulated").items() if "accumulated" in state else ():
        if (gradient := state["accumulated"]["gradients"].get(name)) is not None:
            _take(found, f"the gradient of {name}", gradient, cut)
    return {section: Local.of(section, tree, found) for section, tree in state.items()}


def _take(found: dict[int, Cut], what: str, tensor: Tensor, cut: Cut) -> None:
    if tuple(tensor.shape) != tuple(cut.local):
        raise UserError(
            f"{what} is {tuple(tensor.shape)} on this task, which has {cut.local} of {cut.shape}",
            "Choose an optimizer whose state has the parameter's shape, as SGD and Adam, or a "
            "strategy that does not cut parameters.",
        )
    found[id(tensor)] = cut


def names_here(model: nn.Module) -> str:
    """The names of what this task has of the model, to tell the others."""
    return json.dumps(list(model.state_dict()))


def parameters_here(model: nn.Module) -> set[str]:
    """The names of the parameters whose values this task has: others are on the meta device."""
    return {name for name, each in unwrap(model).named_parameters() if not each.is_meta}


def names_of_all(model: nn.Module, attempt: Attempt) -> set[str]:
    """The names of what all tasks have of a model; all of them call it.

    Args:
        model: What this one has.
        attempt: `Coordination.attempt`.
    """
    return {name for names in attempt(lambda: names_here(model)) for name in json.loads(names)}


def load_model(model: nn.Module, saved: Saved, cuts: Mapping[str, Cut], all_: set[str]) -> None:
    """Copy the saved values into this task's part of a model, one tensor at a time.

    Args:
        model: The user's own.
        saved: What was saved, with a section "model".
        cuts: Which of its tensors this task has a part of.
        all_: The names that all tasks together have.

    Raises:
        UserError: If it is another model; the first tensors that differ are named.
    """
    tree, tensors, own = saved.tree("model"), saved.tensors("model"), model.state_dict()
    if not isinstance(tree, dict):
        raise UserError("the checkpoint holds no model", "Name one that a Trainer has saved.")
    tree = _with_ties(own, tree)
    if not saved.strict:
        own = {name: value for name, value in own.items() if name in tree}
        tree = {name: leaf for name, leaf in tree.items() if name in all_}
    wrong = [
        *(f"{name} is not in the checkpoint" for name in own if name not in tree),
        *(f"{name} is not in the model" for name in tree if name not in all_),
        *_misshapen(own, saved, cuts),
    ]
    untied = [] if wrong else [*_untied(own, saved)]
    wrong += untied
    if not wrong and (cuts or _is_plain(model)):
        own_tree = {name: tree[name] for name in own}
        _load_by_module(model, own_tree, whole(tensors), cuts)
        for name, cut in cuts.items():
            if name not in own:
                continue
            local = getattr(own[name], "to_local", lambda name=name: own[name])()
            copy_cut(tensors, _tensor_name(tree[name]), cut, local.detach())
        return
    try:
        if untied or (wrong and (cuts or all_ != set(own))):
            raise RuntimeError
        # Hooks may know an older form.
        model.load_state_dict(saved.whole("model"), strict=saved.strict)
    except RuntimeError as error:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UserError(
            f"the checkpoint does not fit the model: {'; '.join(wrong[:SHOWN]) or error}{more}",
            "Build the model as it was built when the checkpoint was written.",
        ) from error


def _with_ties(own: Mapping[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a model, of whose names for one tensor others may have written one alone."""
    here = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    ties = [*same_tensors(here).items()]
    pairs = [*ties, *((owner, name) for name, owner in ties)]
    missing = {one: tree[other] for one, other in pairs if one not in tree and other in tree}
    return {**tree, **missing}


def _misshapen(own: Mapping[str, Any], saved: Saved, cuts: Mapping[str, Cut]) -> Iterator[str]:
    tree, tensors = saved.tree("model"), saved.tensors("model")
    for name, value in own.items():
        there = _tensor_name(tree.get(name))
        if there and isinstance(value, Tensor):
            here = cuts[name].shape if name in cuts else tuple(value.shape)
            if tensors.shape(there) != here:
                yield f"{name} is {tensors.shape(there)} there and {here} here"


def _untied(own: Mapping[str, Any], saved: Saved) -> Iterator[str]:
    """Names that are one tensor here, and were several there with values of their own."""
    tree, tensors = saved.tree("model"), saved.tensors("model")
    here = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    for name, owner in same_tensors(here).items():
        found = [_tensor_name(tree.get(each)) for each in (name, owner)]
        one, other = (tensors.aliases.get(each, each) for each in found)
        if all(found) and one != other:
            values = [tensors.read(each).reshape(-1).view(torch.uint8) for each in (one, other)]
            if not torch.equal(*values):
                yield f"{owner} and {name} are one tensor here, and were different ones there"


def _tensor_name(tree: Any) -> str:
    """The tensor that a leaf stands for; "" for any other."""
    found = tree.get("$tensor") if isinstance(tree, dict) and len(tree) == 1 else None
    return found if isinstance(found, str) else ""


def _is_plain(model: nn.Module) -> bool:
    """Whether nothing but its modules themselves looks at what is loaded."""
    plain = type(model).load_state_dict is nn.Module.load_state_dict
    return plain and not any(each._load_state_dict_post_hooks for each in model.modules())


def _load_by_module(
    model: nn.Module,
    tree: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
) -> None:
    """What ``load_state_dict`` does, with values that are read one by one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    of_module: dict[str, dict[str, Any]] = {}
    for name in tree:
        path = name.rpartition(".")[0]
        while path not in modules:
            path = path.rpartition(".")[0]
        if name not in cuts:
            of_module.setdefault(path, {})[name] = tree[name]
    for path, leaves in of_module.items():
        errors: list[str] = []
        modules[path]._load_from_state_dict(
            _Lazy(leaves, tensors), path and f"{path}.", {}, False, [], [], errors
        )
        if errors:
            raise UserError(
                f"the checkpoint does not fit the model: {errors[0].strip()}",
                "Build the model as it was built when the checkpoint was written.",
            )


class _Lazy(MutableMapping[str, Any]):
    """A state dict whose values are read when they are asked for."""

    def __init__(self, leaves: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._leaves, self._tensors = leaves, tensors
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        return unpack_state(self._leaves[name], self._tensors)

    def __setitem__(self, name: str, value: Any) -> None:
        self._leaves.setdefault(name, None)
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)


class _OwnState(Mapping[str, Any]):
    """What belongs to this task's parameters, by their names: read when it is asked for."""

    def __init__(
        self, saved: Saved, section: str, key: str, names: Iterable[str], cuts: Mapping[str, Cut]
    ) -> None:
        self._tree, self._tensors = saved.tree(section)[key], saved.tensors(section)
        self._names, self._cuts = [name for name in self._tree if name in names], cuts

    def __getitem__(self, name: str) -> Any:
        cut, tensors = self._cuts.get(name), self._tensors
        found = whole(tensors) if cut is None else of_cut(tensors, cut, name)
        return unpack_state(self._tree[name], found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def saved_optimizer(
    saved: Saved, own: set[str], all_: set[str], cuts: Mapping[str, Cut]
) -> dict[str, Any]:
    """What `load_named_state` takes, of the parameters of this task.

    Args:
        saved: What was saved, with a section "optimizer".
        own: The names of this task's parameters.
        all_: Those of all tasks: state of yet another parameter stays, and is refused.
        cuts: Which of them this task has a part of.

    Returns:
        "groups", "class" and "state", which is read parameter by parameter; "other_dtype" and
        "own" where they are there.
    """
    tree = saved.tree("optimizer")
    names = {name for name in tree["state"] if name in own or name not in all_}
    plain = {
        key: unpack_state(tree[key], whole(saved.tensors("optimizer")))
        for key in ("groups", "class", "other_dtype", "own")
        if key in tree
    }
    return {**plain, "state": _OwnState(saved, "optimizer", "state", names, cuts)}


def saved_gradients(saved: Saved, own: set[str], cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """What `Pair.accumulated` returned, with the gradients of this task's parameters.

    Args:
        saved: What was saved, with a section "accumulated".
        own: The names of this task's parameters.
        cuts: Which of them this task has a part of.
    """
    tree = {key: value for key, value in saved.tree("accumulated").items() if key != "gradients"}
    gradients = _OwnState(saved, "accumulated", "gradients", own, cuts)
    with torch.no_grad():
        own_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    rest: dict[str, Any] = unpack_state(tree, whole(saved.tensors("accumulated")))
    return {**rest, "gradients": own_gradients}
