"""Every limit of a connection: how long it may take, and how much of it is believed."""

from __future__ import annotations

GREETING_SECONDS = 5.0
"""In which a caller has to authenticate, or it is disconnected."""

MOST_UNKNOWN = 64
"""Callers that have not authenticated yet, at the same time; fewer with few descriptors."""

BACKLOG = 1024
"""Callers that the system keeps until they are accepted."""

RETRY_SECONDS = 0.02
"""Between two looks for a task that does not listen yet."""

ATTEMPT_SECONDS = 3.0
"""For one connection: a name may soon mean another machine."""

RESOLVE_SECONDS = 0.25
"""Between two questions to a name service that does not know a name yet."""

SILENCE = 2
"""Seconds without a sign of the other machine's kernel after which a connection ends."""

LONG_SILENCE = 10
"""The same between a task and a parameter server.

Longer than a line full of gradients keeps a packet waiting, and much less than a task may take to
reply. A worker's only connection to the coordinator has no such limit: nobody would make it again.
"""

RECORD = 128 << 10
"""Bytes of a record at most: they fit in the cache of one core."""

MOST_HEADER = 64 << 10
"""Bytes of a message at most, without its payload, of an unknown peer."""

LONG_HEADER = 4 << 20
"""The same of a task of the job: thousands of parameter groups, values of the store."""

MOST_BUFFERS = 512
"""Buffers of one call of the system, which takes 1024."""
