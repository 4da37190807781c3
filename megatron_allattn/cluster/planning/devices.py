"""What devices can do: a small table of memory and rates, each with where it is from.

Rates are those of dense matrix products and of one direction of a link. A step reaches a part of them, `reached`: the
share of the product rate while work is counted as executed (model/work.py), and the share of a link's rate. Neither
has been measured on a GPU here; `tools/benchmark.py plan-check` measures on the device that is there.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatron_allattn.config.errors import usage_error

GB = 10**9
TERA = 10**12
FLAG = "--gpu"
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Rate:
    """A number and where it is from."""

    value: float
    source: str


@dataclass(frozen=True)
class Device:
    """One device of a node; bytes, and bytes or operations per second.

    flops: of matrix products, by precision of their factors (one that is not there cannot be used) · bandwidth: of its
    memory · node_link: what it sends to the others of its node · network_link: its share of what a node sends to other
    nodes · reached: of flops, and `link_reached` of links, by training · message: seconds that a message takes beside
    its bytes · shared: the memory is one for all processes of a node · triton: whether its kernels run there.
    """

    name: str
    memory: Rate
    flops: Mapping[Precision, Rate]
    bandwidth: Rate
    node_link: Rate
    network_link: Rate
    reached: Rate
    link_reached: Rate
    message: Rate
    shared: bool = False
    triton: bool = True

    @property
    def memory_bytes(self) -> int:
        """What tensors may take."""
        return int(self.memory.value)

    def of_node(self, processes: int) -> "Device":
        """The same, where so many processes of a node share its memory."""
        if not self.shared:
            return self
        return replace(self, memory=replace(self.memory, value=self.memory.value / processes))


_ASSUMED = "assumed: not measured on this device yet"
_MESSAGE = "assumed: a collective of NCCL over a few ranks"


def _gpu(
    name: str,
    memory: int,
    bandwidth: int,
    node_link: int,
    network_link: float,
    source: str,
    network: str,
    triton: bool = True,
    **tera: float,
) -> Device:
    """Stated by the vendor: gigabytes, gigabytes per second, 10¹² operations per second by precision."""
    about = "the vendor's gigabytes as 10⁹ bytes; the device has more, which driver, libraries and their buffers take"
    return Device(
        name=name,
        memory=Rate(memory * GB, f"{source}: {about}"),
        flops={precision: Rate(value * TERA, source) for precision, value in tera.items()},  # type: ignore[misc]
        bandwidth=Rate(bandwidth * GB, source),
        node_link=Rate(node_link * GB, f"{source}, NVLink in one direction"),
        network_link=Rate(network_link * GB, network),
        reached=Rate(0.35, _ASSUMED),
        link_reached=Rate(0.7, _ASSUMED),
        message=Rate(20e-6, _MESSAGE),
        triton=triton,
    )


_V100 = "NVIDIA's data sheet of the V100 SXM2"
_A100 = "NVIDIA's data sheet of the A100 SXM"
_H100 = "NVIDIA's data sheet of the H100 SXM"
_H200 = "NVIDIA's data sheet of the H200 SXM"

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu(
            "v100-32",
            memory=32,
            bandwidth=900,
            node_link=150,
            network_link=6.25,
            source=_V100,
            network="NVIDIA's DGX-2H class: 4 adapters of 100 Gb/s for 8 GPUs",
            triton=False,
            float32=15.7,
            float16=125,
            bfloat16=15.7,  # no instructions: products in float32
        ),
        _gpu(
            "a100-40",
            memory=40,
            bandwidth=1555,
            node_link=300,
            network_link=25,
            source=_A100,
            network="NVIDIA's DGX A100: an adapter of 200 Gb/s for each GPU",
            float32=19.5,
            float16=312,
            bfloat16=312,
        ),
        _gpu(
            "a100-80",
            memory=80,
            bandwidth=2039,
            node_link=300,
            network_link=25,
            source=_A100,
            network="NVIDIA's DGX A100: an adapter of 200 Gb/s for each GPU",
            float32=19.5,
            float16=312,
            bfloat16=312,
        ),
        _gpu(
            "h100-80",
            memory=80,
            bandwidth=3350,
            node_link=450,
            network_link=50,
            source=_H100,
            network="NVIDIA's DGX H100: an adapter of 400 Gb/s for each GPU",
            float32=67,
            float16=989,
            bfloat16=989,
        ),
        _gpu(
            "h200-141",
            memory=141,
            bandwidth=4800,
            node_link=450,
            network_link=50,
            source=_H200,
            network="NVIDIA's DGX H200: an adapter of 400 Gb/s for each GPU",
            float32=67,
            float16=989,
            bfloat16=989,
        ),
        Device(
            name="cpu",
            memory=Rate(16 * GB, "assumed: a laptop's, for all of its processes"),
            flops={
                "float32": Rate(58e9, "measured: one core of an AMD EPYC (Zen 3), docs/performance.md"),
                "bfloat16": Rate(58e9, "the same: it has no instructions for bfloat16, products are in float32"),
            },
            bandwidth=Rate(10 * GB, "measured: a copy by one core of an AMD EPYC (Zen 3)"),
            node_link=Rate(2 * GB, "assumed: gloo over the loopback"),
            network_link=Rate(0.125 * GB, "assumed: Ethernet of 1 Gb/s"),
            reached=Rate(0.75, "measured: docs/performance.md, share of GEMM with recomputation"),
            link_reached=Rate(0.7, _ASSUMED),
            message=Rate(200e-6, "assumed: gloo"),
            shared=True,
            triton=False,
        ),
    )
}
"""By name: what --gpu takes."""


def device_named(name: str) -> Device:
    """The device of this name. Raises UsageError with the names that there are."""
    if name not in DEVICES:
        near = difflib.get_close_matches(name, DEVICES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise usage_error(FLAG, name, "there is no such device", f"{hint}give one of {', '.join(DEVICES)}")
    return DEVICES[name]
