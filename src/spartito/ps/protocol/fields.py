"""What the fields of messages may hold: a message with anything else is refused as it is read."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

MOST = 1 << 30
"""Work items of a pass, passes of a stream, and whatever else is numbered from 0."""

Number = Annotated[int, Meta(ge=0, lt=MOST)]
"""An index, or how many of something a task has."""

Index = Annotated[int, Meta(ge=-1, lt=MOST)]
"""An index, or -1 for none."""

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""What grows as long as a job runs."""

Amount = Annotated[float, Meta(ge=0, le=1e15)]
"""A weight, or seconds."""

Norm = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""The length of a vector of finite numbers."""

Name = Annotated[str, Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
"""A task, a tensor, a hash: on one line."""

Text = Annotated[str, Meta(max_length=1 << 14)]
"""What is for people; it may have several lines."""
