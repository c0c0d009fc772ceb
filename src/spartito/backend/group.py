"""The process group that torch's own and others' programs call.

All calls complete before they return, in the thread that makes them: a thread of its own would need
a core of its own. torch's C++ parts (DDP, the functional collectives) call these methods by the
names that they have here, so that the old names stand beside those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spartito.backend.calls import encode
from spartito.backend.connect import beside, operations_of, refuse_others, renew
from spartito.backend.dynamo import skip
from spartito.backend.identity import Identity
from spartito.backend.operations import Operations
from spartito.backend.sparse import sum_sparse
from spartito.backend.splits import check_splits, parts_of
from spartito.backend.work import Done, Receive
from spartito.collectives.arithmetic import Arithmetic, arithmetic
from spartito.collectives.memory.rank_memory import Bytes
from spartito.collectives.rows import joined, row_to_read, written
from spartito.errors import RefusedCallError

NAMES = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.AVG: "AVG",
    dist.ReduceOp.PRODUCT: "PRODUCT",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.BAND: "BAND",
    dist.ReduceOp.BOR: "BOR",
    dist.ReduceOp.BXOR: "BXOR",
    dist.ReduceOp.PREMUL_SUM: "PREMUL_SUM",
}
Tensors = Tensor | Sequence[Tensor]


class SpartitoGroup(Identity):
    """A group of ranks on CPUs.

    Args:
        rank: Our rank in the group.
        size: The number of its ranks.
        operations: How they are connected.
        store: The store of the group.
        timeout: How long a wait for another rank may take.
    """

    def __init__(
        self, rank: int, size: int, operations: Operations, store: dist.Store, timeout: timedelta
    ) -> None:
        super().__init__(rank, size, store, timeout)
        self._operations = operations

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a wait for another rank may take, from now on."""
        super().set_timeout(timeout)
        self._operations.limit_to(timeout.total_seconds())

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Done:
        """Reduce a tensor over the group, in place."""
        tensors = _listed(tensors)
        reduction, way, factor = _reduction(opts, tensors)
        numel = sum(map(Tensor.numel, tensors))
        if any(tensor.is_sparse for tensor in tensors):
            for tensor in tensors:
                self._begin("all_reduce of sparse tensors", tensor.numel(), [tensor], 0, reduction)
                sum_sparse(self._operations, tensor, self._size, reduction)
            return Done(tensors)
        self._begin("all_reduce", numel, tensors, reduction=reduction)
        with joined(tensors) as row:
            _premultiply(row, way, factor)
            self._operations.all_reduce(row, way)
            self._average(row, way, reduction)
        return Done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None, *more: Any) -> Done:
        """Reduce a tensor over the group; the root gets the result."""
        tensors = _listed(tensors)
        reduction, way, factor = _reduction(opts, tensors)
        root = self._root(opts)
        self._begin("reduce", tensors[0].numel(), tensors, root, reduction)
        with joined(tensors) as row:
            if factor is not None and root != self._rank:
                row = row.copy()
            _premultiply(row, way, factor)
            self._operations.reduce(row, root, way)
            if root == self._rank:
                self._average(row, way, reduction)
        return Done(tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Done:
        """Give all ranks the tensor of the root."""
        tensors = _listed(tensors)
        root = self._root(opts)
        self._begin("broadcast", tensors[0].numel(), tensors, root)
        with written(tensors) as rows:
            for row in rows:
                self._operations.broadcast(row, root)
        return Done(tensors)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Done:
        """Gather the tensor of each rank on all ranks."""
        inputs = _listed(inputs)
        outputs = [outputs] if isinstance(outputs[0], Tensor) else outputs
        for targets, tensor in zip(outputs, inputs, strict=True):
            self._same("all_gather", targets, tensor)
            self._begin("all_gather", tensor.numel(), [tensor])
            with written(targets) as rows:
                self._operations.all_gather(row_to_read(tensor), rows)
        return Done(outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Done:
        """As `allgather` of several tensors; ``outputs`` has a list for each rank."""
        targets = [list(of) for of in zip(*outputs, strict=True)]
        self.allgather(targets, _listed(inputs))
        return Done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """Gather the tensor of each rank in one tensor."""
        self._fits("all_gather", output, tensor)
        self._begin("all_gather", tensor.numel(), [tensor])
        with written([output]) as (row,):
            self._operations.all_gather(row_to_read(tensor), self._cut(row))
        return Done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """As `all_gather_single` of several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Done:
        """Gather the tensor of each rank on the root."""
        (tensor,) = _listed(inputs)
        root = self._root(opts)
        targets = _first(outputs) if self._rank == root else []
        if self._rank == root:
            self._same("gather", targets, tensor)
        self._begin("gather", tensor.numel(), [tensor], root)
        row = row_to_read(tensor)
        out = [row if rank == root else row[:0] for rank in range(self._size)]
        with written(targets) as rows:
            into = rows or [row[:0]] * self._size
            self._operations.exchange(out, into, len(row))
        return Done(targets)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Done:
        """Give each rank its tensor of the list that the root has."""
        (output,) = _listed(outputs)
        root = self._root(opts)
        sources = _first(inputs) if self._rank == root else []
        if self._rank == root:
            self._same("scatter", sources, output)
        self._begin("scatter", output.numel(), [output], root)
        with written([output]) as (row,):
            nothing = row[:0]
            out = [row_to_read(tensor) for tensor in sources] or [nothing] * self._size
            into = [row if rank == root else nothing for rank in range(self._size)]
            self._operations.exchange(out, into, len(row))
        return Done([output])

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Done:
        """Reduce a tensor for each rank, of which that rank gets the result."""
        (output,) = _listed(outputs)
        tensors = _first(inputs)
        self._same("reduce_scatter", tensors, output)
        reduction, way, factor = _reduction(opts, tensors)
        self._begin("reduce_scatter", output.numel(), [output], reduction=reduction)
        self._reduced([row_to_read(tensor) for tensor in tensors], output, reduction, way, factor)
        return Done([output])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """As `reduce_scatter`, of the equal parts of one tensor."""
        self._fits("reduce_scatter", tensor, output)
        reduction, way, factor = _reduction(opts, [tensor])
        self._begin("reduce_scatter", output.numel(), [output], reduction=reduction)
        self._reduced(self._cut(row_to_read(tensor)), output, reduction, way, factor)
        return Done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """As `reduce_scatter_single` of several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Send a tensor to each rank, and get one from each."""
        self._begin("all_to_all", 0, inputs)
        out = [row_to_read(tensor) for tensor in inputs]
        with written(outputs) as into:
            self._exchange(out, into)
        return Done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Done:
        """As `alltoall`, of the parts of one tensor; without splits they are equal."""
        equal = not output_splits and not input_splits
        self._begin("all_to_all", tensor.numel() if equal else 0, [tensor])
        if output.dtype != tensor.dtype:
            raise RefusedCallError(
                f"all_to_all of {tensor.dtype} into {output.dtype}", "Take one type for both."
            )
        with written([output]) as (into,):
            out = parts_of(row_to_read(tensor), tensor, input_splits, self._size)
            parts = parts_of(into, output, output_splits, self._size)
            if equal and len(into) == output.itemsize * tensor.numel():
                self._operations.exchange(out, parts, len(out[0]))
            else:
                self._exchange(out, parts)
        return Done([output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Done:
        """Wait until all ranks are here."""
        self._operations.begin(encode("barrier", 0))
        self._operations.barrier()
        return Done()

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """As `barrier`: an error names the ranks that did not come."""
        self.barrier()

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Done:
        """Send a tensor to a rank; it need not receive it yet."""
        (tensor,) = _listed(tensors)
        return self._operations.send(tensor, target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Receive:
        """Receive a tensor from a rank, once the work is waited for."""
        (tensor,) = _listed(tensors)
        return self._operations.receive(tensor, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Receive:
        """As `recv` from any rank; the work knows which one it was."""
        (tensor,) = _listed(tensors)
        return self._operations.receive(tensor, None, tag)

    def shutdown(self) -> None:
        """Leave the group."""
        self._operations.close()

    abort = shutdown

    # Parts of them

    def _begin(
        self,
        operation: str,
        numel: int,
        tensors: Sequence[Tensor],
        root: int = 0,
        reduction: str = "",
    ) -> None:
        dtype = tensors[0].dtype if tensors else None
        self._operations.begin(encode(operation, numel, dtype, root, reduction))

    def _root(self, opts: Any) -> int:
        """The root of an operation: in its options, or given as it is."""
        root = int(getattr(opts, "rootRank", opts or 0))
        if not 0 <= root < self._size:
            raise RefusedCallError(
                f"root {root} in a group of {self._size} ranks",
                f"Name one of the ranks 0 to {self._size - 1} of the group.",
            )
        return root

    def _average(self, row: Bytes, way: Arithmetic, reduction: str) -> None:
        if reduction == "AVG":
            way.divide(row, self._size)

    def _reduced(
        self,
        rows: Sequence[Bytes],
        output: Tensor,
        reduction: str,
        way: Arithmetic,
        factor: float | None,
    ) -> None:
        if factor is not None:
            rows = [row.copy() for row in rows]
            for row in rows:
                way.multiply(row, factor)
        with written([output]) as (into,):
            self._operations.reduce_scatter(rows, into, way)
            self._average(into, way, reduction)

    def _exchange(self, out: Sequence[Bytes], into: Sequence[Bytes]) -> None:
        """Exchange rows of any size: all ranks compare them first."""
        own = np.array([[len(row) for row in out], [len(row) for row in into]], dtype=np.int64)
        sizes = np.empty((self._size, *own.shape), dtype=np.int64)
        rows = [part.reshape(-1).view(np.uint8) for part in sizes]
        self._operations.all_gather(own.reshape(-1).view(np.uint8), rows)
        largest = check_splits(sizes)
        self._operations.exchange(out, into, largest)

    def _cut(self, row: Bytes) -> list[Bytes]:
        """The equal parts of a row, one for each rank."""
        size = len(row) // self._size
        return [row[rank * size : (rank + 1) * size] for rank in range(self._size)]

    def _same(self, operation: str, tensors: Sequence[Tensor], like: Tensor) -> None:
        """Refuse a list that is not of one tensor as ``like`` for each rank."""
        found = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        if found != [(like.dtype, like.numel())] * self._size:
            listed = ", ".join(f"{numel} {dtype}" for dtype, numel in found)
            raise RefusedCallError(
                f"{operation} of {like.numel()} {like.dtype} with a list of [{listed}]",
                f"Give one tensor of that size and type for each of the {self._size} ranks.",
            )

    def _fits(self, operation: str, whole: Tensor, part: Tensor) -> None:
        """Refuse tensors of which one does not have a part for each rank."""
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise RefusedCallError(
                f"{operation} with {whole.numel()} {whole.dtype} for all and {part.numel()} "
                f"{part.dtype} for each of {self._size} ranks",
                "The one tensor has the elements of all ranks, of the same type.",
            )


def connect(options: Any, devices: Mapping[str, str]) -> SpartitoGroup:
    """The group that ``options`` of torch describe; all of its ranks call this together.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        devices: The name of the backend of each type of device that the group was asked for.

    Returns:
        The group.

    Raises:
        RefusedCallError: Other backends beside ours, or a rank that others cannot reach.
        LostRankError: Names the ranks that did not come within the time limit.
        UserError: On all ranks, where their versions of Spartito or torch do not fit together.
    """
    refuse_others(devices)
    renew(options)
    operations = operations_of(options)
    group = SpartitoGroup(
        options.group_rank, options.group_size, operations, options.store, options.timeout
    )
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, beside(options, operations.address)
    )
    return group


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _first(lists: Any) -> list[Tensor]:
    """The one list of a list of lists, or the list itself."""
    return list(lists if isinstance(lists[0], Tensor) else lists[0])


def _reduction(opts: Any, tensors: Sequence[Tensor]) -> tuple[str, Arithmetic, float | None]:
    """The name of a reduction, how it is done, and the factor that it may have."""
    operation = getattr(opts, "reduceOp", opts)
    kind = dist.ReduceOp.SUM if operation is None else getattr(operation, "op", operation)
    name = NAMES[kind]
    way = arithmetic(name, tensors[0].dtype)
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise RefusedCallError(
            f"one reduction of {sorted({str(tensor.dtype) for tensor in tensors})}",
            "Make a call for each type.",
        )
    return name, way, float(operation.factor) if name == "PREMUL_SUM" else None


def _premultiply(row: Bytes, way: Arithmetic, factor: float | None) -> None:
    if factor is not None:
        way.multiply(row, factor)


skip(SpartitoGroup, Identity, Done, Receive)
