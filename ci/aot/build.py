"""Compile lists for architectures, verify the result, put it into a package."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ci import codeobjects, paths
from ci.aot import driver, lists
from ci.aot.model import MANIFEST_NAME, AotError, KernelObject, Manifest, valid_arch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent

# Where the code lies inside the wheel, below the package ``vllm``: data of that package, found at
# run time through the package's own path, one folder an architecture so that a multi-architecture
# wheel can be listed and thinned by folder.
WHEEL_FOLDER = "hipstack/aot"

# Line information would put the tree's path into the code objects. Triton counts the variable as
# part of its cache key although it changes no instruction; this is how it reports it.
_ENVIRONMENT = {"TRITON_DISABLE_LINE_INFO": "true"}

# Variables that steer Triton, LLVM, vLLM or device detection: never taken over from outside.
_DROPPED = (
    "ALLOW_LHS_TMEM",
    "AMDGCN_",
    "CUDA_",
    "DISABLE_",
    "FAKE_",
    "GPU_",
    "HIP_",
    "LLVM_",
    "MLIR_",
    "NVPTX_",
    "PYTHON",
    "ROCR_",
    "TRITON_",
    "USE_IR_LOC",
    "VLLM_",
)


def compile_list(
    tree: Path,
    list_names: Sequence[str],
    arches: Sequence[str],
    out: Path,
    jobs: int = 1,
    *,
    cache: Path | None = None,
    python: str = sys.executable,
    progress: Callable[[str], None] | None = None,
    target: str | None = None,
) -> Manifest:
    """Compile kernel lists of a vLLM tree.

    Args:
        tree: The root of the tree, the folder that holds ``vllm/``. Nothing is written to it.
        list_names: Names of lists, or paths of list files.
        arches: Architectures without features, such as ``gfx1201``.
        out: The folder to make. An earlier result there is replaced, anything else is refused.
        jobs: Processes at a time.
        cache: A folder for Triton's cache, which a later run reuses; by default a temporary one.
        python: The interpreter to compile with; its environment holds torch, triton and what
            vLLM imports.
        progress: Called with ``<arch> <list>/<variant>`` when a variant is compiled.
        target: Another target than the architecture's own, such as ``cuda:90``, for tests on a
            GPU that is not AMD's: vLLM still believes in the one architecture that is named.

    Returns:
        The manifest that was written to ``out``.

    Raises:
        AotError: Anything went wrong; ``out`` is then as it was before.
    """
    tree, out = Path(tree).resolve(), Path(out).resolve()
    arches = _checked_request(tree, list_names, arches, out)
    if target is not None and len(arches) > 1:
        raise AotError(f"with the target {target} only one architecture can be named")
    compiled_for = [str(driver.target_of(arch, target).arch) for arch in arches]
    definitions = _definitions(list_names)
    shares = max(1, jobs // len(arches))
    work = [(arch, share) for arch in arches for share in range(shares)]
    with tempfile.TemporaryDirectory(prefix="hipstack-aot-") as temporary:
        scratch = Path(temporary)
        names = [str(Path(name).resolve()) if name.endswith(".py") else name for name in list_names]

        running = _Running()

        def run(task: tuple[str, int]) -> dict[str, Any]:
            arch, share = task
            code = scratch / f"{arch}-{share}"
            code.mkdir()
            job = {
                "arch": arch,
                "target": target,
                "lists": names,
                "share": share,
                "shares": shares,
                "environment": _ENVIRONMENT,
                "out": str(code),
            }
            environment = _environment(tree, arch, scratch, cache)
            return _run_worker(job, environment, python, progress, running)

        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                results = list(pool.map(run, work))
            except BaseException:
                # The other workers' results are of no use any more.
                running.stop()
                raise
        manifest = _merge(results, definitions, compiled_for)
        with _replaced_folder(out) as stage:
            for item in manifest.objects:
                (stage / item.arch).mkdir(exist_ok=True)
                source = next(scratch.glob(f"*/{Path(item.file).name}"))
                shutil.copyfile(source, stage / item.file)
            (stage / MANIFEST_NAME).write_text(manifest.dumps())
            _require_valid(stage)
    return manifest


def verify_manifest(folder: Path) -> list[str]:
    """Check a result folder: manifest, hashes, code objects, and that nothing else lies there.

    Args:
        folder: The folder with ``manifest.json``.

    Returns:
        One sentence per problem; empty if all is as it was compiled.
    """
    folder = Path(folder)
    try:
        manifest = Manifest.load(folder)
    except AotError as error:
        return [str(error)]
    problems = []
    for item in manifest.objects:
        if item.id != item.identity(manifest.triton, manifest.environment):
            problems.append(f"{item.file}: the id does not fit what it stands for")
        if item.arch not in manifest.arches:
            problems.append(f"{item.file}: {item.arch} is not one of the manifest's architectures")
        problems += _file_problems(folder, item)
    listed = [item.file for item in manifest.objects]
    problems += [f"{file}: listed twice" for file in sorted(set(listed)) if listed.count(file) > 1]
    for arch in manifest.arches:
        if not any(item.arch == arch for item in manifest.objects):
            problems.append(f"no object for {arch}")
    expected = {MANIFEST_NAME, *listed}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name not in expected:
            problems.append(f"{name}: not in the manifest")
    return problems


def verify_wheel(wheel: Path, arches: Sequence[str]) -> list[str]:
    """Check the ahead-of-time code inside a wheel.

    Args:
        wheel: The wheel file.
        arches: The architectures that it was built for.

    Returns:
        One sentence per problem; empty if the wheel holds a valid result for exactly ``arches``.
    """
    prefix = f"vllm/{WHEEL_FOLDER}/"
    try:
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as temporary:
            names = [name for name in archive.namelist() if name.startswith(prefix)]
            archive.extractall(temporary, names)
            folder = Path(temporary, prefix)
            problems = verify_manifest(folder)
            if not problems and (built := Manifest.load(folder).arches) != tuple(
                sorted(set(arches))
            ):
                problems.append(f"is for {', '.join(built)}, asked for {', '.join(arches)}")
            return [problem.replace(f"{temporary}/", "") for problem in problems]
    except (OSError, zipfile.BadZipFile) as error:
        return [f"{wheel}: not a readable wheel: {error}"]


def install_into(package_dir: Path, out: Path) -> Path:
    """Put a result into the package folder that becomes the wheel.

    Args:
        package_dir: The folder of the package ``vllm``.
        out: A folder made by :func:`compile_list`.

    Returns:
        The folder in the package, ``<package_dir>/hipstack/aot``. What was there is replaced.

    Raises:
        AotError: ``package_dir`` is no package, or ``out`` does not verify.
    """
    package_dir, out = Path(package_dir).resolve(), Path(out)
    if not (package_dir / "__init__.py").is_file():
        raise AotError(f"{package_dir} is not the folder of a Python package")
    _require_valid(out)
    manifest = Manifest.load(out)
    target = package_dir / WHEEL_FOLDER
    target.parent.mkdir(exist_ok=True)
    with _replaced_folder(target) as stage:
        for name in (MANIFEST_NAME, *(item.file for item in manifest.objects)):
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(out / name, stage / name)
        _require_valid(stage)
    return target


def _checked_request(
    tree: Path, list_names: Sequence[str], arches: Sequence[str], out: Path
) -> list[str]:
    """Refuse what cannot work before anything is started; return the distinct arches, sorted."""
    if not (tree / "vllm" / "__init__.py").is_file():
        raise AotError(f"{tree} is not a vLLM source tree (no vllm/__init__.py)")
    if not list_names or not arches:
        raise AotError("name at least one kernel list and one architecture")
    for arch in arches:
        if not valid_arch(arch):
            raise AotError(f"{arch!r} is not the name of an architecture (such as gfx1201)")
        if arch not in codeobjects.KNOWN_ARCHES:
            raise AotError(f"no architecture {arch} is known")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise AotError(f"{out} is not a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST_NAME).is_file():
        raise AotError(f"{out} holds other files; name a new folder or an earlier result")
    return sorted(set(arches))


def _definitions(list_names: Sequence[str]) -> dict[str, str]:
    """The lists' own names with the sha256 of their definitions."""
    result: dict[str, str] = {}
    for name in list_names:
        kernels, sha256 = lists.load(name)
        if kernels.name in result:
            raise AotError(f"two kernel lists are named {kernels.name}")
        result[kernels.name] = sha256
    return result


