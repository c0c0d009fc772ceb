"""Where each command is: only the one that is typed is imported."""

COMMANDS = {
    "run": "spartito.cli.run:run",
    "train": "spartito.cli.run:train",
    "strategies": "spartito.cli.strategies:strategies",
    "plan": "spartito.cli.plan:plan",
    "compare": "spartito.cli.compare:compare",
    "top": "spartito.cli.top:top",
    "report": "spartito.cli.report:report",
    "predict": "spartito.cli.data:predict",
    "data": "spartito.cli.data:data_app",
    "checkpoint": "spartito.cli.checkpoint:checkpoint_app",
    "cluster": "spartito.cli.cluster:cluster_app",
    "doctor": "spartito.cli.doctor:doctor",
    "chaos": "spartito.cli.chaos:chaos",
}
