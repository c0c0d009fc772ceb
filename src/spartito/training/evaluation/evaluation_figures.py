"""What `evaluate` returns: a dict that is not unpacked into its keys by mistake."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from typing import Any

from spartito.errors import UserError


class Figures(dict[str, Any]):
    """Figures by name, as any dict has them.

    ``loss, accuracy = trainer.evaluate(data)``, as one writes it for Keras, would give the names
    in place of the figures without a word: that is refused, with what to write instead.
    """

    def __iter__(self) -> Iterator[str]:
        frame = sys._getframe(1)
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("UNPACK_SEQUENCE", "UNPACK_EX"):
            wanted = ", ".join(f"figures[{name!r}]" for name in self.keys())
            raise UserError(
                f"evaluate() returns a dict with {', '.join(self.keys())}, which was unpacked "
                "like a list",
                f"Write figures = trainer.evaluate(...), then {wanted}.",
            )
        return super().__iter__()
