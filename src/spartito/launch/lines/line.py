"""Lines between tasks, as ``--link`` says them: a rate, and how long a packet is on its way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from spartito.errors import UserError

EXAMPLE = "Write a rate, and a delay if you like: 1gbit, 100mbit, or 10mbit,50ms."
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_BITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

LEAST, MOST = 1e4, 1e12
"""Bits per second that a line has at least and at most."""
LONGEST = 10.0
"""Seconds of a delay at most."""
LEAST_BURST, MOST_BURST = 4_000, 125_000
"""Bytes that a line lets through at once at least, and, where timers do not need more, at most."""
LATE, ALWAYS, BACK = 2.5e-4, 1e-4, 1e-3
"""Seconds of its rate that come at once: by how much the system's timers are late, so that the rate
is kept; at any rate; and on the way back, where what comes was held up on its way out already.
Measured with 16 kB on both ways at 1 Gbit/s: 0.64 Gbit/s came through; with these 0.95."""
PACKETS = 100_000
"""On their way at most."""


@dataclass(frozen=True, slots=True)
class Link:
    """A line from each task to all others, the same in both directions.

    Args:
        rate: bits per second.
        delay: seconds from one task to another, one way.
    """

    rate: float
    delay: float = 0.0

    @classmethod
    def read(cls, text: str) -> Link:
        """The line that ``--link`` says.

        Args:
            text: as ``100mbit`` or ``10mbit,50ms``.

        Returns:
            The line.

        Raises:
            UserError: another form, or a rate or a delay that no line has.
        """
        rate, comma, delay = text.partition(",")
        there, late = _RATE.fullmatch(rate), _DELAY.fullmatch(delay)
        if there is None or (comma and late is None):
            raise UserError(f"--link {text!r} is not a rate and a delay", EXAMPLE)
        found = cls(
            float(there[1]) * _BITS[there[2]], float(late[1]) * _SECONDS[late[2]] if late else 0.0
        )
        if not LEAST <= found.rate <= MOST:
            raise UserError(f"--link {text!r}: a rate is from 10kbit to 1000gbit", EXAMPLE)
        if found.delay > LONGEST:
            raise UserError(f"--link {text!r}: a delay is at most {LONGEST:g}s", EXAMPLE)
        return found

    def __str__(self) -> str:
        """As it is typed: ``100mbit,50ms``."""
        late = [_in_units(self.delay, _SECONDS)] if self.delay else []
        return ",".join([_in_units(self.rate, _BITS), *late])

    @property
    def spoken(self) -> str:
        """As a sentence says it: ``100 Mbit/s with 50 ms one way``."""
        rate = _in_units(self.rate, {" Gbit/s": 1e9, " Mbit/s": 1e6, " kbit/s": 1e3})
        return rate + (f" with {self.delay * 1e3:g} ms one way" if self.delay else "")

    @property
    def out(self) -> list[str]:
        """What ``tc`` calls the way out of a task."""
        return self._at_most(max(min(LATE * self.rate / 8, MOST_BURST), ALWAYS * self.rate / 8))

    @property
    def back(self) -> list[str]:
        """What ``tc`` calls the way in, from the switch; packets are late here."""
        if not self.delay:
            return self._at_most(BACK * self.rate / 8)
        late = f"{self.delay * 1e6:.0f}us"
        return ["netem", "limit", str(PACKETS), "delay", late, "rate", f"{self.rate:.0f}bit"]

    def _at_most(self, burst: float) -> list[str]:
        """The rate, beyond so many bytes at once."""
        at_once = max(LEAST_BURST, round(burst))
        return ["tbf", "rate", f"{self.rate:.0f}bit", "burst", str(at_once), "latency", "400ms"]


def _in_units(value: float, units: Mapping[str, float]) -> str:
    """``value`` in the largest of ``units`` in which it is 1 or more."""
    name = next((one for one, size in units.items() if value >= size), list(units)[-1])
    return f"{value / units[name]:g}{name}"
