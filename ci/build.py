"""Turn the pinned vLLM and this patch stack into a ROCm wheel."""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import arches, envs, paths, pin, toml
from ci.errors import StackError
from ci.progress import Steps

EPILOG = """\
examples:
  ./build.sh --arch gfx1201                   a wheel for the RX 9070 and R9700 in dist/
  ./build.sh --arch gfx1100,gfx1151           one wheel for the 7900 XTX and Strix Halo
  ./build.sh --arch list                      the architectures, with the cards' names
  ./build.sh --arch gfx1201 --dry-run         only say what would be built
  ./build.sh --arch gfx1201 --until core/supports-chunk-lookback
                                              stop after that patch (to find a culprit)

compiled ops (--extensions):
  compile             vLLM's own HIP extensions, by a toolchain (below); about 25 minutes of
                      CPU for an architecture, and two thirds of it for each more
  precompiled=WHEEL   taken from a ROCm wheel of the same vLLM release
  none                the Python tree and what the stack itself compiles; says so
  auto                the first of these that this machine can do (the default); a ROCm
                      wheel of the release in vllm-src/ counts as precompiled

toolchains (--toolchain):
  host                the ROCm and the ROCm torch that are installed here (/opt/rocm,
                      ROCM_PATH or AMD's Python packages; HIPSTACK_PYTHON names another
                      interpreter)
  debian              neither is needed: a private root of Debian packages (1 GB in build/,
                      made once) with torch's headers made ROCm-compatible; wants root,
                      x86_64 Debian or Ubuntu (a container will do), 5 GB of disk and memory
  auto                host, else debian (the default)
  ccache is used in both (sccache, too, with host).  TRITON_KERNELS_SRC_DIR may name a copy
  of ROCm's triton_kernels, which the wheel of a debian toolchain otherwise lacks.

The build keeps what it makes in build/ and reuses it.  HIPSTACK_BUILD_DIR and
HIPSTACK_ENV_DIR move that folder and the Python environments in it.
"""
# What a build without compiled extensions needs at most, measured: environments 2.7 GB,
# trees 0.6 GB, the rest small.
NEEDED_BYTES = 4_000_000_000
WHEEL_BYTES = 64_000_000
# The lists of ci/aot/lists whose kernels every wheel carries, with the file that a tree must
# have for them: `--until` may leave out the patch that brings it.
KERNEL_LISTS = {
    "unified_attention": "vllm/v1/attention/ops/triton_unified_attention.py",
    "segmented_attention": "vllm/model_executor/warmup/rocm_segmented_attn_warmup.py",
}


@dataclass(frozen=True)
class Plan:
    """Everything that a build is determined by."""

    pin: pin.Pin
    stack_version: str
    arches: tuple[str, ...]
    series: Any
    extensions: Any
    source: str
    out: Path
    version: str
    wheel: str
    models: tuple[Any, ...] = ()

    def describe(self) -> str:
        """Return the plan as text."""
        cards = "\n".join(f"              {a:<9}{arches.ARCHES[a]}" for a in self.arches)
        stem = self.wheel.removesuffix(".whl")
        return (
            f"pin           vLLM {self.pin.version}, commit {self.pin.commit}\n"
            f"source        {self.source}\n"
            f"patches       {len(self.series)}, set {self.series.set_hash}\n"
            + "".join(f"              {name}\n" for name in self.series.names)
            + f"arches        {len(self.arches)}\n{cards}\n"
            f"extensions    {self.extensions.mode}: {self.extensions.reason}\n"
            + "".join(f"kernels for   {model.describe()}\n" for model in self.models)
            + f"makes         {self.out}/{self.wheel}\n"
            f"              {self.out}/{stem}.build.json\n"
            f"              {self.out}/{stem}.cdx.json\n"
            f"              {self.out}/SHA256SUMS"
        )


