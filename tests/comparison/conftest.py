from __future__ import annotations

from tests.launch.conftest import container_job as container_job
from tests.launch.conftest import image as image
