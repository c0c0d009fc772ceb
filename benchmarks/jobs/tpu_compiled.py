"""Programs that torch_tpu has traced, compiled for one chip by Google's compiler; no TPU is needed.

    python -m benchmarks.jobs.tpu_compiled TRACE LIVING TOPOLOGY OUT

In the Python of ``scripts/libtpu``. ``TRACE`` is the folder that ``TORCH_TRACE`` named, ``LIVING``
what `benchmarks.jobs.tpu_steps` wrote.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_RECORD = re.compile(r"V\d+ \S+ \d+ \S+ (\{.*\})")
_OTHERS = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "bool": "i1"}
_TYPES = _OTHERS | {
    f"{theirs}{bits}": f"{name}{bits}"
    for theirs, name in (("int", "i"), ("uint", "ui"))
    for bits in (8, 16, 32, 64)
}


class Compiler:
    """The first chip of a topology that is nowhere near.

    Args:
        topology: As ``v5e:2x2``.
    """

    def __init__(self, topology: str) -> None:
        self._mlir: Any = import_module("jax.interpreters.mlir")
        self._ir: Any = import_module("jax.extend.mlir.ir")
        xla: Any = import_module("jaxlib._jax")
        described = import_module("jax.experimental.topologies").get_topology_desc(topology, "tpu")
        chip = described.devices[0]
        self._client = chip.client
        self._chips = xla.DeviceList((chip,))
        self._options = xla.CompileOptions()
        self._options.device_assignment = xla.DeviceAssignment.create(
            np.array([[chip.id]], np.int32)
        )

    def __call__(self, text: str) -> dict[str, Any]:
        """What a program of StableHLO needs of that chip: bytes, and seconds of compilation."""
        began = time.perf_counter()
        with self._mlir.make_ir_context():
            module = self._ir.Module.parse(text)
            made = self._client.compile(module, self._chips, self._options)
        told = made.get_compiled_memory_stats()
        return {
            "arguments": told.argument_size_in_bytes,
            "output": told.output_size_in_bytes,
            "in_place": told.alias_size_in_bytes,
            "temporary": told.temp_size_in_bytes,
            "code": told.generated_code_size_in_bytes,
            "seconds": time.perf_counter() - began,
        }


def traced(folder: Path) -> Iterator[tuple[str, str]]:
    """The programs of a trace, each once: the last operation in it, and its StableHLO."""
    for file in sorted(folder.iterdir()):
        told: dict[str, Any] = {}
        lines: list[str] = []
        for line in [*file.read_text().splitlines(), "V0 . 0 . {}"]:
            record = _RECORD.fullmatch(line)
            if not record:
                lines.append(line.removeprefix("\t"))
                continue
            found = told.get("artifact", {})
            if found.get("name") == "torchtpu_eager_stablehlo" and not found["cache_hit"]:
                yield found["op_name"].partition("/")[2], "\n".join(lines)
            told, lines = json.loads(record[1]), []


def holding(tensors: list[tuple[str, list[int]]]) -> str:
    """A program of which these tensors are the arguments."""
    types = ("x".join([*map(str, shape), _TYPES[dtype]]) for dtype, shape in tensors)
    arguments = ", ".join(f"%a{i}: tensor<{kind}>" for i, kind in enumerate(types))
    body = "%0 = stablehlo.constant dense<0.0> : tensor<f32>\n return %0 : tensor<f32>"
    return f"func.func @main({arguments}) -> tensor<f32> {{\n {body}\n}}"


def main() -> None:
    """Compile all, and write what each needs."""
    trace, living, topology, out = sys.argv[1:]
    compiled = Compiler(topology)
    programs = [{"name": name, **compiled(text)} for name, text in traced(Path(trace))]
    held = compiled(holding(json.loads(Path(living).read_text())["tensors"]))["arguments"]
    Path(out).write_text(json.dumps({"programs": programs, "tensors": held}))


if __name__ == "__main__":
    main()