def stack_version() -> str:
    """Return the stack's own version, from pyproject.toml."""
    return str(toml.read(paths.ROOT / "pyproject.toml")["project"]["version"])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of ``build.sh``."""
    parser = argparse.ArgumentParser(
        prog="./build.sh",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", metavar="GFX[,GFX]", help="architectures to build for, or `list`")
    parser.add_argument(
        "--extensions", default="auto", metavar="MODE", help="how compiled ops come in (below)"
    )
    parser.add_argument(
        "--toolchain", default="auto", choices=("auto", "host", "debian"),
        help="what compiles them: an installed ROCm, a private root of Debian packages, or "
        "the first of these that this machine can do (the default)",
    )  # fmt: skip
    parser.add_argument(
        "--mirror", metavar="URL",
        help="Debian mirror for --toolchain debian (default: the one this machine's apt uses)",
    )  # fmt: skip
    parser.add_argument(
        "--source", default="sdist", metavar="WHAT",
        help="sdist (package index, default), git (clone), or a path to an sdist or tree",
    )  # fmt: skip
    parser.add_argument(
        "--model-config", action="append", default=[], metavar="CONFIG[:OPTIONS]",
        help="also compile attention kernels for this model's config.json; options by colons: "
        "tp=1,2 kv=auto,fp8 page=16,1056; may be repeated",
    )  # fmt: skip
    parser.add_argument("--until", metavar="PATCH", help="apply the series only up to this patch")
    parser.add_argument("--pin", help="which pin of vllm-src/pin.toml (default: the current)")
    parser.add_argument("--jobs", type=int, help="compile jobs (default: by CPUs and memory)")
    parser.add_argument("--out", default="dist", metavar="DIR", help="where the wheel goes (dist/)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--quiet", action="store_true", help="print only the wheel's path")
    return parser.parse_args(argv)


def make_plan(args: argparse.Namespace) -> Plan:
    """Decide everything before anything is built.

    Raises:
        StackError: The command line or the machine does not allow it.
    """
    from ci import extensions, patches, wheel
    from ci import source as sources
    from ci.aot import AotError, models

    if not args.arch:
        raise StackError("--arch is missing", "--arch gfx1201, or --arch list")
    if args.jobs is not None and args.jobs < 1:
        raise StackError("--jobs must be at least 1")
    the_pin = pin.load(args.pin)
    _check_python(the_pin)
    names = arches.parse(args.arch)
    series = patches.load().until(args.until)
    decided = extensions.decide(
        args.extensions, the_pin.version, the_pin.torch, names, args.toolchain, args.mirror
    )
    version = wheel.local_version(the_pin, stack_version(), names)
    cwd = paths.CWD
    source = args.source
    if source not in ("sdist", "git"):
        source = str(sources.named_path(source, cwd))
    try:
        chosen = tuple(models.from_argument(text, cwd) for text in args.model_config)
    except AotError as error:
        raise StackError(f"--model-config: {error}") from None
    out = paths.DIST if args.out == "dist" else (cwd / args.out).resolve()
    return Plan(
        pin=the_pin,
        stack_version=stack_version(),
        arches=names,
        series=series,
        extensions=decided,
        source=source,
        out=out,
        version=version,
        wheel=f"vllm-{version}-{wheel_tag(decided)}.whl",
        models=chosen,
    )


def wheel_tag(extensions: Any) -> str:
    """Return the compatibility tag of a wheel, from how its compiled ops come in."""
    from ci.rocm.toolchain import PLATFORM

    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    abi = "abi3" if extensions.mode == "compile" else python
    here = f"linux_{os.uname().machine}"
    return f"{python}-{abi}-{PLATFORM if extensions.toolchain == 'debian' else here}"


def _check_python(the_pin: pin.Pin) -> None:
    here = sys.version_info[:2]
    for bound in the_pin.python:
        operator, numbers = bound[:2].rstrip("0123456789"), bound.lstrip("<>=")
        value = tuple(int(n) for n in numbers.split("."))
        fits = here >= value if operator == ">=" else here < value
        if not fits:
            raise StackError(
                f"Python {here[0]}.{here[1]} does not fit, vLLM {the_pin.version} wants {bound}"
            )


def check_machine(plan: Plan) -> None:
    """Fail before any work when there is no room for the result.

    Raises:
        StackError: A folder cannot be written or is too full; says what is needed.
    """
    for folder, needed in ((paths.BUILD, NEEDED_BYTES), (plan.out, WHEEL_BYTES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise StackError(
                f"cannot write to {folder}: {error.strerror}",
                "another --out" if folder == plan.out else "another HIPSTACK_BUILD_DIR",
            ) from None
        if folder == paths.BUILD and any(
            paths.ENVS.glob(f"env-{plan.pin.version}-*/.hipstack-stamp")
        ):
            needed = 1_000_000_000
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise StackError(
                f"{folder} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are needed",
                "free some space, or another --out / HIPSTACK_BUILD_DIR",
            )


def default_jobs(memory_gb: float | None = None, cpus: int | None = None) -> int:
    """Return how many compile jobs fit: one a CPU, and 5 GB of memory each.

    vLLM's largest HIP file takes 4.9 GB to compile (skinny_gemms_int4, ROCm 7.2.4).
    """
    cpus = cpus or len(os.sched_getaffinity(0))
    if memory_gb is None:
        memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return max(1, min(cpus, int(memory_gb // 5)))


def inputs_hash(plan: Plan, env_python: Path) -> str:
    """Digest all that determines the wheel, to know whether one that exists is valid."""
    from ci import source

    digest = hashlib.sha256()
    facts = [
        plan.pin.tree_sha256, plan.series.set_hash, plan.version, plan.wheel,
        plan.extensions.mode, plan.extensions.reason, plan.extensions.hip,
        plan.extensions.toolchain, plan.extensions.mirror,
        repr(plan.models),
        source.sha256(plan.extensions.wheel) if plan.extensions.wheel else "",
        (env_python.parent.parent / ".hipstack-stamp").read_text(),
    ]  # fmt: skip
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    for path in sorted((paths.ROOT / "ci").rglob("*")):
        if (path.is_file() and path.suffix in (".py", ".toml", ".txt")) or path.name == "quiltrc":
            digest.update(path.relative_to(paths.ROOT).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()


def valid_wheel(plan: Plan, inputs: str) -> bool:
    """Say whether the output folder already holds exactly what would be built."""
    from ci import source

    record_file = plan.out / f"{plan.wheel.removesuffix('.whl')}.build.json"
    try:
        record = json.loads(record_file.read_text())
        return bool(
            record["inputs"] == inputs
            and source.sha256(plan.out / plan.wheel) == record["sha256"]
            and (plan.out / f"{plan.wheel.removesuffix('.whl')}.cdx.json").is_file()
            and record["sha256"] in (plan.out / "SHA256SUMS").read_text()
        )
    except (OSError, ValueError, KeyError):
        return False


def toolchain(env_python: Path, plan: Plan) -> dict[str, str]:
    """Return the versions of what the wheel was made with."""
    from ci.run import run

    code = (
        "import sys,json;from importlib.metadata import version as v;"
        "print(json.dumps({n:v(n) for n in ('setuptools','setuptools-rust','setuptools-scm',"
        "'wheel','torch','triton')}|{'python':sys.version.split()[0]}))"
    )
    found: dict[str, str] = json.loads(run([str(env_python), "-c", code]).splitlines()[-1])
    found["quilt"] = run(["quilt", "--version"]).strip()
    if plan.extensions.toolchain == "host":
        hipcc = plan.extensions.rocm / "bin" / "hipcc"
        found["hipcc"] = run([str(hipcc), "--version"]).splitlines()[0]
        found["rocm"] = plan.extensions.hip
    return found


def patched_tree(plan: Plan, base: Path) -> Path:
    """Return the pin with the series applied, made once and verified when reused."""
    from ci import gitstack, source, tree

    key = f"{plan.pin.tree_sha256[:12]}-{plan.series.set_hash[:12]}"
    folder = paths.BUILD / f"tree-{key}"
    stamp, result = folder / "digest", folder / "vllm-src"
    if stamp.is_file() and result.is_dir() and source.tree_digest(result) == stamp.read_text():
        return result
    gitstack.remove_tree(folder)
    with tempfile.TemporaryDirectory(dir=paths.BUILD, prefix=".apply-") as scratch:
        work = Path(scratch) / "work"
        work.mkdir()
        gitstack.copy_tree(base, work / "vllm-src")
        tree.apply(work / "vllm-src", plan.series, Path(scratch) / "patches")
        (work / "digest").write_text(source.tree_digest(work / "vllm-src"))
        os.rename(work, folder)
    return result


@dataclass(frozen=True)
class Kernels:
    """Ahead-of-time compiled kernels for a wheel."""

    folder: Path
    objects: tuple[dict[str, Any], ...]
    manifest_sha256: str
    lists: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all code objects."""
        return sum(path.stat().st_size for path in self.folder.glob("*/*.hsaco"))

    def record(self) -> dict[str, Any]:
        """Return what the build record says about them."""
        return {
            "lists": list(self.lists),
            "models": list(self.models),
            "code_objects": len(self.objects),
            "bytes": self.size,
            "manifest_sha256": self.manifest_sha256,
        }


