"""What the server of `tests.processes` does before it forks the first process."""

from tests import preloaded as preloaded
from tests import stacks

stacks.register()
