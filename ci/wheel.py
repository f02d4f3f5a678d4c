"""Build the wheel from a patched tree, and prove it from the file alone."""

import contextlib
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from ci import aot, codeobjects, gitstack, source
from ci.errors import StackError
from ci.extensions import ABSENT, Extensions
from ci.patches import Series
from ci.pin import Pin
from ci.rocm import build as rocm_build
from ci.rocm.toolchain import Ready
from ci.run import run

# zip cannot say anything before 1980; the pin's release day says as much as any.
SOURCE_DATE_EPOCH = "1791072000"
STACK_JSON = "vllm/hipstack/stack.json"
_FORBIDDEN = re.compile(
    r"(^|/)(__pycache__|\.pc|\.git|\.mypy_cache|\.pytest_cache|amdsmi|_fake_amdsmi|standins)/"
    r"|\.(pyc|pyo|orig|rej)$|(^|/)(conftest|test_\w+)\.py$|libhipdnn_backend"
)
# Upstream ships these under a test-like name.
_ALLOWED = re.compile(r"^vllm/(.*/)?(test_utils|testing)/")


def local_version(pin: Pin, stack_version: str, arches: Sequence[str]) -> str:
    """Return the wheel's version, such as ``0.31.0+hipstack1.gfx1201``.

    "cpu" must never be in it: vLLM's platform detection reads the string.
    """
    version = f"{pin.version}+hipstack{stack_version}.{'.'.join(arches)}"
    return version


def stack_record(
    pin: Pin,
    stack_version: str,
    series: Series,
    arches: Sequence[str],
    extensions: str,
    hip: str = "",
) -> dict[str, Any]:
    """Return what the wheel says about itself (``vllm/hipstack/stack.json``).

    Args:
        pin: The pin.
        stack_version: The stack's own version.
        series: The patches.
        arches: The architectures.
        extensions: How compiled ops came in.
        hip: The HIP version that they were compiled with, or "".
    """
    record: dict[str, Any] = {
        "schema": 1,
        "version": stack_version,
        "pin": {"version": pin.version, "commit": pin.commit},
        "set_hash": series.set_hash,
        "patches": [{"name": p.name, "sha256": p.sha256, "subject": p.subject} for p in series],
        "arches": list(arches),
        "extensions": extensions,
    }
    if hip:
        record["fits"] = fits(pin, hip)
    return record


def fits(pin: Pin, hip: str) -> dict[str, str]:
    """Return which torch and ROCm compiled ops fit.

    _C and _rocm_C use torch's C++ interface, which holds within a minor release; the HIP
    runtime is asked for under a name with its major version.
    """
    return {"torch": ".".join(pin.torch.split(".")[:2]), "rocm": hip.split(".")[0]}


def to_json(data: Any) -> str:
    """Serialise deterministically."""
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


