"""vLLM configured in the private root of Debian packages, small targets of it, their proof."""

import subprocess
import sys

import pytest

from ci import paths
from ci.rocm import debian, machine


@pytest.mark.build
def test_small_targets_are_built_in_the_root_and_proved():
    if lacking := debian.machine_lacks(machine.find_mirror(None)):
        pytest.skip("; ".join(lacking))
    done = subprocess.run(
        [sys.executable, "-m", "ci.rocm", "check", "--arch", "gfx1201"],
        cwd=paths.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pos_encoding_kernels.hip.o: code for gfx1201" in done.stdout
    assert "loaded; hipGetDeviceCount" in done.stdout
