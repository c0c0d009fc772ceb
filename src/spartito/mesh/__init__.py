"""Tensors cut along the axes of a mesh of tasks, under models that know nothing of it."""

from spartito.mesh import rules as rules
from spartito.mesh.axes import DATA as DATA
from spartito.mesh.axes import Mesh as Mesh
from spartito.mesh.collectives import Axis as Axis
from spartito.mesh.sharded_tensor import Sharded as Sharded
from spartito.mesh.sharded_tensor import all_whole as all_whole
from spartito.mesh.sharded_tensor import module as module
from spartito.mesh.sharded_tensor import shard as shard
from spartito.mesh.sharded_tensor import whole as whole
from spartito.mesh.sharded_tensor import wrap as wrap
from spartito.mesh.spec import Spec as Spec
from spartito.mesh.spec import replicated as replicated
from spartito.mesh.spec import spec as spec

__all__ = [
    "DATA", "Axis", "Mesh", "Sharded", "Spec", "all_whole", "module", "replicated", "shard",
    "spec", "whole", "wrap",
]  # fmt: skip
