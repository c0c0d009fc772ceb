"""What a job would take under each strategy, predicted before anything is started.

One process is profiled (`training.trials.step_profile`), two exchange on this machine (`probe`),
and closed forms say what that comes to on a cluster: one file for each kind of strategy in `costs`.
"""
