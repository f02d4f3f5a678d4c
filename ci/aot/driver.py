"""A Triton driver for a machine without a GPU: launches are recorded, never run."""

from __future__ import annotations

import functools
import importlib
import re
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


@dataclass(frozen=True)
class Target:
    """What Triton compiles for.

    Attributes:
        backend: ``hip``, or ``cuda`` for tests on a GPU that is not AMD's.
        arch: Name of the architecture, or the number of the compute capability.
        warp_size: Lanes of a wave.
    """

    backend: str
    arch: str | int
    warp_size: int

    @property
    def shared_kib(self) -> int:
        """The most shared memory of a workgroup."""
        if self.backend == "cuda":
            return 227
        return 160 if self.arch == "gfx950" else 64


def target_of(arch: str, other: str | None = None) -> Target:
    """Make the target of an architecture.

    Args:
        arch: Such as ``gfx1201``.
        other: Such as ``cuda:90``: in place of the architecture's own target.

    Raises:
        AotError: ``other`` has another form.
    """
    if other is None:
        return Target("hip", arch, warp_size(arch))
    if not (match := re.fullmatch(r"cuda:([1-9][0-9]{1,2})", other)):
        raise AotError(f"{other!r} is not another GPU's target (such as cuda:90)")
    return Target("cuda", int(match[1]), 32)


class _Utils:
    def __init__(self, target: Target) -> None:
        self._properties = {
            "arch": target.arch,
            "warpSize": target.warp_size,
            "max_shared_mem": target.shared_kib << 10,
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

    def __init__(self, target: Target, recorder: Recorder) -> None:
        self._target = target
        self.utils = _Utils(target)
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
        return compiler.GPUTarget(**vars(self._target))

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
        backend = "amd" if self._target.backend == "hip" else "nvidia"
        driver = importlib.import_module(f"triton.backends.{backend}.driver")
        return str(driver.ty_to_cpp(ty))


def activate(target: Target) -> Recorder:
    """Make the stand-in Triton's active driver in this process and record what it compiles.

    Args:
        target: What every launch is compiled for.

    Returns:
        The recorder.
    """
    recorder = Recorder()
    knobs = importlib.import_module("triton.knobs")
    runtime = importlib.import_module("triton.runtime.driver")
    runtime.driver.set_active(StandInDriver(target, recorder))
    knobs.compilation.listener = recorder.on_compile
    return recorder


def warp_size(arch: str) -> int:
    """Lanes of a wave: 32 from gfx10 on, else 64."""
    return 32 if int(arch[3:-2]) >= 10 else 64
