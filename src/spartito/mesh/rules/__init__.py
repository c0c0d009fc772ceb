"""The table: what each of torch's functions does with sharded operands."""

from spartito.mesh.rules import (
    attention as attention,
)
from spartito.mesh.rules import (
    elementwise as elementwise,
)
from spartito.mesh.rules import (
    lookups as lookups,
)
from spartito.mesh.rules import (
    norms as norms,
)
from spartito.mesh.rules import (
    products as products,
)
from spartito.mesh.rules import (
    views as views,
)
