"""Mutated inputs for all that decodes what others wrote: ``python -m tests.fuzz --inputs 1000000``.

Each target has seeds (valid inputs), and a way to make sums and checksums right again behind a
mutation, so that what lies behind them is reached too. An input ends as it should, with a value
or an error of ours, or the command says its number and ends with 1. The same seed draws the same
inputs. Memory may grow by `MOST_MEMORY` at most.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Protocol, get_args

import msgspec
import torch

from spartito.checkpoint import manager, stored_parts
from spartito.checkpoint.manager import read_checkpoint, write_checkpoint
from spartito.cluster.store import protocol
from spartito.doctor.transport.messages import FromAny
from spartito.errors import SpartitoError
from spartito.ps.protocol import messages, work
from spartito.storage import atomic, tensors
from spartito.storage.atomic import MANIFEST
from spartito.wire import frames as wire
from spartito.wire import streams as connection
from spartito.wire.frames import PREFIX, START, Gone, Wire
from spartito.wire.handshake import MAGIC, VERSION
from spartito.wire.streams import HEAD, ForgedError, Sealed

MOST_MEMORY = 256 << 20
"""Bytes by which a million inputs may raise what the process holds at its highest."""

EDGES = (0, 1, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
ODD = (
    *(b"", b"null", b"{}", b"[]", b"-1", b"1e999", b'"', b"\xc1"),
    *(b"\xdf\xff\xff\xff\xff", b"../../x"),
)


class Target(Protocol):
    """One decoder."""

    modules: tuple[ModuleType, ...]
    errors: tuple[type[BaseException], ...]

    def draw(self, random: random.Random) -> Any:
        """An input."""

    def read(self, data: Any) -> object:
        """Decode it: what it is, or an error of ``errors``."""


def mutated(data: bytes, draw: random.Random) -> bytes:
    """``data`` with one to four changes: bits, numbers at their edges, parts twice or left out."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found) + 1)
        size = min(draw.choice((1, 1, 2, 4, 8, 32)), len(found) - at)
        match draw.randrange(7):
            case 0 if size:
                found[at] ^= 1 << draw.randrange(8)
            case 1 if size in (1, 2, 4, 8):
                edge = draw.choice(EDGES) % (1 << 8 * size)
                found[at : at + size] = edge.to_bytes(size, draw.choice(("little", "big")))
            case 2:
                found[at:at] = draw.randbytes(draw.choice((1, 2, 9)))
            case 3:
                del found[at : at + size]
            case 4:
                found[at:at] = found[at : at + size] * draw.choice((1, 2, 50))
            case 5:
                found[at : at + size] = draw.choice(ODD)
            case 6:
                del found[at:]
    return bytes(found)


class FromBytes:
    """A connected socket on which these bytes come, and then its end."""

    family = 1

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def recv(self, size: int) -> bytes:
        data, self._left = bytes(self._left[:size]), self._left[size:]
        return data

    def fileno(self) -> int:
        return -1

    def _nothing(self, *_: Any) -> None:
        return None

    settimeout = setsockopt = close = shutdown = setblocking = _nothing
    getsockname = getpeername = send = _nothing


def examples(kinds: Any) -> list[msgspec.Struct]:
    """A message of each kind, with the least that each field may be."""
    found = []
    for kind in get_args(kinds):
        fields = {
            field.name: _least(field.type)
            for field in msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
            if field.required
        }
        found.append(msgspec.convert(fields, kind) if _untagged(kind) else kind(**fields))
    return found


def _untagged(kind: Any) -> bool:
    return kind.__struct_config__.tag is None


