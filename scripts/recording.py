"""Draws what a command printed as a terminal: ``scripts/demo 2>&1 | python scripts/recording.py``.

Colours that a terminal was sent stay if the command believes that it writes to one, as under
``script -qec COMMAND /dev/null``. The picture has no script, and no font but the reader's own.
"""

from __future__ import annotations

import re
import sys
from html import escape

COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[=>]")
COLOURS = {"31": "#f7768e", "32": "#9ece6a", "33": "#e0af68", "34": "#7aa2f7", "36": "#7dcfff"}
WIDTH, HEIGHT, MARGIN = 7.25, 19, 16
"""Pixels of a character, of a line, and around them; the font has 12 of them."""


def terminal(text: str) -> str:
    """A picture of a terminal.

    Args:
        text: What was printed; a line that was written over counts as it was in the end.

    Returns:
        An SVG document.
    """
    lines = [
        CONTROL.sub("", line).rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")
    ]
    shown = [line.rstrip() for line in lines if COLOUR.sub("", line).strip()]
    width = 2 * MARGIN + WIDTH * max(len(COLOUR.sub("", line)) for line in shown)
    height = 2 * MARGIN + HEIGHT * len(shown)
    body = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + HEIGHT * row + 13}">{_spans(line)}</text>'
        for row, line in enumerate(shown)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'font-family="monospace" font-size="12" fill="#c0caf5">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1a1b26"/>\n{body}\n</svg>\n'
    )


def _spans(line: str) -> str:
    """A line with its colours as spans; each character has its column, whatever the font."""
    first, *rest = COLOUR.split(line)
    parts = [("", first), *zip(rest[::2], rest[1::2], strict=True)]
    spans = []
    column = 0
    for codes, part in parts:
        colour = next((COLOURS[code] for code in codes.split(";") if code in COLOURS), "")
        fill = f' fill="{colour}"' if colour else ""
        if part:
            at = f'x="{MARGIN + WIDTH * column:g}" textLength="{WIDTH * len(part):g}"'
            spans.append(f'<tspan {at} xml:space="preserve"{fill}>{escape(part)}</tspan>')
        column += len(part)
    return "".join(spans)


if __name__ == "__main__":
    sys.stdout.write(terminal(sys.stdin.read()))