def _environment(tree: Path, arch: str, scratch: Path, cache: Path | None) -> dict[str, str]:
    """The worker's environment: nothing that steers a compilation comes from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    # vLLM asks for its own version while it detects the platform, and "cpu" in it would decide.
    metadata = scratch / "metadata"
    info = metadata / "vllm-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0+aot\n")
    return {
        **kept,
        **_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(map(str, (metadata, paths.STANDIN, tree, _ROOT))),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_CACHE_DIR": str((cache or scratch / "cache").resolve()),
        "FAKE_GFX": arch,
        # Set but empty: vLLM then keeps Triton although there is no active GPU driver.
        "HIP_VISIBLE_DEVICES": "",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "VLLM_CONFIG_ROOT": str(scratch / "vllm"),
        "HF_HUB_OFFLINE": "1",
    }


class _Running:
    """The worker processes of one compilation, to be stopped together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._stopped = False

    def add(self, process: subprocess.Popen[str]) -> None:
        """Take note of a process; end it at once if the others were stopped already."""
        with self._lock:
            self._processes.append(process)
            if self._stopped:
                process.terminate()

    def stop(self) -> None:
        """End all processes, also those that are yet to come."""
        with self._lock:
            self._stopped = True
            for process in self._processes:
                if process.poll() is None:
                    process.terminate()


