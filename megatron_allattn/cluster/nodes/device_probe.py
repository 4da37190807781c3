"""What torch can do with the devices of this node, as one line of JSON: `python -m …cluster.nodes.device_probe`.

A process of its own, since a driver that hangs would hang whoever loads torch (devices.py sets the limit).

    {"torch": "2.13.0", "cuda": "12.9", "nccl": "2.27.5",
     "devices": [{"name": "NVIDIA H100 80GB HBM3", "total": bytes, "free": bytes, "fails": "" or why}]}
"""

import json
import os
from typing import Any

import torch

SIDE = 512  # of a product whose result is known


def main() -> None:
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
        "devices": [],
    }
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        found["devices"] = [_device(index) for index in range(torch.cuda.device_count())]
    print(json.dumps(found))


def _device(index: int) -> dict[str, Any]:
    """One GPU, and whether it computes: the product of a matrix of ones with one of twos."""
    properties = torch.cuda.get_device_properties(index)
    found = {"name": properties.name, "total": properties.total_memory, "free": 0, "fails": ""}
    try:
        found["free"] = torch.cuda.mem_get_info(index)[0]
        with torch.cuda.device(index):
            product = torch.ones(SIDE, SIDE, device="cuda") @ torch.full((SIDE, SIDE), 2.0, device="cuda")
            wrong = int((product != 2.0 * SIDE).sum())
        if wrong:
            found["fails"] = f"a product of {SIDE} × {SIDE} has {wrong} wrong elements"
    except RuntimeError as error:  # whatever CUDA says of a device that is broken or taken
        found["fails"] = str(error).partition("\n")[0]
    return found


if __name__ == "__main__":
    main()