def _least(info: Any) -> Any:
    kinds = msgspec.inspect
    match info:
        case kinds.IntType():
            return info.ge or 0
        case kinds.FloatType():
            return float(info.ge or 0.0)
        case kinds.StrType():
            return "x" * (info.min_length or 1)
        case kinds.BytesType():
            return b"x"
        case kinds.BoolType():
            return True
        case kinds.ListType() | kinds.VarTupleType():
            return [_least(info.item_type)]
        case kinds.TupleType():
            return tuple(map(_least, info.item_types))
        case kinds.DictType():
            return {_least(info.key_type): _least(info.value_type)}
        case kinds.UnionType():
            return _least(info.types[0])
        case kinds.EnumType():
            return next(iter(info.cls))
        case kinds.StructType() | kinds.DataclassType():
            return info.cls(**{f.name: _least(f.type) for f in info.fields if f.required})
    return None


class Frames:
    """The frames of parameter servers, of the coordinator, the store and doctors, both ways."""

    modules: tuple[ModuleType, ...] = (wire,)
    errors: tuple[type[BaseException], ...] = (wire.ProtocolError, Gone)

    def __init__(self) -> None:
        self._kinds: Any = [
            messages.Request, messages.Reply, work.ToCoordinator, work.ToWorker,
            protocol.Request, FromAny,
        ]  # fmt: skip
        self._seeds = [
            (kind, msgspec.msgpack.encode(one)) for kind in self._kinds for one in examples(kind)
        ]
        reply = protocol.Reply({"a": b"x"}, "full")
        self._seeds.append((protocol.Reply, msgspec.msgpack.encode(reply)))

    def draw(self, random: random.Random) -> tuple[Any, bytes]:
        kind, header = random.choice(self._seeds)
        payload = random.randbytes(random.choice((0, 0, 8, 200)))
        if random.random() < 0.7:
            header = mutated(header, random)
        total = wire.checksum(memoryview(payload))
        flags = random.choice((0, 0, 1, random.randrange(256)))
        size = len(payload) if random.random() < 0.9 else random.choice(EDGES)
        length = len(header) if random.random() < 0.9 else random.choice(EDGES) % 2**32
        head = PREFIX.pack(MAGIC, VERSION, flags, 0, length, size, 0, total)
        head += header
        head += bytes(max(0, START - len(head)))
        crc = struct.pack("<I", zlib.crc32(head))
        data = head[:20] + crc + head[24:] + payload
        return kind, mutated(data, random) if random.random() < 0.3 else data

    def read(self, data: tuple[Any, bytes]) -> object:
        kind, frame = data
        end: Any = FromBytes(frame)
        return Wire(end, kind, limit=1 << 20).receive()


class Records:
    """What lies under all of them: records, by who knows the keys of the connection too."""

    modules: tuple[ModuleType, ...] = (connection,)
    errors: tuple[type[BaseException], ...] = (ForgedError,)
    KEYS = bytes(32), bytes([1]) * 32

    def draw(self, random: random.Random) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        own, data = AESGCM(self.KEYS[1]), b""
        for number in range(random.randint(1, 3)):
            text = random.randbytes(random.choice((1, 5, 100)))
            tag = own.encrypt(number.to_bytes(12, "little"), b"", text)
            data += HEAD.pack(len(text), tag) + text
        return mutated(data, random)

    def __init__(self) -> None:
        below: Any = FromBytes(b"")
        self._end = Sealed(below, *self.KEYS)

    def read(self, data: bytes) -> object:
        end: Any = self._end  # with its memory, which takes longer to make than to use
        end._below = FromBytes(data)
        end._start = end._stop = end._at = end._end = end._received = 0
        return end.recv(400, 256)


