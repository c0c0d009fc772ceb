"""Can the tasks of a cluster reach each other, how fast, and with the same versions?

``facts`` (what each task knows of its machine), then ``probe`` (what the tasks find of each
other, over a ``transport``), then ``rules`` (pure: what is wrong), then ``report``.
``examination`` is that for one task; ``launch`` starts a doctor where each task of a job would be.
"""
