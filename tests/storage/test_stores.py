"""Real servers of object stores: what is read there is what was written, and errors name causes."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from PIL import Image

import spartito as sp
from spartito.cli.app import main
from spartito.data.blocks.manifest import NAME
from spartito.data.dataset import Dataset
from spartito.data.packing.command import main_pack
from spartito.data.packing.destination import StoreDestination
from spartito.data.reading.loader import Loader
from spartito.data.tools.bench import main_bench
from spartito.data.tools.packed_check import main_packed_check
from spartito.errors import UserError
from spartito.storage.object_client import aws_options
from spartito.storage.remote import whole_ones
from spartito.storage.stores import ObjectStore, open_store
from tests.data.packed_files import write_all
from tests.storage.servers import StoreServer, azure, google, moto, seaweedfs

pytestmark = pytest.mark.slow

LIMIT = 200.0

SERVERS: dict[str, Callable[[Path], AbstractContextManager[StoreServer]]] = {
    "seaweedfs": seaweedfs,
    "moto": moto,
    "google": google,
    "azure": azure,
}


NIGHTLY = ("seaweedfs", "azure")
"""For what the others show too."""


@pytest.fixture(
    scope="module",
    params=["seaweedfs", "moto", "google", pytest.param("azure", marks=pytest.mark.night)],
)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreServer]:
    """A server with the packed files and photos of `data`."""
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as server:
        server.fill(data(tmp_path_factory.mktemp("data")), "data")
        yield server


@pytest.fixture(autouse=True)
def reached(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's variables, and a cache of this test's own."""
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))
    if "store" in request.fixturenames:
        for name, value in request.getfixturevalue("store").env.items():
            monkeypatch.setenv(name, value)


def data(folder: Path) -> Path:
    """Packed files of each format, and small photos of two classes."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for format in ("parquet", "webdataset", "mds", "jsonl"):
        write_all(folder / format, format, (23, 17))
    for number in range(24):
        name = folder / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        name.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(name)
    (folder / "photos" / "cat" / ".hidden.png").write_bytes(b"x")
    return folder


def ys(found: Dataset) -> list[int]:
    return [int(y) for batch in Loader(found.batch(7), seed=4) for y in batch.data]


def test_what_is_there_is_what_was_written(store: StoreServer, tmp_path: Path) -> None:
    here = data(tmp_path)
    columns = {"webdataset": "y.cls"}
    for format in ("parquet", "webdataset", "mds", "jsonl"):
        expected, found = (
            ys(sp.data.packed(f"{where}/{format}", columns.get(format, "y")).shuffle(blocks=2))
            for where in (here, f"{store.url}/data")
        )
        assert found == expected
        assert sorted(found) == list(range(40))
    pairs = zip(
        *(
            Loader(
                sp.data.image_folder(f"{where}/photos", (8, 8), 0.25, "training")
                .shuffle(5)
                .batch(4)
            )
            for where in (here, f"{store.url}/data")
        ),
        strict=True,
    )
    for one, other in pairs:
        assert all((a == b).all() for a, b in zip(one.data, other.data, strict=True))


@pytest.mark.parametrize(
    "server", ["moto", *(pytest.param(name, marks=pytest.mark.night) for name in NIGHTLY)]
)
def test_what_is_packed_in_a_store_is_what_is_packed_here(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photos of a store into shards there; it ends in the middle, and goes on."""
    here = data(tmp_path / "here")
    with SERVERS[server](tmp_path) as made:
        made.fill(here, "data")
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        photos, out = f"{made.url}/data/photos", f"{made.url}/packed"
        assert main_pack(str(here / "photos"), str(tmp_path / "out"), shard_size="3kB") == 0
        expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert len(expected) > 3
        new, count = StoreDestination.new, 0

        def ends(self: StoreDestination, name: str) -> AbstractContextManager[BinaryIO]:
            nonlocal count
            count += 1
            if count == 3:  # after the manifest and a shard
                raise UserError("the end")
            return new(self, name)

        with monkeypatch.context() as patched:
            patched.setattr(StoreDestination, "new", ends)
            assert main_pack(photos, out, shard_size="3kB") == 2
        with pytest.raises(UserError, match="is still being packed"):
            sp.data.packed(out)
        assert main_pack(photos, out, shard_size="3kB") == 0
        store = open_store(out)
        assert set(store.sizes()) == set(expected)
        for name in set(expected) - {NAME}:  # which knows the versions of its own files
            assert store.read(name) == expected[name]
        assert main_packed_check(out) == 0
        assert main_bench(out, 0.2, image_size=8) == 0
        found, other = (sp.data.packed(each, image_size=(8, 8)) for each in (out, tmp_path / "out"))
        for one, another in zip(Loader(found.batch(8)), Loader(other.batch(8)), strict=True):
            assert all((a == b).all() for a, b in zip(one.data, another.data, strict=True))
        assert main_pack(str(here / "photos"), f"{made.url}/data") == 2  # holds other files


