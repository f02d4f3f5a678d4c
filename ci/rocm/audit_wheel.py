"""Ask auditwheel and abi3audit about a wheel; runs in the environment that has them.

Arguments: the wheel, then the libraries that torch and ROCm bring.  Prints one line of JSON:
``platform`` is the oldest platform tag that the wheel fits, ``abi3`` what violates the stable
ABI of its Python tag, by library.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def platform(wheel: Path, allowed: frozenset[str]) -> str:
    """Return the platform tag that a wheel fits if others bring some libraries."""
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc
    from auditwheel.wheel_abi import analyze_wheel_abi

    found = analyze_wheel_abi(
        Libc.GLIBC,
        Architecture.x86_64,
        wheel,
        allowed,
        disable_isa_ext_check=False,
        allow_graft=False,
    )
    return str(found.overall_policy.name)


def abi3(wheel: Path) -> dict[str, str]:
    """Return what in a wheel's libraries is not in the stable ABI that its tag names."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "abi3audit", "-R", "-o", report.name, str(wheel)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        text = Path(report.name).read_text()
    if not text:
        return {wheel.name: ran.stderr.strip() or "abi3audit said nothing"}
    problems = {}
    for spec in json.loads(text)["specs"].values():
        for item in spec["wheel"]:
            result = item["result"]
            wrong = [*result["non_abi3_symbols"], *result["future_abi3_objects"]]
            if wrong or not result["is_abi3"]:
                problems[item["name"]] = ", ".join(map(str, wrong)) or "no abi3"
    return problems


if __name__ == "__main__":
    file = Path(sys.argv[1])
    print(json.dumps({"platform": platform(file, frozenset(sys.argv[2:])), "abi3": abi3(file)}))
