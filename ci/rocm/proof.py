"""Prove a wheel with compiled extensions, from the file and from loading it.

Adds to ci/wheel.py's proof what only such a wheel can be asked: see :func:`prove`.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci import codeobjects, envs, paths
from ci.errors import StackError
from ci.rocm import audit, stubs
from ci.rocm.toolchain import PLATFORM, Ready
from ci.run import run

# The modules of vLLM's ROCm build that hold GPU code, and the rest.
DEVICE = ("_C", "_C_stable_libtorch", "_moe_C_stable_libtorch", "_rocm_C")
HOST = ("cumem_allocator", "_hipdnn_C")
SINCE_311 = ("spinloop", "fs_io_C")
_PROBE = Path(__file__).with_name("probe.py")
_AUDIT = Path(__file__).with_name("audit_wheel.py")


@dataclass(frozen=True)
class Found:
    """What was found: facts for the build record, and what is wrong."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return what was found in one line."""
        loaded = self.facts["loaded"]
        return (
            f"{len(loaded['modules'])} modules load with HIP {loaded['hip_runtime']['version']}, "
            f"{loaded['registered']} ops, fits {self.facts['tags']['platform']}"
        )


def modules(names: Sequence[str], python: tuple[int, int], hipdnn: bool) -> list[str]:
    """Return the problems with which modules a wheel has.

    Args:
        names: The wheel's members.
        python: The Python that built it.
        hipdnn: Whether the tree has the native hipDNN core.
    """
    wanted = [*DEVICE, *(n for n in HOST if hipdnn or n != "_hipdnn_C")]
    wanted += SINCE_311 if python >= (3, 11) else ()
    have = {Path(n).name.split(".")[0] for n in names if re.match(r"vllm/\w+\.(abi3\.)?so$", n)}
    return [f"vllm/{name} is not in the wheel" for name in wanted if name not in have]


