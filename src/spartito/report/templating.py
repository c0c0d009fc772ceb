"""The templates of the pages: what is written into them is escaped, what is missing is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def page_template(name: str, **filters: Callable[..., str]) -> Template:
    """The template ``name`` of this package, with ``filters`` by their names."""
    # Takes 90 ms to import, and only reports need it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("spartito", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(name)
