"""What came of a suite, as a picture: a row for each fault, a column for each strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from spartito.chaos.schedule import KINDS

WIDE, HIGH, GAP, LEFT, TOP = 40, 26, 22, 96, 210
STYLE = """\
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #26282b }
.h { font-weight: 600; font-size: 15px } .m { text-anchor: middle } .e { text-anchor: end }
.on { fill: #d6ead6; stroke: #37793f } .again { fill: #d5e4f2; stroke: #2b6ca3 }
.broken { fill: #f3c1bb; stroke: #a8281b } .none { fill: none; stroke: #e4dfd3 }"""
LEGEND = (
    ("on", "goes on by itself"),
    ("again", "ends, named; goes on when it is started again"),
    ("broken", "not as promised"),
)


def picture(panels: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw all results; a cell has the worst of its runs and the most seconds of them.

    Args:
        panels: results, as `read_results` has them, by the words above their columns.

    Returns:
        The SVG.
    """
    named = [kind for kind in KINDS if any(kind in kinds(r) for rs in panels.values() for r in rs)]
    rows = {kind: TOP + HIGH * index for index, kind in enumerate(named)}
    bottom = TOP + HIGH * len(rows)
    drawn: list[str] = []
    x = LEFT
    for title, results in panels.items():
        begin = x
        drawn.append(f'<text class="h" x="{x}" y="{TOP - 146}">{escape(title)}</text>')
        for name in dict.fromkeys(str(result["strategy"]) for result in results):
            found = [result for result in results if result["strategy"] == name]
            drawn += _column(x, name, found, rows)
            x += WIDE
        x = max(x, begin + 9 * len(title)) + GAP
    width = max(x + 60, 960)
    drawn += [
        f'<text class="e" x="{LEFT - 8}" y="{y + 17}">{kind}</text>' for kind, y in rows.items()
    ]
    at = 20
    for style, words in LEGEND:
        drawn.append(f'<rect class="{style}" x="{at}" y="{bottom + 16}" width="20" height="14"/>')
        drawn.append(f'<text x="{at + 26}" y="{bottom + 28}">{words}</text>')
        at += 50 + 7 * len(words)
    drawn.append(f'<text x="{at}" y="{bottom + 28}">number: seconds, the most of all tasks</text>')
    size = f'viewBox="0 0 {width} {bottom + 46}" width="{width}" height="{bottom + 46}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">',
            '<title id="title">What jobs survive: faults by strategies</title>',
            f"<style>\n{STYLE}\n</style>",
            f'<rect x="1" y="1" width="{width - 2}" height="{bottom + 44}" rx="10" '
            'fill="#fbfaf6" stroke="#b9b4a6"/>',
            '<text class="h" x="20" y="34">What jobs survive</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def kinds(result: Mapping[str, Any]) -> list[str]:
    """The kinds of faults of one run, in the order of its schedule."""
    return [fault.partition("@")[0] for fault in str(result["schedule"]).split("+")]


def _column(
    x: int, name: str, results: Sequence[Mapping[str, Any]], rows: Mapping[str, int]
) -> Iterator[str]:
    yield (
        f'<text transform="translate({x + WIDE / 2 + 4} {TOP - 8}) rotate(-60)">'
        f"{escape(name)}</text>"
    )
    for kind, y in rows.items():
        found = [result for result in results if kind in kinds(result)]
        box = f'x="{x + 2}" y="{y + 2}" width="{WIDE - 4}" height="{HIGH - 4}" rx="4"'
        if not found:
            yield f'<rect class="none" {box}/>'
            continue
        broken, again = any(r["broken"] for r in found), any(r["restarts"] for r in found)
        style = "broken" if broken else "again" if again else "on"
        known = [r["seconds"] for r in found if r["seconds"] is not None]
        seconds = max((s for s in known if not math.isnan(s)), default=None)
        said = "; ".join(f"{r['schedule']}: {', '.join(r['broken']) or 'ok'}" for r in found)
        yield f'<rect class="{style}" {box}><title>{escape(said)}</title></rect>'
        if seconds is not None:
            yield (
                f'<text class="m" x="{x + WIDE / 2}" y="{y + 17}">'
                f"{seconds:.{0 if seconds >= 9.95 else 1}f}</text>"
            )