def compile_kernels(
    plan: Plan, patched: Path, env_python: Path, jobs: int, progress: Callable[[str], None]
) -> Kernels:
    """Compile the kernel lists for the plan's architectures, or reuse what fits."""
    from ci import aot, source

    names = [name for name, file in KERNEL_LISTS.items() if (patched / file).is_file()]
    digest = hashlib.sha256()
    for path in sorted((paths.ROOT / "ci" / "aot").rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update("\0".join([*names, *plan.arches, plan.series.set_hash]).encode())
    digest.update(repr(plan.models).encode())
    digest.update((env_python.parent.parent / ".hipstack-stamp").read_bytes())
    folder = paths.BUILD / f"kernels-{digest.hexdigest()[:16]}"
    lists = list(names)
    if plan.models:
        if "segmented_attention" not in names:
            raise StackError("--model-config needs the patches up to attention/segmented-warmup")
        lists.append(str(write_model_list(plan.models)))
    if not (folder / "manifest.json").is_file() or aot.verify_manifest(folder):
        aot.compile_list(
            patched, lists, plan.arches, folder, jobs,
            cache=paths.BUILD / "triton-cache", python=str(env_python),
            progress=progress,
        )  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    return Kernels(
        folder,
        tuple(manifest["objects"]),
        source.sha256(folder / "manifest.json"),
        tuple(names),
        tuple(model.describe() for model in plan.models),
    )


def write_model_list(models: Sequence[Any]) -> Path:
    """Write the kernel list of models that the command line named; return its path."""
    text = f"""\
from ci.aot.lists.segmented_attention import kernel_list
from ci.aot.models import Model

LIST = kernel_list("command_line", {tuple(models)!r})
"""
    folder = paths.BUILD / "lists"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"models_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    path.write_text(text)
    return path


def build(plan: Plan, jobs: int, steps: Steps) -> Path:
    """Carry out a plan.

    Args:
        plan: The plan.
        jobs: Parallel jobs.
        steps: Progress and log.

    Returns:
        The wheel in the output folder.

    Raises:
        StackError: A step failed.
    """
    from ci import check, tree, wheel
    from ci.rocm import proof as rocm_proof
    from ci.rocm import toolchain as rocm

    os.umask(0o022)  # modes end up in the wheel
    with steps.step("machine") as note:
        check_machine(plan)
        note.append(f"quilt {tree.ensure_quilt()}, {jobs} jobs")
    with steps.step("source") as note:
        base = check.pristine(plan.pin, plan.source)
        note.append(f"vLLM {plan.pin.version}, digest as pinned")
    with steps.step("series") as note:
        if problems := plan.series.problems():
            raise StackError(problems[0])
        patched = patched_tree(plan, base)
        note.append(f"{len(plan.series)} patches without fuzz or offset")
    with steps.step("environment") as note:
        env_python = envs.ensure_env(plan.pin, patched)
        note.append(str(env_python.parent.parent))
    inputs = inputs_hash(plan, env_python)
    result = plan.out / plan.wheel
    if valid_wheel(plan, inputs):
        steps.say(f"unchanged: {result} was built from the same inputs and is intact")
        return result
    with steps.step("kernels") as note:
        kernels = compile_kernels(plan, patched, env_python, jobs, steps.tick)
        note.append(f"{len(kernels.objects)} code objects, {kernels.size / 1e6:.1f} MB")
    ready = None
    if plan.extensions.mode == "compile":
        with steps.step("toolchain") as note:
            ready = rocm.prepare(plan.pin, plan.extensions, env_python, plan.arches)
            note.append(ready.describe())
    stack = wheel.stack_record(
        plan.pin,
        plan.stack_version,
        plan.series,
        plan.arches,
        plan.extensions.mode,
        ready.facts["hip"] if ready else "",
    )
    with contextlib.ExitStack() as scratch:
        work = Path(
            scratch.enter_context(tempfile.TemporaryDirectory(dir=paths.BUILD, prefix=".wheel-"))
        )
        place = scratch.enter_context(ready.work(work)) if ready else work
        with steps.step("wheel") as note:
            made = wheel.build(
                patched, env_python, plan.version, stack, plan.extensions,
                kernels.folder, jobs, steps.log, place, ready, steps.tick,
            )  # fmt: skip
            note.append(f"{made.name}, {made.stat().st_size / 1e6:.1f} MB")
        with steps.step("proof") as note:
            proof = wheel.prove(
                made, plan.version, plan.series, patched, plan.arches, plan.extensions,
                [work, paths.BUILD],
            )  # fmt: skip
            for problem in proof.problems:
                steps.say(f"  problem: {problem}")
            if proof.problems:
                raise StackError(f"the wheel fails its proof: {proof.problems[0]}")
            seen = wheel.prove_import(made, plan.version, env_python, paths.STANDIN, plan.arches)
            compiled = None
            if ready:
                compiled = rocm_proof.prove(made, plan.version, patched, plan.arches, ready, place)
                for problem in compiled.problems:
                    steps.say(f"  problem: {problem}")
                if compiled.problems:
                    raise StackError(f"the wheel fails its proof: {compiled.problems[0]}")
                note.append(compiled.describe())
            note.append(f"{proof.files} files, {len(proof.code_objects)} with GPU code")
            note.append(f"imported as `{seen}`")
        with steps.step("records") as note:
            record = wheel.build_record(
                made, plan.version, plan.pin, stack, plan.extensions, proof,
                toolchain(env_python, plan), kernels.record(), inputs,
            )  # fmt: skip
            if ready and compiled:
                record["compiled"] = {"toolchain": ready.facts, "proof": compiled.facts}
            stem = made.name.removesuffix(".whl")
            wheel.publish(
                {
                    made.name: made,
                    f"{stem}.build.json": wheel.to_json(record),
                    f"{stem}.cdx.json": wheel.sbom(made, record, plan.series),
                },
                plan.out,
            )
            note.append("SHA256SUMS, build record, SBOM")
    return plan.out / made.name


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Keep a second build out of the build folder."""
    from filelock import FileLock, Timeout

    paths.BUILD.mkdir(parents=True, exist_ok=True)
    lock = FileLock(paths.BUILD / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StackError(
            f"another build is at work in {paths.BUILD}", "wait for it, or HIPSTACK_BUILD_DIR"
        ) from None
    try:
        yield
    finally:
        lock.release()


def summary(plan: Plan, result: Path) -> str:
    """Return what the build ends with."""
    from ci.extensions import ABSENT

    record = json.loads((plan.out / f"{result.name.removesuffix('.whl')}.build.json").read_text())
    rows = "\n".join(
        f"              {arch}: {sum(arch in names for names in record['code_objects'].values())}"
        " files hold code for it"
        for arch in plan.arches
    )
    absent = f"\n  NOTE: {ABSENT}" if plan.extensions.mode == "none" else ""
    return (
        f"\n{result}\n"
        f"  version     {plan.version}\n"
        f"  sha256      {record['sha256']}\n"
        f"  patches     {len(plan.series)}, set {plan.series.set_hash[:12]}\n"
        f"  extensions  {plan.extensions.mode} ({plan.extensions.reason})\n"
        f"  GPU code\n{rows}{absent}\n"
        f"  install     pip install --no-deps --force-reinstall {result}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``build.sh``; return the exit code."""
    args = parse_arguments(argv)
    if args.arch == "list":
        print(arches.listing())
        return 0
    steps: Steps | None = None
    try:
        if args.arch:
            arches.parse(args.arch)  # the commonest mistake: say so before anything else
        envs.reexec_in_tools("ci.build", sys.argv[1:] if argv is None else argv)
        plan = make_plan(args)
        if args.dry_run:
            print(plan.describe())
            return 0
        count = 9 if plan.extensions.mode == "compile" else 8
        steps = Steps(
            count, paths.BUILD / "logs" / f"build-{'-'.join(plan.arches)}.log", args.quiet
        )
        with only_one():
            result = build(plan, args.jobs or default_jobs(), steps)
        print(str(result) if args.quiet else summary(plan, result))
        return 0
    except (StackError, OSError) as problem:
        error = problem if isinstance(problem, StackError) else StackError(str(problem))
        print(steps.fail(error) if steps else f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is kept in build/ and reused", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
