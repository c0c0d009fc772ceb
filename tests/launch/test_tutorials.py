"""The tutorials that need more than one machine, typed as they are written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from spartito.launch.lines.network import NoNamespacesError
from tests.commands import SPARTITO, commands_in
from tests.launch.slurm_cluster import missing, slurm_in
from tests.launch.ssh_hosts import machines, why_not
from tests.skips import need, skip, skip_if
from tests.test_docs import blocks

NUMBER = "NUMBER"


def typed(page: str) -> Iterator[list[str]]:
    """The words of each line that the page has its reader type on these machines."""
    for block in blocks(page):
        if block.language == "bash":
            yield from (shlex.split(line) for line in block.text.splitlines())


def script(page: str) -> str:
    (found,) = (block.text for block in blocks(page) if block.title == "train.py")
    return found


@pytest.mark.slow
@skip_if(bool(why := why_not()), "ssh", why)
def test_two_machines(tmp_path: Path) -> None:
    need("netns")
    page = "docs/tutorials/two-machines.md"
    (site_folder := tmp_path / "site").mkdir()
    (work := tmp_path / "work").mkdir()
    try:
        with machines(site_folder) as site, commands_in(work) as commands:
            for number, (program, *words) in enumerate(typed(page)):
                # As the page says, a second run has a folder of its own.
                folder = f"runs/digits-{number}"
                commands.write("train.py", script(page).replace("runs/digits", folder))
                if program == "ssh":
                    done = commands.start(*site.near.enters, *site.ssh.split(), *words).end()
                else:
                    done = site.start(commands, *words).end()
                assert done.code == 0, f"{program} {words}\n{done.text}"
                assert (work / folder / "report.html").exists() == (words[0] == "run")
    except NoNamespacesError as error:
        skip("netns", error)


@pytest.mark.slurm
@pytest.mark.timeout(600)
@skip_if((reason := missing()) is not None, "slurm", reason)
def test_slurm(tmp_path: Path) -> None:
    page = "docs/tutorials/slurm.md"
    with slurm_in(tmp_path) as slurm:
        (slurm.work / "train.py").write_text(script(page))
        job = 0
        for program, *words in typed(page):
            if program == "sbatch":
                job = slurm.submit(*words)
                ended = slurm.wait(job)
                assert ended.code == 0, ended
            elif ">" in words:
                *given, _, file = words
                with commands_in(slurm.work) as commands:
                    written = commands.start(*SPARTITO, *given, "--partition=batch").end()
                assert written.code == 0, written.text
                (slurm.work / file).write_text(written.out)
            else:
                shown = slurm.run(*SPARTITO, *(str(job) if w == NUMBER else w for w in words))
                assert re.search(rf"job {job} \(digits\): COMPLETED", shown), shown
        assert len(list(slurm.work.glob(f"runs/digits-{job}/checkpoints/step-*"))) == 2
