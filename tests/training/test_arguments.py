"""Names that people know from elsewhere work where they mean the same, and else say what does."""

from __future__ import annotations

import copy
import json
import pickle
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import spartito as sp
from spartito.errors import UserError
from spartito.training.arguments import ALIASES, HINTS
from tests.training import jobs

METHODS: dict[str, Any] = {
    "Trainer": sp.Trainer.__init__,
    "fit": sp.Trainer.fit,
    "evaluate": sp.Trainer.evaluate,
    "predict": sp.Trainer.predict,
    **{
        name: getattr(sp.callbacks, name).__init__
        for name in ALIASES
        if hasattr(sp.callbacks, name)
    },
}


def call(name: str, **options: Any) -> Any:
    if name == "Trainer":
        return sp.Trainer(jobs.net(), **options)
    if hasattr(sp.callbacks, name):
        return getattr(sp.callbacks, name)(**options)
    return getattr(jobs.trainer(), name)(**options)


@pytest.mark.parametrize("name", METHODS)
def test_an_alias_means_an_argument_and_a_hint_is_none(name: str) -> None:
    ours = set(signature(METHODS[name]).parameters)
    assert set(ALIASES[name].values()) <= ours
    assert not (ALIASES[name].keys() | HINTS[name].keys()) & ours
    assert not ALIASES[name].keys() & HINTS[name].keys()


@pytest.mark.parametrize(("name", "word"), [(n, w) for n, hints in HINTS.items() for w in hints])
def test_what_is_written_elsewhere_is_refused_with_a_hint(name: str, word: str) -> None:
    with pytest.raises(UserError) as caught:
        call(name, **{word: 1})
    assert str(caught.value).startswith(f"{name}() has no argument {word!r}\n  ")
    assert HINTS[name][word] in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("Trainer", {"optimiser": None}, "Did you mean 'optimizer'"),
        ("fit", {"epoch": 3}, "Did you mean 'epochs'"),
        ("fit", {}, "missing a required argument: 'data'"),
        ("fit", {"max_epochs": 1, "epochs": 2, "data": jobs.data()}, "fit.. has epochs twice"),
    ],
)
def test_mistakes(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        call(name, **options)


def test_two_positional_arguments() -> None:
    made: Any = jobs.trainer()
    with pytest.raises(UserError, match=r"Write fit\(\(x, y\)\)"):
        made.fit(*jobs.data())


def test_aliases_train_as_ours_do() -> None:
    x, y = jobs.data()
    weights = []
    for given, data in (
        (
            {"accumulate": 2, "clip_norm": 0.1, "loss": torch.nn.CrossEntropyLoss()},
            {"data": (x, y)},
        ),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_clip_val": 0.1,
                "criterion": torch.nn.CrossEntropyLoss(),
            },
            {"x": x, "y": y},
        ),
    ):
        made: Any = sp.Trainer(jobs.net(), optimizer=lambda p: torch.optim.SGD(p, 0.1), **given)  # type: ignore[arg-type]
        epochs = {"epochs": 2} if "data" in data else {"max_epochs": 2}
        made.fit(**data, **epochs, batch_size=4, verbose=0)
        weights.append([parameter.detach().clone() for parameter in made.model.parameters()])
        assert made.evaluate(**data) == made.evaluate((x, y))
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    without: Any = sp.Trainer(
        jobs.net(), optimizer=lambda p: torch.optim.SGD(p, 0.1), max_grad_norm=0
    )  # type: ignore[call-arg]
    assert without.step == 0


def test_callbacks_take_the_names_of_keras() -> None:
    assert call("ModelCheckpoint", filepath="x").directory == Path("x")
    assert call("TensorBoard", log_dir="x").directory == Path("x")
    backup = call("BackupAndRestore", backup_dir="x", save_freq="epoch")
    assert (backup.directory, backup.every) == ("x", "epoch")


@pytest.mark.parametrize(
    "name", ["ckpt_{epoch:04d}", "a/{epoch}/x", "model.keras", "best.weights.h5", Path("m.pt")]
)
def test_a_checkpoint_is_no_file(name: str | Path) -> None:
    with pytest.raises(UserError, match=r"it takes a folder.*\n.*ModelCheckpoint\(\"checkpoints\""):
        sp.callbacks.ModelCheckpoint(name)
    assert sp.callbacks.ModelCheckpoint("runs/1.5/v2.0").directory == Path("runs/1.5/v2.0")


def test_backups_are_in_a_folder() -> None:
    for name in ("b_{epoch}", "s3://bucket/{step:04d}"):
        with pytest.raises(UserError, match="has a field in braces"):
            sp.callbacks.BackupAndRestore(name)


def test_a_strategy_may_be_named() -> None:
    assert isinstance(
        jobs.trainer(strategy=cast("Any", "one_device")).strategy, sp.OneDeviceStrategy
    )
    with pytest.raises(UserError, match="miror"):
        jobs.trainer(strategy=cast("Any", "miror"))
    with pytest.raises(UserError, match=r"strategy=3 is a int\n.*sp\.strategy"):
        jobs.trainer(strategy=cast("Any", 3))


@pytest.mark.parametrize("counts", [{"epochs": 1.5}, {"epochs": True}, {"steps_per_epoch": "3"}])
def test_counts_are_whole_numbers(counts: Any) -> None:
    with pytest.raises(UserError, match="A whole number"):
        jobs.trainer().fit(jobs.data(), **counts)


def test_texts_are_no_rows() -> None:
    with pytest.raises(UserError, match=r"texts are no numbers.*\n.*Tokenize"):
        jobs.trainer().fit((["a", "b"], torch.zeros(2)))


def test_figures_are_a_dict_and_not_unpacked() -> None:
    figures = jobs.trainer(metrics=["accuracy"]).evaluate(jobs.data())
    assert [*figures] == list(figures) == sorted(figures, reverse=True) == ["loss", "accuracy"]
    assert isinstance(figures, dict)
    assert json.loads(json.dumps(figures)) == {**figures} == dict(figures)
    assert dict(figures.items()) == pickle.loads(pickle.dumps(figures))
    assert copy.deepcopy(figures) == figures
    for _ in range(100):  # also once the interpreter has specialized the code
        with pytest.raises(UserError, match=r"then figures\['loss'\], figures\['accuracy'\]"):
            _loss, _accuracy = figures
    with pytest.raises(UserError, match="unpacked like a list"):
        first, *_ = figures
    first, _ = figures.values()
    assert first == figures["loss"]
