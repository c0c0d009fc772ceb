"""Can the tasks of a cluster reach each other, how fast, and with the same versions?"""

from __future__ import annotations
