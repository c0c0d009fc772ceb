"""The table: what each of torch's functions does with sharded operands."""

from spartito.mesh.rules import attention as attention
from spartito.mesh.rules import conversions as conversions
from spartito.mesh.rules import convolutions as convolutions
from spartito.mesh.rules import elementwise as elementwise
from spartito.mesh.rules import joins as joins
from spartito.mesh.rules import lookups as lookups
from spartito.mesh.rules import losses as losses
from spartito.mesh.rules import multihead as multihead
from spartito.mesh.rules import norms as norms
from spartito.mesh.rules import products as products
from spartito.mesh.rules import randoms as randoms
from spartito.mesh.rules import reductions as reductions
from spartito.mesh.rules import views as views
