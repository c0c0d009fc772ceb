"""One term for each concept: words of our own that the field has a better one for stay out."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What is banned (as a word, also inside of an identifier), and what stands for it.
BANNED = {
    r"answer(s|ed|ing)?": "return, reply, response, result",
    r"riders?": "piggybacked scalars",
    r"unit": "loss divisor (or what is meant)",
    r"sightings?|beacons?|living signs?": "heartbeat",
    r"(?<!torch\.)(?<!tensor\.)roll|absentees?": "liveness check, missing tasks",
    r"(?<!tensor )boards?": "key-value store",
    r"tally|tallies": "counter",
    r"stations?": "server",
    r"talk(s|ed|ing)?": "connection, exchange",
    r"knock(s|ed|ing)?": "probe",
    r"strangers?": "unknown peer",
    r"near ends?": "client side",
    r"far ends?": "remote agent",
    r"brakes?": "throttle",
    r"paces?": "rate, rate estimate",
    r"(?<!type )guards?": "reaper",
    r"rooms?": "package",
    r"(?<!math\.)(?<!torch\.)(?<!rounding mode )floors?(?! div)": "layer",
    r"mend(s|ed|ing)?": "fix",
    r"(?<!in )(?<!takes )(?<!take )(?<!took )places?": "index, offset, slot, position",
    r"leads|led by|one that leads": "coordinator, rank 0",
    r"(?<!usage )pieces?": "work item",
    r"purse|hung up|hangs? up|riddles?|heed(s|ed)?": "a plain word",
    r"(its|own|a|the|this|each|equal|replica s|worker s) shares?|shares? of": "shard, fraction",
}
KINDS = (".py", ".md", ".toml", ".yml", ".yaml", ".j2", ".sh", "")
PATTERNS = [
    (re.compile(rf"(?<![a-z])(?:{what})(?![a-z])"), instead) for what, instead in BANNED.items()
]
ANY = re.compile(rf"(?<![a-z])(?:{'|'.join(f'(?:{what})' for what in BANNED)})(?![a-z])")


def spaced(text: str) -> str:
    """``text`` in lower case with identifiers taken apart: ``_ownRiders`` is ``own riders``."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return re.sub(r"[^a-z\n.,;:()]+", " ", text.lower())


def found(text: str) -> list[str]:
    """The banned words of ``text``, with the number of the line and what to write instead."""
    if not ANY.search(lines := spaced(text)):  # most have none
        return []
    return [
        f"{number}: {hit[0]!r}: write {instead}"
        for number, line in enumerate(lines.split("\n"), 1)
        for pattern, instead in PATTERNS
        for hit in pattern.finditer(line)
    ]


def files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [
        name
        for name in listed
        if Path(name).suffix in KINDS and name not in ("tests/test_words.py", "LICENSE")
    ]


@pytest.mark.parametrize("text", ["_riders = 3", "theRider", "a piece of it", "its place in"])
def test_a_banned_word_is_found_in_prose_and_in_identifiers(text: str) -> None:
    assert found(text)


@pytest.mark.parametrize(
    "text", ["in place", "replace", "placement", "math.floor(x)", "in-place", "leaders"]
)
def test_terms_of_the_field_are_not(text: str) -> None:
    assert not found(text)


def test_the_words_of_the_project_are_those_of_the_field() -> None:
    wrong = {name: hits for name in files() if (hits := found((ROOT / name).read_text()))}
    assert not wrong, "\n".join(f"{name}:{hit}" for name, hits in wrong.items() for hit in hits)
