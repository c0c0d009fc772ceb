"""What the steps of each strategy take, as pure functions of a profile and a cluster.

`parts` has the values that go in and come out, `compute` and `exchange` what strategies share, and
each other file one kind of strategy. All of them are closed forms, but for pipelines, of which the
real schedules are run.
"""
