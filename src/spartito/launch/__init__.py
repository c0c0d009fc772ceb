"""Start jobs: on this machine, on others over ssh, in containers, under Slurm, from Python.

The package can be called: it runs a function as the tasks of a job, from a script or a notebook.

    history = sp.launch(train, strategy="mirrored", workers=2)

A `JobSpec` says what is to run, a launcher starts it:

    Local().start(JobSpec(program=Program("train.py"), workers=2))
"""

import sys as _sys
from collections.abc import Callable as _Callable
from collections.abc import Mapping as _Mapping
from collections.abc import Sequence as _Sequence
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING
from typing import Any as _Any
from typing import TypeVar as _TypeVar

from spartito._lazy import attach as _attach

if TYPE_CHECKING:
    from spartito.launch.containers.launcher import Compose
    from spartito.launch.hosts.job import Hosts
    from spartito.launch.job import JobSpec, Launcher, Program, option
    from spartito.launch.processes.local import Local
    from spartito.launch.slurm.launcher import Slurm

_T = _TypeVar("_T")

__getattr__ = _attach(
    __name__,
    {
        "Compose": "spartito.launch.containers.launcher",
        "Hosts": "spartito.launch.hosts.job",
        "JobSpec": "spartito.launch.job",
        "Launcher": "spartito.launch.job",
        "Local": "spartito.launch.processes.local",
        "Program": "spartito.launch.job",
        "Slurm": "spartito.launch.slurm.launcher",
        "option": "spartito.launch.job",
    },
)

__all__ = ["Compose", "Hosts", "JobSpec", "Launcher", "Local", "Program", "Slurm", "option"]


class Launch(_ModuleType):
    """What ``sp.launch`` is: this package, which runs functions when it is called."""

    def __call__(
        self,
        function: _Callable[..., _T],
        *,
        strategy: str | None = None,
        workers: int | None = None,
        args: _Sequence[_Any] = (),
        kwargs: _Mapping[str, _Any] | None = None,
        strategy_options: _Mapping[str, _Any] | None = None,
        **options: _Any,
    ) -> _T:
        """Run a function as the tasks of a job on this machine, and wait for its end.

        Each task is a process of its own that calls ``function``, which asks `spartito.strategy`
        who it is, as a script under ``spartito run`` does. What the tasks print appears here.
        Functions, classes and values of ``__main__``, so of a notebook's cells, are sent as they
        are now; a task changes its own copies. Must be called from the main thread.

        Args:
            function: what every task calls, parameter servers and an evaluator too.
            strategy: its text, as ``"mirrored"`` or ``"local_sgd(every=20)"``; by default the
                number of tasks decides.
            workers: the tasks that compute; one per GPU, or one, by default.
            args: positional arguments of the function.
            kwargs: its keyword arguments.
            strategy_options: further options of it, which win.
            options: any other option of ``spartito run``, as ``ps=1`` or ``log_dir="logs"``.

        Returns:
            What the function returns in the chief: worker 0, or the task that ``chief=True`` adds.

        Raises:
            UserError: the job cannot be so, or a part of the function, which is named, cannot be
                sent to another process; nothing was started.
            TaskLostError: a task was killed.
            Exception: what the first task that failed has raised, with its traceback as the cause.
            KeyboardInterrupt: Ctrl-C, or a notebook's kernel was interrupted; all tasks have ended.
        """
        from spartito.launch.functions.run import run

        given = {"strategy": strategy, "workers": workers, **options}
        result: _T = run(function, args, kwargs or {}, strategy_options, given)
        return result

    def ray(
        self,
        function: _Callable[..., _T],
        *,
        strategy: str | None = None,
        workers: int | None = None,
        address: str | None = None,
        args: _Sequence[_Any] = (),
        kwargs: _Mapping[str, _Any] | None = None,
        strategy_options: _Mapping[str, _Any] | None = None,
        **options: _Any,
    ) -> _T:
        """Run a function as the tasks of a job on a Ray cluster, and wait for its end.

        Each task is an actor of its own in one placement group. All else is as under
        ``sp.launch``: what is sent, what is printed here, what comes back.

        Args:
            function: what every task calls.
            strategy: its text, as ``"mirrored"`` or ``"local_sgd(every=20)"``; by default the
                number of tasks decides.
            workers: the tasks that compute, in the whole cluster; 1 by default.
            address: the cluster, as ``HOST:6379``; by default the one that this program is
                connected to, else the one of this machine.
            args: positional arguments of the function.
            kwargs: its keyword arguments.
            strategy_options: further options of it, which win.
            options: any other option of ``spartito run --ray``, as ``gpus=1`` or ``ps=1``.

        Returns:
            What the function returns in the chief.

        Raises:
            UserError: there is no such cluster, it has other versions or too few resources, or a
                part of the function cannot be sent; nothing was started.
            TaskLostError: a task or its node was lost.
            Exception: what the first task that failed has raised, with its traceback as the cause.
            KeyboardInterrupt: Ctrl-C; all tasks have ended.
        """
        from spartito.launch.functions.run import run

        given = {"strategy": strategy, "workers": workers, "ray": address, **options}
        result: _T = run(function, args, kwargs or {}, strategy_options, given, on_ray=True)
        return result


_sys.modules[__name__].__class__ = Launch
