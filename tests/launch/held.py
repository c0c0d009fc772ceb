"""Jobs whose training waits before some steps, so that a fault meets them where the test says."""

from __future__ import annotations

from pathlib import Path

from tests.commands import eventually

LIMIT = 240.0


class Held:
    """The steps before which the tasks of a job wait (see ``tests/lean/held.py``).

    Args:
        folder: where they say so; a task makes it.
        steps: these.
        inside: what the tasks call the folder, where that is something else.
    """

    def __init__(self, folder: Path, *steps: int, inside: str = "") -> None:
        self.folder = folder
        listed = ",".join(map(str, steps))
        self.env = {
            "SPARTITO_STEP_HOOK": "held:attach",
            "SPARTITO_TEST_HELD": f"{inside or folder}:{listed}",
        }

    def tell(self, compose: Path) -> None:
        """Tell the tasks of this file of a job in containers."""
        said = "".join(f"  {name}: '{value}'\n" for name, value in self.env.items())
        begin = "x-environment: &environment\n"
        text = compose.read_text()
        assert begin in text
        compose.write_text(text.replace(begin, begin + said))

    def came(self, step: int, *tasks: str) -> bool:
        """Whether ``tasks``, as ``worker-0``, wait before ``step``, or have."""
        return all((self.folder / f"{step}-{task}").exists() for task in tasks)

    def wait(self, step: int, *tasks: str) -> None:
        """Until ``tasks`` wait before ``step``."""
        came = eventually(lambda: self.came(step, *tasks), LIMIT)
        assert came, f"before step {step}: {sorted(path.name for path in self.folder.glob('*'))}"

    def let_go(self, step: int) -> None:
        """Let them go on with ``step``."""
        (self.folder / f"{step}").touch()
