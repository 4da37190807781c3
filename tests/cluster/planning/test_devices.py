"""The table of devices."""

import pytest

from megatron_allattn.cluster.planning.devices import DEVICES, GB, device_named
from megatron_allattn.config import UsageError


def test_every_number_says_where_it_is_from() -> None:
    for name, device in DEVICES.items():
        assert device.name == name
        rates = [device.memory, device.bandwidth, device.node_link, device.network_link, device.reached]
        for rate in [*rates, device.link_reached, device.message, *device.flops.values()]:
            assert rate.value > 0 and len(rate.source) > 10, name


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"--gpu h100: there is no such device; did you mean h100-80\? give one of"):
        device_named("h100")


def test_processes_of_a_node_share_the_memory_of_a_cpu_only() -> None:
    cpu, gpu = device_named("cpu"), device_named("a100-40")
    assert cpu.of_node(4).memory_bytes == cpu.memory_bytes // 4
    assert gpu.of_node(8).memory_bytes == gpu.memory_bytes == 40 * GB