def _run_worker(
    job: dict[str, Any],
    environment: Mapping[str, str],
    python: str,
    progress: Callable[[str], None] | None,
    running: _Running,
) -> dict[str, Any]:
    log = Path(job["out"]) / "stderr.txt"
    with log.open("w") as stderr:
        try:
            process = subprocess.Popen(
                [python, "-m", "ci.aot.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                cwd=job["out"],
                text=True,
            )
        except OSError as error:
            raise AotError(f"{python}: {error.strerror or error}") from error
    running.add(process)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:
            json.dump(job, stream)
        for line in process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise AotError(answer["error"])
            if "result" in answer:
                result: dict[str, Any] = answer["result"]
                return result
            if progress is not None:
                progress(answer["done"])
    lines = log.read_text(errors="replace").strip().splitlines()
    raise AotError(
        f"the compilation for {job['arch']} ended with status {process.returncode}: "
        f"{lines[-1] if lines else 'no message'}"
    )


def _merge(
    results: list[dict[str, Any]], definitions: Mapping[str, str], arches: Sequence[str]
) -> Manifest:
    """Join the workers' answers; objects that several of them made must be the same."""
    objects: dict[str, KernelObject] = {}
    for result in results:
        if result["triton"] != results[0]["triton"]:
            raise AotError("Triton changed while it was used")
        for data in result["objects"]:
            item = KernelObject.from_json(data)
            if known := objects.get(item.id):
                if known.sha256 != item.sha256:
                    raise AotError(f"{item.kernel} for {item.arch} compiled to two different files")
                item = replace(item, variants=known.variants + item.variants)
            objects[item.id] = item
    ordered = [
        replace(item, variants=tuple(sorted(set(item.variants)))) for item in objects.values()
    ]
    return Manifest(
        triton=results[0]["triton"],
        environment=_ENVIRONMENT,
        lists=dict(definitions),
        arches=tuple(arches),
        objects=tuple(sorted(ordered, key=lambda item: (item.arch, item.kernel, item.id))),
    )


def _file_problems(folder: Path, item: KernelObject) -> list[str]:
    path = folder / item.file
    if path.is_symlink() or not path.is_file():
        return [f"{item.file}: missing"]
    data = path.read_bytes()
    if len(data) != item.size or hashlib.sha256(data).hexdigest() != item.sha256:
        return [f"{item.file}: was changed"]
    if item.target["backend"] != "hip":
        return []
    try:
        found = codeobjects.scan_bytes(item.file, data)
    except codeobjects.CodeObjectError as error:
        return [str(error)]
    problems = codeobjects.check_arches(found, [item.arch])
    if len(found) != 1 or found[0].kernels != 1:
        problems.append(f"{item.file}: is not one code object with one kernel")
    symbol = f"{item.metadata.get('name')}.kd".encode()
    if symbol not in data:
        problems.append(f"{item.file}: does not define {item.metadata.get('name')}")
    return problems


def _require_valid(folder: Path) -> None:
    if problems := verify_manifest(folder):
        raise AotError("; ".join(problems))


@contextlib.contextmanager
def _replaced_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder to fill that takes the target's place if all went well."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise AotError(f"{target}: {error.strerror or error}") from error
    content, old = stage / "new", stage / "old"
    try:
        content.mkdir()
        yield content
        if target.exists():
            target.rename(old)
        content.rename(target)
    except OSError as error:
        raise AotError(f"{target}: {error.strerror or error}") from error
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(stage, ignore_errors=True)
