"""A Triton driver for a machine without a GPU: launches are recorded, never run."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.aot.model import AotError

# Triton takes these through importlib so that type checking needs neither it nor torch.


@dataclass(frozen=True)
class Compiled:
    """What Triton reported about one compilation or cache hit."""

    source: Any
    metadata: dict[str, Any]
    files: dict[str, Path]


class Recorder:
    """Collects compiled kernels and the order of launches."""

    def __init__(self) -> None:
        self.compiled: dict[str, Compiled] = {}
        self._launched: list[str] = []

    def on_compile(self, *, src: Any, metadata: dict[str, Any], **rest: Any) -> None:
        """Take a report of Triton's compilation listener."""
        files = {name: Path(path) for name, path in rest["metadata_group"].items()}
        self.compiled[metadata["hash"]] = Compiled(src, metadata, files)

    def launcher(self, _source: Any, metadata: Any) -> Callable[..., None]:
        """Make the launcher of a kernel: it notes that the kernel was launched."""

        def launch(*_: Any) -> None:
            self._launched.append(metadata.hash)

        return launch

    def take_launched(self) -> list[str]:
        """The hashes launched since the last call, in order."""
        taken, self._launched = self._launched, []
        return taken


class _Utils:
    def __init__(self, arch: str, warp_size: int) -> None:
        self._properties = {
            "arch": arch,
            "warpSize": warp_size,
            "max_shared_mem": (160 if arch == "gfx950" else 64) << 10,
            "multiprocessor_count": 64,
        }

    def get_device_properties(self, _device: int) -> dict[str, Any]:
        return dict(self._properties)

    def load_binary(
        self, _name: str, _kernel: bytes, _shared: int, _device: int
    ) -> tuple[None, None, int, int, int]:
        """Stand for module, function, registers, spills and the largest workgroup."""
        return None, None, 0, 0, 1024


class StandInDriver:
    """Answers what Triton asks an active driver before and during a launch."""

    def __init__(self, arch: str, recorder: Recorder) -> None:
        self._arch = arch
        self._warp_size = warp_size(arch)
        self.utils = _Utils(arch, self._warp_size)
        self.launcher_cls = functools.partial(recorder.launcher)

    @classmethod
    def is_active(cls) -> bool:
        """Whether this driver's device is there: by definition."""
        return True

    def get_current_device(self) -> int:
        """The index of the only device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Accept the only device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> Any:
        """Triton's description of the architecture."""
        compiler = importlib.import_module("triton.backends.compiler")
        return compiler.GPUTarget("hip", self._arch, self._warp_size)

    def get_active_torch_device(self) -> Any:
        """The device of the tensors that launches are given."""
        return importlib.import_module("torch").device("meta")

    def get_device_interface(self) -> Any:
        """Fail: there is nothing to synchronise or to time."""
        raise AotError("a launch asked for a real device")

    def get_benchmarker(self) -> Any:
        """Fail: an autotuned kernel cannot choose its configuration here."""
        raise AotError("a launch wants to autotune; give it one configuration")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Name the C++ type of an argument as the real driver does."""
        driver = importlib.import_module("triton.backends.amd.driver")
        return str(driver.ty_to_cpp(ty))


def activate(arch: str) -> Recorder:
    """Make the stand-in Triton's active driver in this process and record what it compiles.

    Args:
        arch: The architecture that every launch is compiled for.

    Returns:
        The recorder.
    """
    recorder = Recorder()
    knobs = importlib.import_module("triton.knobs")
    runtime = importlib.import_module("triton.runtime.driver")
    runtime.driver.set_active(StandInDriver(arch, recorder))
    knobs.compilation.listener = recorder.on_compile
    return recorder


def warp_size(arch: str) -> int:
    """Lanes of a wave: 32 from gfx10 on, else 64."""
    return 32 if int(arch[3:-2]) >= 10 else 64