class Checkpoints:
    """A checkpoint of which one file is changed, with and without the right checksum."""

    modules: tuple[ModuleType, ...] = (manager, atomic, tensors, stored_parts)
    errors: tuple[type[BaseException], ...] = (SpartitoError,)

    def __init__(self, folder: Path) -> None:
        self._path = folder / "checkpoint"
        state = {
            "model": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)},
            "optimizer": {"state": {0: {"step": torch.tensor(3), "name": "x"}}, "groups": [{}]},
            "position": {"epoch": 1, "random": [1, 2, 3], "rate": 0.1, "done": False},
        }
        write_checkpoint(self._path, state)
        self._whole = {file.name: file.read_bytes() for file in self._path.iterdir()}

    def draw(self, random: random.Random) -> dict[str, bytes]:
        name = random.choice(sorted(self._whole))
        content = mutated(self._whole[name], random)
        if name == MANIFEST or random.random() < 0.1:
            return {name: content}
        manifest = json.loads(self._whole[MANIFEST])
        fact = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][name] = fact
        return {name: content, MANIFEST: json.dumps(manifest).encode()}

    def read(self, data: dict[str, bytes]) -> object:
        for name, content in data.items():
            (self._path / name).write_bytes(content)
        try:
            return read_checkpoint(self._path)
        finally:
            for name in data:
                (self._path / name).write_bytes(self._whole[name])


TARGETS = ("frames", "records", "checkpoint")


@contextmanager
def target_of(name: str) -> Iterator[Target]:
    """The target of this name."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        made: dict[str, Callable[[], Target]] = {
            "frames": Frames, "records": Records,
            "checkpoint": lambda: Checkpoints(Path(at)),
        }  # fmt: skip
        yield made[name]()


@dataclass(frozen=True)
class Found:
    """What came of it."""

    inputs: int
    ends: Counter[str]
    memory: int
    seconds: float


def fuzz(target: Target, inputs: int, seed: int, first: int = 0) -> Found:
    """Feed it; raises what an input raised that it may not, with the input's number."""
    ends: Counter[str] = Counter()
    before, began = _highest(), time.perf_counter()
    for number in range(first, first + inputs):
        draw = random.Random(f"{seed} {number}")
        data = target.draw(draw)
        try:
            target.read(data)
        except target.errors as error:
            ends[type(error).__name__] += 1
        except BaseException as error:
            error.add_note(f"input {number} of seed {seed}: {data!r:.500}")
            raise
        else:
            ends["read"] += 1
    return Found(inputs, ends, _highest() - before, time.perf_counter() - began)


def covered(target: Target, inputs: int, seed: int) -> dict[str, tuple[int, int]]:
    """Lines of functions in the target's modules that ran, of how many, by module."""
    files = {str(module.__file__): module for module in target.modules}
    ran: dict[str, set[int]] = {file: set() for file in files}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        lines_here = ran.get(frame.f_code.co_filename)
        if lines_here is None:
            return None
        lines_here.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        fuzz(target, inputs, seed)
    finally:
        sys.settrace(None)
    found = {}
    for file, module in files.items():
        code = compile(Path(file).read_text(), file, "exec")
        there = {line for each in _functions(code) for _, _, line in each.co_lines() if line}
        found[module.__name__] = len(ran[file] & there), len(there)
    return found


def _functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # a function, not the body of a class
                yield constant
            yield from _functions(constant)


def _highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    """Feed each target, and say what came of it."""
    assert __doc__ is not None
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("targets", nargs="*", choices=(*TARGETS, []), default=[])
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=13)
    options.add_argument("--first", type=int, default=0, help="the number of the first input")
    options.add_argument("--coverage", type=int, default=20_000, help="inputs that are traced")
    given = options.parse_args()
    for name in given.targets or TARGETS:
        with target_of(name) as target:
            found = fuzz(target, given.inputs, given.seed, given.first)
            ends = ", ".join(f"{count:,} {end}" for end, count in found.ends.most_common())
            print(f"{name}: {found.inputs:,} inputs of seed {given.seed} in {found.seconds:.0f} s: "
                  f"{ends}; memory grew by {found.memory >> 20} MiB", flush=True)  # fmt: skip
            if found.memory > MOST_MEMORY:
                sys.exit(f"{name}: more than {MOST_MEMORY >> 20} MiB")
            if given.coverage:
                for module, (ran, there) in covered(target, given.coverage, given.seed).items():
                    print(f"  {module}: {ran} of {there} lines ({100 * ran // there}%)", flush=True)


if __name__ == "__main__":
    main()
