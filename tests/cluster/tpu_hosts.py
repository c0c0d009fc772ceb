"""What a host of a Cloud TPU slice has: variables, a bus with chips, a metadata server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

CHIP = "0x0063"
"""The number of a v5e on the bus."""


def gke(worker: int, hosts: int = 4) -> dict[str, str]:
    """The variables of a pod on a v5e slice, as GKE puts them into it."""
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "TPU_HOST_BOUNDS": "2,2,1",
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_TOPOLOGY": "4x4",
        "TPU_WORKER_HOSTNAMES": ",".join(f"train-{host}.tpu" for host in range(hosts)),
        "TPU_WORKER_ID": str(worker),
    }


def multislice(number: int, worker: int, slices: int = 2) -> dict[str, str]:
    """The same in one of several slices."""
    names = ",".join(f"train-slice-{number}-{host}.train" for host in range(4))
    return gke(worker) | {
        "MEGASCALE_COORDINATOR_ADDRESS": "train-slice-0-0.train",
        "MEGASCALE_NUM_SLICES": str(slices),
        "MEGASCALE_SLICE_ID": str(number),
        "TPU_WORKER_HOSTNAMES": names,
    }


TPU_ENV = """\
ACCELERATOR_TYPE: 'v5litepod-16'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
HOST_BOUNDS: '2,2,1'
TOPOLOGY: '4x4'
TYPE: 'V5LITE_POD'
WORKER_ID: '2'
ZONE: 'us-west4-a'
"""

ATTRIBUTES = {
    "accelerator-type": "v5litepod-16",
    "agent-worker-number": "2",
    "tpu-env": TPU_ENV,
    "worker-network-endpoints": ",".join(f"unknown:unknown:10.164.0.{n}" for n in (5, 3, 9, 4)),
}
"""What the metadata server of the third host of such a slice knows."""


def bus(folder: Path, chips: int = 4, device: str = CHIP, opened: int | None = None) -> list[Path]:
    """A bus with so many chips, beside a network card of Google's, and what may be opened."""
    pci, vfio = folder / "pci", folder / "vfio"
    vfio.mkdir(parents=True)
    _put(pci / "0000:00:03.0", folder / "iommu_groups" / "99", "0x0042")
    (vfio / "99").touch()
    for index in range(chips):
        _put(pci / f"0000:00:{index + 4:02x}.0", folder / "iommu_groups" / str(index), device)
        if opened is None or index < opened:
            (vfio / str(index)).touch()
    return [pci, vfio]


def _put(where: Path, group: Path, device: str) -> None:
    where.mkdir(parents=True)
    group.mkdir(parents=True)
    (where / "vendor").write_text("0x1ae0\n")
    (where / "device").write_text(f"{device}\n")
    (where / "iommu_group").symlink_to(group)


@contextmanager
def metadata(
    attributes: Mapping[str, str] = ATTRIBUTES, status: int = 404
) -> Iterator[dict[str, str]]:
    """A metadata server on loopback; the variable that names it. Others get ``status``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            folder, _, name = self.path.rpartition("/")
            known = folder == "/computeMetadata/v1/instance/attributes" and name in attributes
            google = self.headers.get("Metadata-Flavor") == "Google"
            body = attributes[name].encode() if known and google else b""
            self.send_response((200 if known else status) if google else 403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_address[1]}"}
        finally:
            server.shutdown()
            thread.join()