def device_problems(wheel: Path, arches: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Check that each device library holds code for exactly the architectures.

    Returns:
        Library to its architectures, and what is wrong.
    """
    found = [o for o in codeobjects.scan_wheel(wheel) if o.file.endswith(".so")]
    by_file = codeobjects.arches_by_file(found)
    problems = []
    for name in DEVICE:
        file = next((f for f in by_file if re.match(rf"vllm/{name}\.(abi3\.)?so$", f)), None)
        if file is None:
            problems.append(f"vllm/{name} holds no AMD GPU code")
        elif by_file[file] != sorted(arches):
            problems.append(f"{file} holds {', '.join(by_file[file])}, not {', '.join(arches)}")
    return by_file, problems


def wmma_problems(found: dict[str, str], arches: Sequence[str]) -> list[str]:
    """Name the architectures with WMMA whose attention kernels have none of it."""
    return [
        f"vllm/_rocm_C has no WMMA instruction for {arch}"
        for arch in arches
        if audit.WMMA.match(arch) and not found.get(arch)
    ]


def prove(
    wheel: Path, version: str, tree: Path, arches: Sequence[str], ready: Ready, place: Path
) -> Found:
    """Check what was compiled.

    * every module is there, and each device library holds code for exactly the
      architectures that were asked for;
    * the attention kernels have WMMA instructions where the architecture has them;
    * what the libraries need is brought by the system, torch or ROCm, and each undefined
      symbol is defined by what they need;
    * the platform tag and the Python tag are true (auditwheel, abi3audit);
    * vLLM and all modules load, every symbol bound at once, with the real HIP runtime and
      no GPU, and all ops that vLLM's Python names for ROCm are registered.

    Args:
        wheel: The wheel.
        version: Its version.
        tree: The patched tree.
        arches: The architectures.
        ready: The toolchain that made it.
        place: The toolchain's folder to work in.
    """
    site = place / "site"
    shutil.rmtree(site, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    tag = wheel.name.split("-")[2]
    python = (int(tag[2]), int(tag[3:]))
    problems = modules(names, python, (tree / "cmake" / "hipdnn.cmake").is_file())
    code, wrong = device_problems(wheel, arches)
    problems += wrong
    libraries = {p.name: audit.read_library(p) for p in sorted((site / "vllm").glob("*.so"))}
    facts: dict[str, Any] = {"device_code": code, "libraries": {}}
    provided = providers(ready)
    listed = stubs.load()
    for name, library in libraries.items():
        problems += audit.needed_problems(library)
        counts, wrong = audit.symbol_problems(library, provided, listed)
        problems += wrong
        facts["libraries"][name] = {
            "needed": list(library.needed),
            "newest": audit.newest(library.versions),
            "symbols_from": dict(sorted(counts.items())),
        }
    facts["wmma"], wrong = _wmma(site, arches, ready)
    problems += wrong
    facts["tags"], wrong = _tags(wheel, ready)
    problems += wrong
    facts["loaded"], wrong = _load(site, version, tree, arches, ready)
    problems += wrong
    shutil.rmtree(site, ignore_errors=True)
    return Found(facts, tuple(problems))


def providers(ready: Ready) -> dict[str, set[str]]:
    """Return what defines symbols besides the tracked list: provider to names."""
    result: dict[str, set[str]] = {}
    for name, path in ready.libraries().items():
        result[name] = audit.exported(path)
    return result


def _wmma(site: Path, arches: Sequence[str], ready: Ready) -> tuple[dict[str, str], list[str]]:
    objdump = ready.objdump()
    library = next((site / "vllm").glob("_rocm_C.*so"), None)
    if library is None or not any(audit.WMMA.match(a) for a in arches):
        return {}, []
    if objdump is None:
        return {arch: "not looked at: no llvm-objdump" for arch in arches}, []
    found = audit.wmma(library, objdump)
    return found, wmma_problems(found, arches)


def _tags(wheel: Path, ready: Ready) -> tuple[dict[str, Any], list[str]]:
    python = envs.ensure_audit()
    words = [str(python), str(_AUDIT), str(wheel), *sorted(audit.PROVIDERS)]
    said: dict[str, Any] = json.loads(run(words, what="auditwheel").strip().splitlines()[-1])
    return said, tag_problems(wheel.name, said, ready.root is not None)


def tag_problems(name: str, said: dict[str, Any], portable: bool) -> list[str]:
    """Compare a wheel's tag with what auditwheel and abi3audit say.

    Args:
        name: The wheel's file name.
        said: ``platform`` (the oldest that it fits), ``abi3`` (violations by library).
        portable: Whether the tag claims more than the machine that built it.
    """
    problems = [
        f"{library} is no abi3 library of Python {name.split('-')[2]}: {text}"
        for library, text in sorted(said["abi3"].items())
    ]
    if portable:
        want, have = (glibc(text) for text in (PLATFORM, said["platform"]))
        if have is None or (want is not None and have > want):
            problems.append(f"the wheel claims {PLATFORM}, auditwheel says {said['platform']}")
    return problems


def glibc(platform: str) -> tuple[int, int] | None:
    """Return the glibc version in a manylinux tag, or None (a plain linux tag)."""
    match = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return (int(match[1]), int(match[2])) if match else None


def _load(
    site: Path, version: str, tree: Path, arches: Sequence[str], ready: Ready
) -> tuple[dict[str, Any], list[str]]:
    standin = site.parent / "standin"
    shutil.rmtree(standin, ignore_errors=True)
    shutil.copytree(paths.STANDIN, standin)
    shutil.copy2(_PROBE, standin / "probe.py")
    env = {
        **ready.env,
        "PYTHONPATH": f"{ready.inner(site)}:{ready.inner(standin)}",
        "FAKE_GFX": arches[0],
        "HIP_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words = [ready.python, ready.inner(standin / "probe.py"), *ready.standins()]
    try:
        output = run(
            ready.command(words, site, env), env=None if ready.root else env,
            what="loading the wheel with the real HIP runtime",
        )  # fmt: skip
    except StackError as error:
        return {}, [str(error)]
    finally:
        shutil.rmtree(standin, ignore_errors=True)
    said: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    macros = audit.macros_for(arches)
    defined: set[str] = set()
    for file, module in audit.BINDINGS.items():
        defined |= audit.defined_ops((tree / file).read_text(), module, macros)
    named = audit.named_ops(p.read_text(encoding="utf-8") for p in (tree / "vllm").rglob("*.py"))
    problems = audit.op_problems(named, defined, said["ops"])
    if said["version"] != version:
        problems.append(f"the loaded vLLM says {said['version']}, not {version}")
    facts = {
        "hip_runtime": said["hip"],
        "modules": said["modules"],
        "registered": len(said["ops"]),
        "named_by_python_and_defined": len(named & defined),
        "stand_ins": [Path(p).name for p in ready.standins()],
    }
    return facts, problems