def test_what_is_not_there_is_named(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spartito.storage.files.PAUSES", (0.01,))  # one says 500 of no bucket
    scheme = store.url.partition("://")[0]
    for url, words in (
        (f"{store.url}/data/parquet/none.parquet", "none.parquet cannot be read"),
        (f"{store.url}/empty", "/empty has no file that ends with"),
        (f"{scheme}://no-such-bucket/a", "no-such-bucket/a (cannot be listed|has no file)"),
    ):
        with pytest.raises(UserError, match=words):
            sp.data.packed(url)
    with pytest.raises(UserError, match="has no folders of classes"):
        sp.data.image_folder(f"{store.url}/data/parquet")


@pytest.mark.parametrize(
    "server", ["seaweedfs", "moto", pytest.param("azure", marks=pytest.mark.night)]
)
def test_files_are_written_read_and_removed(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SERVERS[server](tmp_path) as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        store = open_store(f"{made.url}/run")
        assert isinstance(store, ObjectStore)
        assert store.sizes() == {}
        content = np.random.default_rng(0).bytes(20_000_000)  # in several parts
        for name, size in {"one/a": 3, "one/long": len(content), "empty": 0}.items():
            (tmp_path / "file").write_bytes(content[:size])
            store.put(tmp_path / "file", name)
        assert store.sizes() == {"one/a": 3, "one/long": len(content), "empty": 0}
        store.get("one/long", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content
        assert (store.read("one/a"), store.read("empty")) == (content[:3], b"")
        store.remove("one/a")
        assert set(store.sizes()) == {"one/long", "empty"}
        with pytest.raises(UserError, match="run cannot be read"):
            store.read("one/a")


def test_keys_that_are_missing_or_refused_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto(tmp_path, checks_keys=True) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            UserError, match="bucket/data cannot be listed: 403, InvalidAccessKeyId"
        ):
            sp.data.packed(f"{server.url}/data")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(UserError, match=r"cannot be reached: .*Missing AccessKeyId"):
            sp.data.packed(f"{server.url}/data")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(UserError, match="bucket/data cannot be listed: no keys"):
            sp.data.packed(f"{server.url}/data")


SCRIPT = """
import os, signal, sys, time
import torch
import spartito as sp
from spartito.storage.remote import whole_ones
from spartito.storage.stores import open_store

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)).double()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
where, backups, out, last = sys.argv[1:]
photos = sp.data.image_folder(where, (8, 8), dtype=torch.float64)
photos = photos.map(sp.data.RandomFlip()).map(sp.data.Rescale(1 / 255)).shuffle().batch(7)

class Cut(sp.Callback):
    def on_train_batch_end(self, step, logs=None):
        if self.trainer.step == int(last):
            store = open_store(backups)
            while not any(name.endswith("manifest.json") for name in store.sizes()):
                time.sleep(0.05)
            os.kill(os.getppid(), signal.SIGKILL)

strategy = sp.strategy()
loss = torch.nn.CrossEntropyLoss()
trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy, seed=3)
restored = sp.callbacks.BackupAndRestore(backups, every=1)
trainer.fit(photos, epochs=3, callbacks=[restored, Cut()])
if strategy.task.index == 0:
    torch.save((net.state_dict(), trainer.step), out)
"""


def test_a_training_from_and_in_a_store_goes_on_under_another_number_of_workers(
    tmp_path: Path,
) -> None:
    """Data and backups are in a store. The job is killed, and goes on with one worker more."""
    here, script = data(tmp_path / "here"), tmp_path / "train.py"
    script.write_text(SCRIPT)
    with seaweedfs(tmp_path) as server:
        server.fill(here, "data")
        env = os.environ | server.env | {"SPARTITO_CACHE": str(tmp_path / "cache")}

        def train(workers: int, where: str, backups: str, out: str, last: int = 0) -> int:
            words = ["run", "--workers", f"{workers}", "--strategy", "mirrored", str(script)]
            given = [f"{where}/photos", backups, str(tmp_path / out), f"{last}"]
            with (tmp_path / f"{out}.log").open("w") as log:
                return subprocess.run(
                    [sys.executable, "-m", "spartito", *words, *given], env=env, stdout=log,
                    stderr=log, timeout=LIMIT,
                ).returncode  # fmt: skip

        assert train(1, str(here), str(tmp_path / "backups"), "whole") == 0
        there, backups = f"{server.url}/data", f"{server.url}/backups"
        assert train(2, there, backups, "cut", 6) == -signal.SIGKILL
        shutil.rmtree(tmp_path / "cache")  # as on another machine
        assert train(3, there, backups, "cut") == 0, (tmp_path / "cut.log").read_text()
        assert "going on after step" in (tmp_path / "cut.log").read_text()
    (expected, steps), (found, again) = (torch.load(tmp_path / n) for n in ("whole", "cut"))
    assert steps == again == 12
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_checkpoints_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto(tmp_path) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        torch.manual_seed(0)
        x, y = torch.randn(40, 8), torch.randint(0, 2, (40,))

        def trainer() -> sp.Trainer:
            net = torch.nn.Linear(8, 2)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            return sp.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())

        url = f"{server.url}/checkpoints"
        kept = sp.callbacks.ModelCheckpoint(url, monitor="loss", mode="max", keep=2)
        trained = trainer()
        trained.fit((x, y), epochs=5, callbacks=[kept], verbose=False)
        found = whole_ones(open_store(url))
        assert [name.partition(".")[0] for name, _ in found] == [
            f"step-{step:08d}" for step in (2, 8, 10)
        ]  # the first one is the best
        assert [manifest.about.get("best") is not None for _, manifest in found] == [
            True, False, False,
        ]  # fmt: skip
        other = trainer()
        other.load(url)
        assert other.step == trained.step == 10
        assert torch.equal(*(next(iter(one.model.parameters())) for one in (other, trained)))
        trained.save(f"{server.url}/final")
        with pytest.raises(UserError, match="final is there already"):
            trained.save(f"{server.url}/final")
        other.load(f"{server.url}/final")
        other.save(f"{server.url}/last")
        mean = tmp_path / "mean.safetensors"
        for words, said in (
            (["show", url], "weight  2x8"),
            (["verify", f"{server.url}/final"], "whole, 2 tensors"),
            (["convert", url, str(tmp_path / "model.safetensors")], "wrote"),
            (["average", *(f"{server.url}/{n}" for n in ("final", "last")), str(mean)], "wrote"),
            (["show", f"{server.url}/none"], "has no checkpoint that is whole"),
        ):
            told = io.StringIO()
            with redirect_stdout(told), redirect_stderr(told):
                main(["checkpoint", *words])
            assert said in told.getvalue()
        assert not any(path.name == "read" for path in Path(tempfile.gettempdir()).glob(
            f"spartito-{os.getuid()}/backup-*/written/*"
        ))  # fmt: skip


@pytest.mark.night
def test_the_recipe_of_the_page_trains_from_a_store(tmp_path: Path) -> None:
    with seaweedfs(tmp_path) as server:
        server.fill(data(tmp_path / "here"), "data")
        words = ["--data", f"{server.url}/data/photos", "--workers", "2", "--batch-size", "6",
                 "--epochs", "1", "--out", str(tmp_path / "run")]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "spartito", "train", "cats_vs_dogs", *words], text=True,
            env=os.environ | server.env, capture_output=True, timeout=LIMIT,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "validation accuracy" in done.stdout


def test_keys_of_aws_configure_are_found(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = b%c\n"
        "[work]\naws_access_key_id = d\naws_secret_access_key = e\naws_session_token = f\n"
    )
    (tmp_path / "config").write_text("[default]\nregion = r1\n[profile work]\nregion = r2\n")
    env = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }
    assert aws_options(env) == {"access_key_id": "a", "secret_access_key": "b%c", "region": "r1"}
    assert aws_options({**env, "AWS_PROFILE": "work", "AWS_REGION": "r3"}) == {
        "access_key_id": "d", "secret_access_key": "e", "session_token": "f",
    }  # fmt: skip
    assert aws_options({**env, "AWS_ACCESS_KEY_ID": "x", "AWS_ENDPOINT_URL": "u"}) == {
        "endpoint": "u"
    }
    with pytest.raises(UserError, match="AWS_PROFILE='none' is in neither"):
        aws_options({**env, "AWS_PROFILE": "none"})
