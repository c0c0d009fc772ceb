"""What breaks the rules of the wire is refused: random, changed and forged bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.wire.frames import Gone, ProtocolError, checksum
from spartito.wire.handshake import MAGIC, VERSION
from spartito.wire.limits import MOST_HEADER
from tests.wire.test_frames import (
    LIMIT,
    NOTE,
    Anything,
    Note,
    Push,
    forged,
    frame,
    reader,
    reply_to,
    wires,
)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET ", "b'SPTO' was expected, b'GET ' came: this is no task of Spartito"),
        (b"x", "b'SPTO' was expected, b'x' came"),
        (MAGIC + b"\x07", "version 4 was expected, 7 came: all tasks must run the same Spartito"),
        (MAGIC + b"\x07" + bytes(200), "version 4 was expected, 7 came"),
        (forged(b"", flags=2), "flags 0 or 1 and reserved 0 were expected, 2 and 0 came"),
        (forged(b"", reserved=9), "flags 0 or 1 and reserved 0 were expected, 0 and 9 came"),
        (
            forged(b"", header_size=MOST_HEADER + 1),
            "a header of 65537 bytes came; it may have at most 65536",
        ),
        (
            forged(b"\xc0", payload_size=LIMIT + 1),
            "65537 bytes of payload came; 65536 are the most",
        ),
        (forged(b"\xc0", payload_size=2**64 - 1), "18446744073709551615 bytes of payload came"),
        (forged(b"\xc0", sum=1), "message that is not known"),
        (frame()[:-1] + b"?", "CRC is wrong"),
        (frame(NOTE, b"abc")[:-1] + b"?", "the payload's sum is wrong"),
        (forged(b""), "message that is not known"),
        (forged(b"\xc1"), "message that is not known"),
        (forged(msgspec.msgpack.encode({"type": "other"})), "'other'"),
        (forged(msgspec.msgpack.encode({"type": "note", "text": 3})), "`str`, got `int`"),
        (forged(b"\x82\xa4type\xa4note\xa4text\xa1\xff"), "utf-8"),
    ],
)
def test_what_breaks_the_rules_is_named(data: bytes, error: str) -> None:
    with reader() as (bare, wire):
        bare.sendall(data)  # and stays open: nobody waits for the rest of a wrong frame
        with pytest.raises(ProtocolError) as raised:
            wire.receive()
    assert error in str(raised.value)


def test_nesting_without_an_end_is_refused() -> None:
    header = b"\x82\xa4type\xa8anything\xa4what" + b"\x91" * 60_000 + b"\xc0"
    assert isinstance(reply_to(forged(header), accepts=Anything), ProtocolError)


def test_a_header_above_the_limit_is_not_sent() -> None:
    with wires() as (near, progress):
        with pytest.raises(ProtocolError, match=r"a note of 100,0\d\d bytes; the other"):
            near.send(Note("x" * 100_000))
        near.send(NOTE)  # nothing of it was sent
        assert progress.receive() == NOTE


def test_the_limit_can_be_changed() -> None:
    with wires(limit=10) as (near, progress):
        progress.limit = 100
        near.send(NOTE, bytes(100))
        progress.receive()
        progress.limit = 99
        near.send(NOTE, bytes(100))
        with pytest.raises(ProtocolError, match="100 bytes of payload came; 99 are the most"):
            progress.receive()


def allocated(work: Callable[[], object]) -> int:
    """The most bytes that ``work`` held at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BESIDES = MOST_HEADER + (256 << 10)  # what a wire and the test itself need


def test_what_is_allocated_is_counted() -> None:
    header = msgspec.msgpack.encode(NOTE)
    claim = forged(header, payload_size=32 << 20)
    assert allocated(lambda: reply_to(claim, limit=32 << 20)) >= 32 << 20
    assert allocated(lambda: reply_to(claim, limit=(32 << 20) - 1)) < BESIDES


@settings(max_examples=150)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    def look() -> None:
        assert isinstance(reply_to(data), ProtocolError | Gone)
        assert isinstance(reply_to(MAGIC + bytes([VERSION]) + data), ProtocolError | Gone)

    assert allocated(look) < LIMIT + BESIDES


@settings(max_examples=300)
@given(
    target=st.integers(0, 10_000), value=st.integers(1, 255), payload=st.binary(max_size=40),
    text=st.text(max_size=20),
)  # fmt: skip
def test_one_changed_byte_is_always_found(
    target: int, value: int, payload: bytes, text: str
) -> None:
    data = bytearray(frame(Note(text), payload))
    data[target % len(data)] ^= value

    def look() -> None:
        assert isinstance(reply_to(bytes(data)), ProtocolError | Gone)

    assert allocated(look) < LIMIT + BESIDES


@settings(max_examples=150)
@given(
    header=st.binary(max_size=60), payload=st.binary(max_size=40),
    claims=st.dictionaries(
        st.sampled_from(["flags", "reserved", "header_size", "payload_size", "sum"]),
        st.one_of(st.integers(0, 255), st.just(0)),
    ),
    size=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_a_forger_with_the_right_crc_gets_no_further(
    header: bytes, payload: bytes, claims: dict[str, int], size: int
) -> None:
    def look() -> None:
        for fields in (claims, {"payload_size": size}):
            assert isinstance(
                reply_to(forged(header, payload, **fields)), ProtocolError | Gone | Note | Push
            )

    assert allocated(look) < LIMIT + BESIDES


@given(parts=st.lists(st.binary(max_size=40), max_size=6))
def test_the_sums_of_parts_add_up_to_the_sum_of_the_words(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    padded = whole + bytes(-len(whole) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    assert checksum(memoryview(whole)) == sum(words) % 2**64
    total = offset = 0
    for part in parts:
        total += checksum(memoryview(part), offset)
        offset += len(part)
    assert total % 2**64 == sum(words) % 2**64
