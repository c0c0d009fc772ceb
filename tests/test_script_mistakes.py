"""Wrong things in scripts: each is one message with the value, the rule, and what to write.

A line is a statement, and words of the message that it must give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.errors import UserError
from tests.commands import commands_in

MISTAKES = r"""
sp.Trainer(nn.Linear)                                | is no module; Net(), not Net
sp.Trainer(lambda x: x)                              | is no module; Give an object
sp.Trainer(net, optimizer="adam")                    | optimizer='adam'; torch.optim.Adam(
sp.Trainer(net, optimizer=foreign)                   | not the model's; this model's parameters()
sp.Trainer(net, opt, nn.MSELoss())                   | 3 positional; Trainer(model, optimizer=...,
sp.Trainer(net, optimizer=opt, loss=nn.MSELoss)      | loss=MSELoss is a class; MSELoss()
sp.Trainer(net, optimizer=opt, loss="mse")           | loss='mse' is not a function; torch.nn.
sp.Trainer(net, optimizer=opt, loss=lambda o: o)     | called with the output and the; lambda output
sp.Trainer(net, optimizer=opt, loss=lambda o, y, z: o) | missing a required argument: 'z'
sp.Trainer(net, optimizer=opt, loss=nn.CTCLoss())    | is called with the output and the target
trainer(metric="accuracy")                           | no argument 'metric'; Did you mean 'metrics'?
trainer(metrics=["acuracy"])                         | 'acuracy'; Did you mean 'accuracy'?
trainer(metrics=["sparse_categorical_accuracy"])     | is called 'accuracy' here
trainer(metrics=[sp.metrics.AUC])                    | AUC is a class; AUC()
trainer(metrics=[3])                                 | 3 is no metric; Give a name
trainer(strategy="mirored")                          | 'mirored' is not a strategy; mean 'mirrored'?
trainer(strategy=sp.MirroredStrategy)                | is a type; sp.strategy()
trainer(precision="f16")                             | unknown precision 'f16'; mean 'fp16'?
trainer(precision=16)                                | unknown precision 16; Known: 16-mixed
trainer(precision=None)                              | unknown precision None; Known: 16-mixed
trainer(precision=torch.bfloat16)                    | precision torch.bfloat16; Known: 16-mixed
trainer(precision=["bf16"])                          | unknown precision ['bf16']; mean 'bf16'?
trainer(accumulate=None)                             | accumulate=None; a whole number
trainer(accumulate=2.5)                              | accumulate=2.5; a whole number
trainer(clip_norm="1.0")                             | clip_norm='1.0'; a number
trainer(deterministic=None)                          | deterministic=None; True or False
trainer(scheduler_interval=None)                     | None; epoch, step
fit((x, y), callbacks=None)                          | None is no callback; sp.Callback
fit((x, y), callbacks=3)                             | 3 is no callback; sp.Callback
fit((x, y), initial_epoch=1.5)                       | initial_epoch=1.5) is a float; A whole number
fit((x, y), initial_epoch=-1)                        | initial_epoch=-1; 0 or more
sp.OneDeviceStrategy().prepare(opt, net)             | is no module; prepare(model, optimizer)
trainer(accumulate=0)                                | accumulate=0; At least one
trainer(clip_norm=-1)                                | clip_norm=-1; above 0
trainer(on_nonfinite="skp")                          | on_nonfinite='skp'; mean 'skip'?
trainer(scheduler=StepLR)                            | 'step_size'; lambda optimizer: StepLR(
trainer(scheduler=3)                                 | scheduler=3; torch.optim.lr_scheduler
trainer(scheduler_interval="batch")                  | 'batch'; epoch, step
trainer(callbacks=[])                                | no argument 'callbacks'; fit(..., callbacks=
trainer(epochs=3)                                    | no argument 'epochs'; fit(..., epochs=3)
fit(x, y)                                            | 2 positional arguments; fit((x, y))
fit((x, y), epochs=-1)                               | epochs=-1; 0 or more
fit((x, y), epochs="3")                              | epochs='3') is a str; A whole number
fit((x, y), epochs=1.5)                              | epochs=1.5) is a float; A whole number
trainer(val_check_interval=5)                        | steps_per_epoch=500, max_steps=10000
trainer(check_val_every_n_epoch=5)                   | data.repeat(3)
trainer(eval_steps=5)                                | steps_per_epoch=500, max_steps=10000
trainer(eval_strategy="steps")                       | steps_per_epoch=500, max_steps=10000
trainer(validation_interval="500 steps")             | steps_per_epoch=500, max_steps=10000
trainer(auto_scale_batch_size=True)                  | trainer.find_batch_size(data)
sp.Trainer(net, optimizer=[opt, opt])                | has 2 in a list; strategy.prepare(model
sp.Trainer(net, optimizer={"d": opt, "g": opt})      | has 2 in a dict; strategy.update(optimizer)
stepping(lambda model, batch: None)                  | train_step returned None; strategy.backward(
fit((x, y), val_check_interval=5)                    | steps_per_epoch=500, max_steps=10000
fit((x, y), eval_strategy="steps")                   | steps_per_epoch=500, max_steps=10000
fit((x, y), validation_interval="500 steps")         | steps_per_epoch=500, max_steps=10000
fit((x, y), epoch=3)                                 | no argument 'epoch'; mean 'epochs'?
fit((x, y), batch_size=0)                            | batch size of 0; 1 or more
fit((x, y), batch_size=32.0)                         | batch size of 32.0; a whole number
fit((x, y), batch_size=True)                         | batch size of True; a whole number
fit((x, y), steps_per_epoch=0)                       | steps_per_epoch=0; 1 or more
fit((x, y), shufle=True)                             | no argument 'shufle'; .shuffle()
fit((x, y), validation_data=x)                       | the shapes differ
fit((x, y), validation_split=2)                      | validation_split=2; between 0 and 1
fit((x, y), callbacks=[sp.callbacks.EarlyStopping])  | EarlyStopping is a class; EarlyStopping()
fit((x, y), callbacks=["csv"])                       | 'csv' is no callback
fit((x, y), callbacks=sp.callbacks.EarlyStopping())  | which no epoch reports; no validation_data
fit((x, y[:5]))                                      | 8, 5 examples; one row per example
fit([])                                              | no examples
fit((x[:0], y[:0]))                                  | no examples
fit(["a", "b"])                                      | does not take texts; Tokenize
fit("data.csv")                                      | str is no data; Give arrays
fit(None)                                            | NoneType is no data
fit({"x": x})                                        | does not take the data; keys of a dict are
fit({"input": x, "target": y})                       | argument 'target'; "y" is the target
fit((x, y, y))                                       | 3 parts; (x, y, weight)
fit((x.long(), y))                                   | int64; Make it floating
fit((x, torch.randint(0, 3, (8,))))                  | the shapes differ; must suit the loss
fit(([["a"]] * 8, y))                                | texts are no numbers; Tokenize
sp.Trainer(net, loss=nn.MSELoss()).fit((x, y))       | without an optimizer
sp.Trainer(net, optimizer=opt).fit((x, y))           | Without loss= the model gets all parts
own(lambda o, y: 3.0)                                | a loss of float; one value per example
own(lambda o, y: o.detach().mean())                  | no gradient; differentiable
own(nn.CrossEntropyLoss(), torch.full((8,), 7))      | Target 7 is out of bounds
trainer().evaluate((x, y), batch_size=0)             | batch size of 0
loss, accuracy = trainer().evaluate((x, y))          | was unpacked; figures['loss']
trainer().evaluate(x, y)                             | evaluate((x, y))
trainer().predict()                                  | missing a required argument: 'data'
trainer().load("nowhere")                            | nothing was saved there; Name a checkpoint
trainer().load(file)                                 | is a file; trainer.load_weights(
trainer().load_weights("nowhere.pt")                 | nowhere.pt does not exist
trainer().save_weights("x.h5")                       | x.h5 ends with .h5; .safetensors
sp.data.arrays()                                     | got no array; Give x, or x and y
sp.data.arrays(x, y[:3])                             | 8, 3 examples; one row per example
sp.data.arrays(x, y).batch(2.5)                      | batch size of 2.5; a whole number
sp.data.arrays(x, y).batch(2).batch(2)               | batch(2) of batches; Batch once
sp.data.image_folder("/nowhere")                     | '/nowhere' does not exist
sp.data.packed("s4://bucket/x")                      | 's4'; Did you mean 's3'?
sp.strategy("mirored")                               | 'mirored' is not a strategy; mean 'mirrored'?
sp.strategy("mesh(modle=2)")                         | no option 'modle'; Did you mean 'model'?
sp.strategy("mesh(model=2")                          | not the end; not complete
sp.strategy("local_sgd(every=0)")                    | every=0; 1 or more
sp.MeshStrategy(modle=2)                             | 'modle'; Did you mean 'model'?
trainer(strategy=sp.MeshStrategy(mesh={"modle": 1})) | the axis 'modle'; Did you mean 'model'?
sp.MirroredStrategy(2)                               | positional; Known:
sp.callbacks.ModelCheckpoint("c_{epoch}")            | names files; ModelCheckpoint("checkpoints")
sp.callbacks.ModelCheckpoint("c", keep=0)            | keep is 0; keep=None
sp.callbacks.EarlyStopping(monitr="loss")            | no argument 'monitr'; mean 'monitor'?
sp.callbacks.EarlyStopping(patience=-1)              | patience is -1; less than 0
sp.callbacks.EarlyStopping(mode="best")              | mode is 'best'; auto, max, min
sp.callbacks.LearningRateScheduler(0.1)              | (0.1) is no function; lambda epoch
loop("strategy.backward(loss)")                      | without the batch; .backward(loss, batch)
loop("loss.backward(); strategy.update(optimizer)")  | without strategy.backward(); Write
loop("strategy.update()")                            | without an optimizer; .update(optimizer)
loop("strategy.reduce('avg', loss)")                 | reduce('avg'); max, mean, min, sum
sp.OneDeviceStrategy().update(opt)                   | was not prepared; strategy.prepare
"""
ROWS = [line.partition(" | ") for line in MISTAKES.strip().splitlines()]


class Script:
    """What the statements name."""

    def __init__(self, folder: Path) -> None:
        self.net = nn.Linear(4, 2)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)
        self.foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        self.x, self.y = torch.randn(8, 4), torch.randn(8, 2)
        self.file = folder / "weights.pt"
        torch.save(self.net.state_dict(), self.file)

    def trainer(self, **options: Any) -> sp.Trainer:
        return sp.Trainer(self.net, optimizer=self.opt, loss=nn.MSELoss(), **options)

    def fit(self, *given: Any, **options: Any) -> None:
        fit: Callable[..., Any] = self.trainer().fit
        fit(*given, verbose=0, **options)

    def own(self, loss: Any, target: Any = None) -> None:
        target = self.y if target is None else target
        sp.Trainer(self.net, optimizer=self.opt, loss=loss).fit((self.x, target), verbose=0)

    def stepping(self, step: Any) -> None:
        sp.Trainer(self.net, optimizer=self.opt, train_step=step).fit((self.x, self.y), verbose=0)

    def loop(self, code: str) -> None:
        with sp.OneDeviceStrategy() as strategy:
            model, optimizer = strategy.prepare(self.net, self.opt)
            for batch in strategy.distribute(sp.data.arrays(self.x, self.y).batch(4)):
                loss = nn.functional.mse_loss(model(batch.x), batch.y)
                names = {"strategy": strategy, "optimizer": optimizer, "loss": loss, "batch": batch}
                exec(code, names)

    def run(self, statement: str) -> None:
        known = {
            name: getattr(self, name) for name in ("trainer", "fit", "own", "stepping", "loop")
        }
        names = {"sp": sp, "nn": nn, "torch": torch, "StepLR": torch.optim.lr_scheduler.StepLR}
        exec(statement, {**names, **vars(self), **known})


@pytest.mark.parametrize(("statement", "words"), [(a.strip(), c) for a, _, c in ROWS])
def test_a_mistake(
    statement: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.ERROR, "spartito")  # until the test ends
    with pytest.raises(UserError) as found:
        Script(tmp_path).run(statement)
    said = str(found.value)
    for part in words.split(";"):
        assert part.strip() in said, said
    assert {path.name for path in tmp_path.iterdir()} == {"weights.pt"}


def test_the_table_is_long_enough() -> None:
    assert len({statement for statement, _, _ in ROWS}) >= 60


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("sp.data.digitz", "did you mean 'digits'?"),
        ("sp.metrics.Acuracy", "has no attribute"),
        ("sp.Trainr", "did you mean 'Trainer'?"),
    ],
)
def test_a_name_with_a_typo(statement: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words.replace("?", r"\?")):
        eval(statement, {"sp": sp})


WRONG_SHAPE = """
import torch, spartito as sp
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    def forward(self, x):
        return self.inner(x)

net = Net()
trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1), loss=nn.MSELoss())
trainer.fit((torch.randn(8, 5), torch.randn(8, 3)))
"""


def test_a_wrong_shape_shows_the_lines_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG_SHAPE)
    for whole in ("0", "1"):
        with commands_in(tmp_path) as commands:
            env = {"SPARTITO_TRACEBACK": whole}
            found = commands.python("wrong.py", env=env, forks=True)
        said = found.err
        assert found.code == 1
        assert "return self.inner(x)" in said
        assert "trainer.fit(" in said
        assert "float32 (8, 5)" in said
        assert ("training_loop.py" in said) == (whole == "1")
        assert ("SPARTITO_TRACEBACK=1 shows them" in said) == (whole == "0")