@contextlib.contextmanager
def _without_rust(scratch: Path) -> Iterator[str]:
    """Yield a PATH whose rustc fails, so that upstream's optional Rust parts stay out.

    They would be built only where a certain toolchain happens to be, and make the wheel
    depend on it.
    """
    folder = scratch / "no-rust"
    folder.mkdir()
    for name in ("rustc", "cargo"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    yield f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def build(
    tree: Path,
    python: Path,
    version: str,
    record: dict[str, Any],
    extensions: Extensions,
    kernels: Path | None,
    jobs: int,
    log: Path,
    work: Path,
    ready: Ready | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Build the wheel with upstream's own setup.py.

    ``setup.py bdist_wheel`` is called directly: build isolation would fetch torch again,
    and for ROCm upstream documents that ``pip install .`` does not work.

    Args:
        tree: The patched tree; it is copied, not changed.
        python: Interpreter of the build environment.
        version: The wheel's version.
        record: What goes into ``stack.json``.
        extensions: How compiled ops come in.
        kernels: Folder with ahead-of-time compiled kernels, or None.
        jobs: Parallel compile jobs.
        log: File that gets the build's output.
        work: An empty folder to build in.
        ready: The toolchain (compile); its root must hold ``work``.
        progress: Told about each compiled file.

    Returns:
        The wheel, inside ``work``.

    Raises:
        StackError: setup.py failed.
    """
    copy = work / "vllm-src"
    gitstack.copy_tree(tree, copy)
    (copy / STACK_JSON).parent.mkdir(parents=True, exist_ok=True)
    (copy / STACK_JSON).write_text(to_json(record))
    if kernels is not None:
        aot.install_into(copy / "vllm", kernels)
    if "fits" in record:
        # Upstream names no torch for ROCm.  This requirement is met by the ROCm torch that
        # is installed, and lets `pip check` name another.
        with (copy / "requirements" / "rocm.txt").open("a") as file:
            file.write(f"\ntorch == {record['fits']['torch']}.*\n")
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VLLM_", "SETUPTOOLS_", "CMAKE_")) and key != "PYTHONPATH"
    }
    env |= {
        "VLLM_VERSION_OVERRIDE": version,
        "VLLM_RS_BUILD_VERSION": version.split("+")[0],
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
        "PYTHONHASHSEED": "0",
        "MAX_JOBS": str(jobs),
        "LC_ALL": "C.UTF-8",
    }
    command = [str(python), "setup.py", "-q", "bdist_wheel", "--dist-dir", str(work / "dist")]
    with _without_rust(work) as path:
        if extensions.mode == "none":
            env |= {"VLLM_TARGET_DEVICE": "empty", "PATH": path}
        elif extensions.mode == "precompiled":
            # The wheel's own requirements are ROCm's, as upstream's mechanism would have
            # them under a ROCm torch; the CPU torch here only runs setup.py.
            env |= {
                "VLLM_TARGET_DEVICE": "rocm",
                "VLLM_USE_PRECOMPILED": "1",
                "VLLM_PRECOMPILED_WHEEL_LOCATION": str(extensions.wheel),
                "PATH": path,
            }
            driver = (
                "import runpy, sys, torch; torch.version.hip = sys.argv.pop(1); "
                "sys.argv[0] = 'setup.py'; sys.path.insert(0, ''); "
                "runpy.run_path('setup.py', run_name='__main__')"
            )
            command[1:2] = ["-c", driver, extensions.hip or "7.2"]
        else:
            assert ready is not None
            env |= {
                "VLLM_TARGET_DEVICE": "rocm",
                "CMAKE_BUILD_TYPE": "Release",
                "PYTORCH_ROCM_ARCH": ";".join(record["arches"]),
                "CMAKE_ARGS": f"-DROCM_PATH={ready.rocm}",
            }
            command = ready.wheel_command(
                ["setup.py", "-q", "bdist_wheel", "--dist-dir", ready.inner(work / "dist")]
            )
            if ready.root is not None:
                # Of this machine's environment nothing reaches the root.
                env = {k: v for k, v in env.items() if k not in os.environ}
            env |= ready.env
            outer = None if ready.root else env
            words = ready.command(command, copy, env)
            count = len(record["arches"])
            rocm_build.setup(words, copy, outer, log, progress, jobs, count)
            return _only_wheel(work / "dist")
        with log.open("ab") as output:
            result = subprocess.run(
                command,
                cwd=copy,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                umask=0o022,
                check=False,
            )
    if result.returncode != 0:
        lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()]
        raise StackError(f"setup.py failed ({result.returncode}): {lines[-1] if lines else ''}")
    return _only_wheel(work / "dist")


def _only_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise StackError(f"setup.py made {len(wheels)} wheels instead of one")
    return wheels[0]


@dataclass(frozen=True)
class Proof:
    """What was found in a wheel.

    Attributes:
        problems: What is wrong, one sentence each; empty for a good wheel.
        markers: Patch name to the number of its lines seen in the wheel, or None where
            the patch ships nothing (tests, benchmarks, documentation).
        code_objects: File name to the architectures whose code it holds.
        files: How many files the wheel has.
        tag: Its compatibility tag.

    """

    problems: tuple[str, ...]
    markers: dict[str, int | None]
    code_objects: dict[str, list[str]]
    files: int
    tag: str


def markers(series: Series, tree: Path) -> dict[str, list[tuple[str, str]]]:
    """Collect, for each patch, the lines of it that a wheel must hold.

    Args:
        series: The patches.
        tree: The tree with all of them applied.

    Returns:
        Patch name to (path in the wheel, line), for the lines that the whole series
        keeps.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for patch in series:
        lines = found.setdefault(patch.name, [])
        for change in patch.changes:
            path = tree / change.path
            if not change.path.startswith("vllm/") or not path.is_file():
                continue
            kept = set(path.read_text(encoding="utf-8", errors="replace").splitlines())
            lines += [
                (change.path, line)
                for line in change.added
                if line in kept and len(line.strip()) > 8
            ]
    return found


def prove(
    wheel: Path,
    version: str,
    series: Series,
    tree: Path,
    arches: Sequence[str],
    extensions: Extensions,
    build_paths: Sequence[Path],
) -> Proof:
    """Check a wheel from its file alone.

    Args:
        wheel: The wheel.
        version: The version that it must have.
        series: The patches that must be in it.
        tree: The patched tree, to know which lines of a patch survive the whole series.
        arches: The architectures that were asked for.
        extensions: How compiled ops came in.
        build_paths: Folders of the build that must not be named in any file.

    Returns:
        What was found.
    """
    problems: list[str] = []
    _, parsed, _, tags = parse_wheel_filename(wheel.name)
    if str(parsed) != version:
        problems.append(f"version is {parsed}, not {version}")
    tag = "-".join(wheel.name.removesuffix(".whl").split("-")[-3:])
    if extensions.mode != "compile" and not tags & set(sys_tags()):
        problems.append(f"tag {tag} does not fit the Python that built it")
    present: dict[str, int | None] = {}
    needles = [str(path).encode() for path in build_paths]
    with zipfile.ZipFile(wheel) as archive:
        if bad := archive.testzip():
            problems.append(f"{bad} is damaged")
        names = [n for n in archive.namelist() if not n.endswith("/")]
        metadata = next((n for n in names if n.endswith(".dist-info/METADATA")), None)
        if metadata is None:
            problems.append("there is no METADATA")
        else:
            said = email.message_from_bytes(archive.read(metadata))["Version"]
            if said != version:
                problems.append(f"METADATA says version {said}")
        for name in names:
            if _FORBIDDEN.search(name) and not _ALLOWED.search(name):
                problems.append(f"{name} must not be in a wheel")
            data = archive.read(name)
            if any(needle in data for needle in needles):
                problems.append(f"{name} names a folder of the build")
        present_names = set(names)
        wheel_file = next((n for n in names if n.endswith(".dist-info/WHEEL")), None)
        if wheel_file is None:
            problems.append("there is no WHEEL file")
        else:
            said_tags = email.message_from_bytes(archive.read(wheel_file)).get_all("Tag") or []
            if set(said_tags) != {str(t) for t in tags}:
                problems.append(f"WHEEL says tags {', '.join(said_tags)}, its name {tag}")
        for patch, wanted in markers(series, tree).items():
            ships = any(c.path.startswith("vllm/") for c in series.get(patch).changes)
            present[patch] = len(wanted) if ships else None
            if ships and not wanted:
                problems.append(f"patch {patch}: none of its lines is left to look for")
            by_path: dict[str, list[str]] = {}
            for path, line in wanted:
                by_path.setdefault(path, []).append(line)
            for path, lines in by_path.items():
                if path not in present_names:
                    problems.append(f"patch {patch}: {path} is not in the wheel")
                    continue
                have = set(archive.read(path).decode("utf-8", "replace").splitlines())
                if absent := [line for line in lines if line not in have]:
                    problems.append(
                        f"patch {patch}: {path} lacks {len(absent)} of its lines, "
                        f"first {absent[0].strip()!r}"
                    )
        try:
            record = json.loads(archive.read(STACK_JSON))
            if record["set_hash"] != series.set_hash or record["arches"] != list(arches):
                problems.append("stack.json names another set or other architectures")
        except (KeyError, ValueError) as error:
            problems.append(f"stack.json is missing or damaged: {error}")
    found: dict[str, list[str]] = {}
    try:
        objects = codeobjects.scan_wheel(wheel)
        found = codeobjects.arches_by_file(objects)
        problems += _arch_problems(objects, arches, extensions)
    except codeobjects.CodeObjectError as error:
        problems.append(str(error))
    problems += aot.verify_wheel(wheel, arches)
    return Proof(tuple(problems), present, found, len(names), tag)


def _arch_problems(
    objects: Sequence[codeobjects.CodeObject], arches: Sequence[str], extensions: Extensions
) -> list[str]:
    """Compare code objects with what was asked for.

    Ahead-of-time compiled kernels are one file an architecture, so they are compared as
    a whole; a library must hold every architecture itself.  A precompiled library may
    hold more than was asked for (upstream's wheels serve many cards): its surplus stays.
    """
    kernels = [o for o in objects if o.file.endswith(".hsaco")]
    libraries = [o for o in objects if not o.file.endswith(".hsaco")]
    problems: list[str] = []
    made = {o.arch for o in kernels}
    if kernels and made != set(arches):
        problems.append(
            f"compiled kernels are for {', '.join(sorted(made))}, not {', '.join(arches)}"
        )
    if not kernels:
        problems.append("there is no ahead-of-time compiled kernel in it")
    if extensions.mode == "compile":
        problems += codeobjects.check_arches(libraries, arches)
        if not libraries:
            problems.append("no library in it holds AMD GPU code")
    elif extensions.mode == "precompiled":
        for file, names in codeobjects.arches_by_file(libraries).items():
            if lacking := sorted(set(arches) - set(names)):
                problems.append(f"{file} lacks code for {', '.join(lacking)}")
    elif libraries:
        problems.append(f"{libraries[0].file} holds GPU code although extensions are none")
    return problems


def prove_import(
    wheel: Path, version: str, env_python: Path, standin: Path, arches: Sequence[str]
) -> str:
    """Install the wheel into a fresh environment and import it there.

    The environment sees the packages of the build environment (vLLM's requirements) and
    nothing of the source tree.

    Args:
        wheel: The wheel.
        version: The version that it must report.
        env_python: Interpreter of the build environment.
        standin: Folder with the stand-in ``amdsmi``, so that vLLM chooses ROCm.
        arches: Architectures to pretend.

    Returns:
        One line that says what was imported.

    Raises:
        StackError: It cannot be installed or imported, or reports another version.
    """
    code = (
        "import vllm, vllm.hipstack as h\n"
        "from vllm.platforms import current_platform as p\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "assert vllm.__version__ == {version!r}, vllm.__version__\n"
        "assert h.stack_info() is not None\n"
        "assert p.is_rocm(), p\n"
        "import os; assert os.path.realpath(vllm.__file__).startswith({prefix!r}), vllm.__file__\n"
        "print(h.describe())\n"
    )
    with tempfile.TemporaryDirectory(prefix="hipstack-import-") as scratch:
        fresh = Path(scratch) / "env"
        run([str(env_python), "-m", "venv", "--without-pip", str(fresh)], what="python -m venv")
        site = next(fresh.glob("lib/python*/site-packages"))
        outer = run([str(env_python), "-c", "import site;print(site.getsitepackages()[0])"]).strip()
        run(
            [
                sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--offline",
                "--no-index", "--python", str(fresh / "bin" / "python"), str(wheel),
            ],
            what="installing the wheel",
        )  # fmt: skip
        (site / "requirements-of-the-build.pth").write_text(outer + "\n")
        return run(
            [
                str(fresh / "bin" / "python"), "-c",
                code.format(version=version, prefix=os.path.realpath(site)),
            ],
            cwd=Path(scratch),
            env={
                "PYTHONPATH": str(standin),
                "FAKE_GFX": arches[0],
                "HIP_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            what="importing the wheel in a fresh environment",
        ).strip().splitlines()[-1]  # fmt: skip


def build_record(
    wheel: Path,
    version: str,
    pin: Pin,
    stack: dict[str, Any],
    extensions: Extensions,
    proof: Proof,
    toolchain: dict[str, str],
    kernels: dict[str, Any] | None,
    inputs: str,
) -> dict[str, Any]:
    """Return the build record that lies beside the wheel."""
    return {
        "schema": 1,
        "wheel": wheel.name,
        "sha256": source.sha256(wheel),
        "size": wheel.stat().st_size,
        "version": version,
        "tag": proof.tag,
        "inputs": inputs,
        "stack": stack,
        "sdist_sha256": pin.sdist_sha256,
        "tree_sha256": pin.tree_sha256,
        "extensions": {
            "mode": extensions.mode,
            "reason": extensions.reason,
            "note": ABSENT if extensions.mode == "none" else "",
            "wheel": extensions.wheel.name if extensions.wheel else "",
            "wheel_sha256": source.sha256(extensions.wheel) if extensions.wheel else "",
            "rocm": extensions.hip,
        },
        "toolchain": toolchain,
        "kernels": kernels,
        "code_objects": proof.code_objects,
        "patch_lines_in_wheel": proof.markers,
        "reproducible": (
            "every byte of the wheel"
            if extensions.mode != "compile"
            else "every file but the compiled libraries (*.so)"
        ),
    }


def sbom(wheel: Path, record: dict[str, Any], series: Series) -> str:
    """Return a CycloneDX SBOM (JSON) of a wheel: its requirements and its patches.

    Args:
        wheel: The wheel; its METADATA lists the requirements.
        record: The build record.
        series: The patches, which become the component's pedigree.
    """
    from cyclonedx.model import HashAlgorithm, HashType, XsUri
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import (
        Component,
        ComponentType,
        Diff,
        Patch,
        PatchClassification,
        Pedigree,
    )
    from cyclonedx.model.license import LicenseExpression
    from cyclonedx.output.json import JsonV1Dot5
    from packageurl import PackageURL
    from packaging.requirements import Requirement

    digest = HashType(alg=HashAlgorithm.SHA_256, content=record["sha256"])
    pin = record["stack"]["pin"]
    main = Component(
        name="vllm",
        version=record["version"],
        type=ComponentType.LIBRARY,
        bom_ref="vllm",
        purl=PackageURL("pypi", None, "vllm", record["version"]),
        hashes=[digest],
        licenses=[LicenseExpression("Apache-2.0")],
        pedigree=Pedigree(
            ancestors=[
                Component(
                    name="vllm",
                    version=pin["version"],
                    bom_ref=f"upstream-{pin['commit']}",
                    purl=PackageURL("pypi", None, "vllm", pin["version"]),
                    hashes=[HashType(alg=HashAlgorithm.SHA_256, content=record["sdist_sha256"])],
                )
            ],
            patches=[
                Patch(
                    type=PatchClassification.UNOFFICIAL,
                    diff=Diff(url=XsUri(f"patches/{p.name}.patch")),
                )
                for p in series
            ],
            notes=f"hipstack set {record['stack']['set_hash']}",
        ),
    )
    bom = Bom(serial_number=_serial(record["sha256"]))
    bom.metadata.component = main
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for line in sorted(set(metadata.get_all("Requires-Dist") or [])):
        requirement = Requirement(line)
        if requirement.marker and "extra" in str(requirement.marker):
            continue
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        component = Component(
            name=requirement.name,
            version=exact[0] if exact else None,
            bom_ref=line,
            purl=PackageURL("pypi", None, requirement.name.lower(), exact[0] if exact else None),
        )
        bom.components.add(component)
        bom.register_dependency(main, [component])
    document = json.loads(JsonV1Dot5(bom).output_as_string())
    document["metadata"].pop("timestamp", None)
    return to_json(document)


def _serial(digest: str) -> Any:
    from uuid import UUID

    return UUID(bytes=hashlib.sha256(digest.encode()).digest()[:16], version=4)


def publish(files: dict[str, Path | str], out: Path) -> None:
    """Put files into the output folder, each whole or not at all, and sum them up.

    ``SHA256SUMS`` covers every wheel and JSON file in the folder and is written last.

    Args:
        files: Name to content, or to a file whose content is taken.
        out: The output folder.

    Raises:
        StackError: The folder cannot be written or is full; no partial file is left.
    """
    temporary: list[Path] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            partial = out / f".{name}.part"
            temporary.append(partial)
            if isinstance(content, Path):
                shutil.copyfile(content, partial)
            else:
                partial.write_text(content)
        for name, partial in zip(files, list(temporary), strict=True):
            os.replace(partial, out / name)
        kept = sorted(
            p for p in out.iterdir() if p.suffix in (".whl", ".json") and p.name[0] != "."
        )
        sums = out / ".SHA256SUMS.part"
        temporary.append(sums)
        sums.write_text("".join(f"{source.sha256(p)}  {p.name}\n" for p in kept))
        os.replace(sums, out / "SHA256SUMS")
    except OSError as error:
        raise StackError(
            f"cannot write to {out}: {error.strerror}",
            "free some space there, or another --out",
        ) from None
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
