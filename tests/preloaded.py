"""What the processes of tests have imported when they start; see `tests.processes`."""

from __future__ import annotations

import gc
from importlib import import_module

# DDP asks for torch's compiler; a run's report is drawn by matplotlib. What takes seconds to import
# is not imported by replicas while others wait for them.
for name in (
    *("torch._dynamo.config", "spartito.training.trainer", "tests.strategies.ps_processes"),
    *(
        "torchmetrics",
        "jinja2",
        "matplotlib.backends.backend_svg",
        "matplotlib.figure",
        "matplotlib.ticker",
    ),
):
    import_module(name)
gc.collect()
gc.freeze()  # nobody looks through all of torch again
