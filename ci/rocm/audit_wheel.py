"""Ask auditwheel and abi3audit about a wheel; runs in the environment that has them.

Arguments: the wheel, then the libraries that torch and ROCm bring.  Prints one line of JSON:
``platform`` is the oldest platform tag that the wheel fits, ``external`` the libraries that
it needs from elsewhere, ``abi3`` what violates Python's stable ABI, by library.
"""

import json
import sys
from pathlib import Path


def platform(wheel: Path, allowed: frozenset[str]) -> tuple[str, list[str]]:
    """Return the platform tag that a wheel fits, and what it needs from elsewhere."""
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc
    from auditwheel.wheel_abi import analyze_wheel_abi

    found = analyze_wheel_abi(Libc.GLIBC, Architecture.x86_64, wheel, allowed, False, False)
    external = sorted(
        {name for tree in found.full_elftree.values() for name in tree.needed}
        & set(allowed)
    )  # fmt: skip
    return found.overall_policy.name, external


def abi3(wheel: Path) -> dict[str, str]:
    """Return what in a wheel's libraries is not in the stable ABI that its tag names."""
    from abi3audit._audit import audit
    from abi3audit._extract import make_specs
    from abi3info.models import PyVersion

    tag = wheel.name.split("-")[2]
    version = PyVersion(int(tag[2]), int(tag[3:]))
    problems = {}
    for spec in make_specs(str(wheel), assume_minimum_abi3=version):
        for extractor in spec._extractor():
            result = audit(extractor, assume_minimum_abi3=version)
            if not result:
                problems[extractor.path.name] = str(result)
    return problems


if __name__ == "__main__":
    file = Path(sys.argv[1])
    tag, libraries = platform(file, frozenset(sys.argv[2:]))
    print(json.dumps({"platform": tag, "external": libraries, "abi3": abi3(file)}))
