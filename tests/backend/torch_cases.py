"""torch's own test cases for a backend, as the package that users install has them."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import SkipTest

from tests.replicas import warns

MODULE = "torch.testing._internal.distributed.distributed_test"
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
EXCLUDED = Path(__file__).with_name("torch_excluded.txt")
""" "# reason", and below it the names of cases, one a line."""


def names() -> list[str]:
    """All cases, from the text of the module: to import it takes what only replicas have."""
    root = find_spec("torch")
    assert root is not None
    assert root.submodule_search_locations is not None
    path = Path(root.submodule_search_locations[0], *MODULE.split(".")[1:])
    text = path.with_suffix(".py").read_text().partition("class _DistTestBase:")[2]
    return sorted(set(re.findall(r"^        def (test_\w+)\(", text, re.MULTILINE)))


def excluded() -> dict[str, str]:
    """The reasons why cases do not run here, by their names."""
    reasons, reason = {}, ""
    for line in EXCLUDED.read_text().splitlines():
        if line.startswith("#"):
            reason = line.removeprefix("# ")
        elif line:
            reasons[line] = reason
    return reasons


@cache
def _module() -> Any:
    """torch's module, which chooses its cases when imported: all those that it has for gloo."""
    os.environ["BACKEND"] = "gloo"
    return importlib.import_module(MODULE)


@warns("")  # torch's own cases: whatever they like
def run(backend: str, name: str, folder: str) -> tuple[str, str]:
    """How the case ended on this rank, and why."""
    import torch
    import torch.distributed as dist

    for part in ("barrier", "init_dir", "test_dir"):
        Path(folder, part).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = folder
    module = _module()

    bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)
    case = type("Case", bases, {})(name)
    module.Barrier.init()
    case.rank = int(os.environ["RANK"])
    case.file_name = f"{folder}/group"
    torch.manual_seed(1234)
    dist.init_process_group(
        backend,
        init_method=case.init_method,
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=case.rank,
        timeout=module.timedelta(seconds=30),
    )
    try:
        getattr(case, name)()
        case._barrier(wait_for=int(os.environ["WORLD_SIZE"]))  # whoever is done waits with leaving
        return PASSED, ""
    except SkipTest as skipped:
        return SKIPPED, str(skipped)
    except SystemExit as end:
        skips = {one.exit_code: one.message for one in module.TEST_SKIPS.values()}
        return SKIPPED, skips.get(end.code, f"exit code {end.code}")
    except BaseException:
        return FAILED, traceback.format_exc()
    finally:
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
