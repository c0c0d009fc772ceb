"""Start a job on several machines from one shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from spartito.cluster.endpoints import port_range
from spartito.cluster.resolver import check_alone
from spartito.errors import UserError
from spartito.launch.hosts.check import ask_hosts, find_hosts, notes
from spartito.launch.hosts.facts import Facts, Question
from spartito.launch.hosts.names import Host
from spartito.launch.hosts.plan import MEMBERSHIP, PORT, Plan, check_passed
from spartito.launch.hosts.ssh import Ssh, parse_ssh
from spartito.launch.job import Heading, JobSpec
from spartito.launch.processes.launcher import Processes
from spartito.launch.processes.local import check_number, snapshots
from spartito.launch.store_keeper import kept_store
from spartito.names import ENV_NOTICE, ENV_PORTS, ENV_SNAPSHOT_DIR, ENV_STORE
from spartito.wire.addresses import is_loopback
from spartito.wire.interfaces import own_address
from spartito.wire.secret import with_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts(Processes):
    """Start a job on several machines over ssh, and watch over its processes from here.

    ``workers`` of the job count those of each machine: one per GPU, or one, by default.

    Args:
        hosts: the machines, as ``a,b,node[01-04]``.
        port: where the first task of a machine listens if no range is allowed.
        ssh: how ssh is called.
        remote_dir: the folder on the other machines; by default the same as here.
        remote_python: the Python of the other machines; by default the same as here.
        env: names of variables that the tasks there get as well.
        log_dir: as `Local` has it.
        share_devices: as `Local` has it.
        mixed: as `Local` has it.
        log_format: as `Local` has it.
        notice: as `Local` has it.
        yes: as `Local` has it.
        recover: as `Local` has it, like the next three.
        min_workers: how many go on at least.
        wait: seconds for a replacement.
        restarts: of each worker.
        result: as `Local` has it.
        environment: as `Local` has it, like the next two.
        private: folders that are removed.
        on_end: as `Local` has it.
    """

    hosts: str = Heading.MACHINES.option(
        "Several machines, as a,b,node[01-04]: all is started from here, by ssh.", metavar="LIST"
    )
    port: int | None = Heading.MACHINES.option(
        f"With --hosts: where the first task of a machine listens, {PORT} by default; the next "
        "ones follow.",
        least=1,
    )
    ssh: str | None = Heading.MACHINES.option(
        "With --hosts: how ssh is called, as 'ssh -p 2222'.", metavar="COMMAND"
    )
    remote_dir: str | None = Heading.MACHINES.option(
        "With --hosts: the folder on the other machines; by default the same as here.",
        metavar="DIR",
    )
    remote_python: str | None = Heading.MACHINES.option(
        "With --hosts: the Python of the other machines; by default the same as here.",
        metavar="PATH",
    )
    env: tuple[str, ...] = Heading.MACHINES.option(
        "With --hosts or --ray: a variable that the other machines get too, by its name.",
        (),
        metavar="NAME",
    )

    def start(self, job: JobSpec) -> int:
        """Start the job; every task is a process of its own here, a remote one behind ssh.

        All machines are asked before anything starts.

        Args:
            job: what is to run.

        Returns:
            The exit code of the job.

        Raises:
            UserError: a machine or the job cannot be; nothing was started.
        """
        plan = self.plan(job)
        roles, hosts = plan.roles, plan.hosts
        variables = with_secret(self.variables(job))
        self.check_folder(job, variables)
        if self.notice is not None:
            variables[ENV_NOTICE] = f"{self.notice:g}"
        with ExitStack() as held:
            folder, _ = held.enter_context(snapshots(roles, variables))
            if self.keeps_store(roles):
                here = next((host.address for host in hosts if host.here), None)
                here = here or own_address(hosts[0].address, plan.port)
                store = kept_store(variables, here, plan.port + plan.most)
                variables = held.enter_context(store)
                self.say(f"the tasks meet at {variables[ENV_STORE]}, which this launcher keeps")
            own = {} if folder is None else {ENV_SNAPSHOT_DIR: folder}  # other machines have theirs
            processes = [
                plan.process(task, variables | (own if hosts[plan.machine_of(task)].here else {}))
                for task in roles.tasks
            ]
            strategy = job.choose(roles, env=variables).name
            processes = self.recovering(processes, strategy, roles)
            code = self.follow(processes, job, variables, folder)
        if code == 0 and not hosts[0].here:
            self.say(f"what {roles.tasks[0]} wrote is on {hosts[0].name}, in {plan.ssh.folder}")
        return code

    def plan(self, job: JobSpec) -> Plan:
        """Ask the machines, and say which task of such a job would be where.

        Args:
            job: what is to run.

        Returns:
            Where each task would be, and its command.

        Raises:
            UserError: a machine cannot take part, or the job cannot be.
        """
        env = self.variables(job)
        outside = {name: value for name, value in env.items() if name not in MEMBERSHIP}
        check_alone(outside, "--hosts")
        check_passed(self.env, env)
        ssh = Ssh(
            parse_ssh(self.ssh or "ssh"),
            self.remote_dir or os.getcwd(),
            self.remote_python or sys.executable,
        )
        hosts, allowed = find_hosts(self.hosts, ssh), port_range(env)
        if self.port and allowed:
            raise UserError(
                f"--port {self.port} beside the range of ports {env[ENV_PORTS]}",
                "Leave --port out: the first task of a machine listens at the first of the range.",
            )
        port = self.port or (allowed[0] if allowed else PORT)
        count = len(hosts)
        listening = {0, *(index % count for index in range(job.ps))} if job.ps else range(count)
        names = tuple(sorted({hosts[index].address for index in listening})) if count > 1 else ()
        program = job.program
        question = Question(program.module or program.name, program.module is not None, names)
        found = ask_hosts(hosts, ssh, question)
        each = _workers(hosts, found, job.workers_on(count))
        roles = job.roles(each * count)
        for host, its in zip(hosts, found, strict=True):
            check_number(each, its.cores, self.yes, host.name)
        job.choose(roles, here=each, env=env)
        cores = tuple(one.cores for one in found)
        plan = Plan(hosts, cores, roles, job.argv(), ssh, port, self.env)
        plan.check_ports(allowed)
        others_reach = [host.address for host in hosts if not is_loopback(host.address)]
        self.warn(job, others_reach, with_secret(env))
        for line in [*(f"note: {note}" for note in notes(hosts, found, each)), *plan.lines()]:
            self.say(line)
        return plan


def _workers(hosts: Sequence[Host], found: Sequence[Facts], workers: int | None) -> int:
    """Workers of each machine: as asked, else one per GPU, or one."""
    if workers is not None:
        return workers
    counts = {max(1, its.gpus) for its in found}
    if len(counts) > 1:
        listed = ", ".join(f"{h.name} {f.gpus}" for h, f in zip(hosts, found, strict=True))
        raise UserError(
            f"the machines have different numbers of GPUs: {listed}",
            "Say how many processes each gets: --workers N.",
        )
    return counts.pop()
