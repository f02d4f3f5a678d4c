"""A stand-in for AMD's device library, for machines without an AMD GPU.

With this folder on the Python path vLLM detects its ROCm platform. It answers exactly the calls
that vLLM makes. It is for building and testing only and is never part of a wheel.

Environment:
    FAKE_GFX: The architecture, such as ``gfx1201``; without it the machine has no GPU.
    FAKE_VRAM_GIB: Memory of a GPU in GiB, 32 by default.
    FAKE_GPU_COUNT: Number of GPUs, 1 by default.
"""

from __future__ import annotations

import enum
import os
from typing import Any

# PCI device ids that vLLM has a card's name for; other architectures get the id 0x0000.
_DEVICE_IDS = {
    "gfx942": "0x74a1",
    "gfx1100": "0x744c",
    "gfx1150": "0x150e",
    "gfx1151": "0x1586",
    "gfx1201": "0x7550",
}


class AmdSmiException(Exception):
    """The base of all errors of the library."""


class AmdSmiMemoryType(enum.IntEnum):
    """Kinds of device memory."""

    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


def amdsmi_init(flag: int = 0) -> None:
    """Begin to use the library."""


def amdsmi_shut_down() -> None:
    """End to use the library."""


def amdsmi_get_processor_handles() -> list[int]:
    """Handles of the GPUs: their indices."""
    if not os.environ.get("FAKE_GFX"):
        return []
    return list(range(int(os.environ.get("FAKE_GPU_COUNT", "1"))))


def amdsmi_get_gpu_asic_info(processor_handle: int) -> dict[str, Any]:
    """Describe a GPU's chip."""
    arch = _check(processor_handle)
    return {
        "market_name": f"Stand-in {arch}",
        "vendor_id": "0x1002",
        "device_id": _DEVICE_IDS.get(arch, "0x0000"),
        "asic_serial": f"0x{processor_handle:016x}",
        "target_graphics_version": arch,
    }


def amdsmi_get_gpu_device_uuid(processor_handle: int) -> str:
    """A GPU's UUID."""
    _check(processor_handle)
    return f"00000000-0000-0000-0000-{processor_handle:012x}"


def amdsmi_get_gpu_memory_total(processor_handle: int, mem_type: AmdSmiMemoryType) -> int:
    """A GPU's memory in bytes."""
    _check(processor_handle)
    return int(float(os.environ.get("FAKE_VRAM_GIB", "32")) * (1 << 30))


def amdsmi_topo_get_link_type(
    processor_handle_src: int, processor_handle_dst: int
) -> dict[str, int]:
    """How two GPUs are linked: over PCI Express (type 1), two hops."""
    _check(processor_handle_src)
    _check(processor_handle_dst)
    return {"hops": 2, "type": 1}


def amdsmi_topo_get_numa_node_number(processor_handle: int) -> int:
    """The NUMA node a GPU is attached to."""
    _check(processor_handle)
    return 0


def _check(handle: int) -> str:
    if handle not in amdsmi_get_processor_handles():
        raise AmdSmiException(f"no GPU has the handle {handle}")
    return os.environ["FAKE_GFX"]
