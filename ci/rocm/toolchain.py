"""A toolchain that is ready to compile with, and how setup.py is run with it."""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci import paths
from ci.errors import StackError
from ci.extensions import Extensions
from ci.gitstack import remove_tree
from ci.pin import Pin
from ci.rocm import debian, python, stubs
from ci.run import run

# Where things are inside the root.
WORK = "/hipstack/build"
NO_TRITON_KERNELS = "/hipstack/no-triton-kernels"
# What the root's libraries are linked for (debian.toml), as PEP 600 names it: glibc 2.35 and
# GLIBCXX 3.4.30, so Ubuntu 22.04 and 24.04, Debian 12 and 13.
PLATFORM = "manylinux_2_35_x86_64"


@dataclass(frozen=True)
class Ready:
    """A toolchain that is ready.

    Attributes:
        python: The interpreter that runs setup.py, inside the root where there is one.
        rocm: ROCm's prefix, likewise.
        env: Variables for it.
        root: The private root, or None for the machine's own ROCm.
        facts: What the build record says.
    """

    python: str
    rocm: str
    env: dict[str, str]
    root: debian.Root | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def work(self, otherwise: Path) -> Iterator[Path]:
        """Give an empty folder to build in, as this machine sees it.

        In a root it has a fixed path, so that its name in compiled files is the same
        wherever the root is.
        """
        if self.root is None:
            yield otherwise
            return
        folder = self.root.path / WORK[1:]
        remove_tree(folder)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            remove_tree(folder)

    def describe(self) -> str:
        """Return the toolchain in one line."""
        if self.root is None:
            return f"ROCm at {self.rocm}"
        return (
            f"{self.facts['compiler']}, HIP {self.facts['hip']}, "
            f"{len(self.root.packages)} Debian packages in {self.root.path.name}"
        )

    def inner(self, path: Path) -> str:
        """Return a path as setup.py sees it."""
        return f"/{path.relative_to(self.root.path)}" if self.root else str(path)

    def wheel_command(self, words: Sequence[str]) -> list[str]:
        """Return the call of setup.py for a wheel with an honest tag.

        All of vLLM's extensions keep to Python's stable ABI; that of the interpreter at
        hand decides which of them are built.
        """
        ask = [self.python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"]
        version = run(self.command(ask, self.place(), self.env)).strip()
        tags = ["--py-limited-api", version]
        if self.root:
            tags += ["--plat-name", PLATFORM]
        return [self.python, *words, *tags]

    def check_arches(self, arches: Sequence[str]) -> None:
        """Refuse an architecture that the root's compiler does not know.

        Raises:
            StackError: There is one.
        """
        words = [self.env["CC"], "--target=amdgcn-amd-amdhsa", "-mcpu=help", "-S", "-x", "c"]
        said = run(self.command([*words, "/dev/null", "-o", "-"], self.place(), self.env))
        known = set(re.findall(r"\bgfx[0-9a-f]+\b", said))
        if unknown := [arch for arch in arches if arch not in known]:
            raise StackError(
                f"the compiler of the root ({self.facts['compiler']}) does not know "
                f"{', '.join(unknown)}",
                "another --arch, or --toolchain host with a newer ROCm",
            )

    def place(self) -> Path:
        """Return the root's own folder, or this machine's."""
        return self.root.path if self.root else Path("/")

    def objdump(self) -> list[str] | None:
        """Return the command of an llvm-objdump, or None where there is none."""
        if self.root:
            program = f"/usr/lib/llvm-{self.root.llvm}/bin/llvm-objdump"
            return debian.inside(self.root.path, "/tmp", [program], self.env)
        for folder in ("llvm/bin", "lib/llvm/bin"):
            program = str(Path(self.rocm, folder, "llvm-objdump"))
            if Path(program).exists():
                return [program]
        return None

    def _torch_lib(self) -> Path:
        """Return torch's folder of libraries, as this machine sees it."""
        if self.root:
            site = next((self.root.path / str(python.ENV)[1:]).glob("lib/python3*/site-packages"))
            return site / "torch" / "lib"
        code = "import os, torch; print(os.path.join(os.path.dirname(torch.__file__), 'lib'))"
        return Path(run([self.python, "-c", code], cwd=Path("/")).splitlines()[-1])

    def libraries(self) -> dict[str, Path]:
        """Return the libraries that define what extensions use, by name.

        Of a ROCm torch these are all; where torch is a CPU build, symbols.toml has the rest.
        """
        torch = self._torch_lib()
        found = {
            p.name: p for p in torch.glob("lib*.so") if p.name in ("libc10.so", "libtorch_cpu.so")
        }
        if self.root is None:
            found |= {p.name: p for p in torch.glob("lib*hip*.so")}
            hip = next(Path(self.rocm, "lib").glob("libamdhip64.so"), None)
            return found | ({hip.name: hip} if hip else {})
        system = self.root.path / "usr" / "lib" / "x86_64-linux-gnu"
        found["libamdhip64.so.7"] = system / "libamdhip64.so.7"
        old = self.root.path / "opt" / "sysroot"
        for name in ("libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"):
            found[name] = old / "lib" / "x86_64-linux-gnu" / name
        found["libstdc++.so.6"] = old / "usr" / "lib" / "x86_64-linux-gnu" / "libstdc++.so.6"
        return found

    def standins(self) -> list[str]:
        """Return the stand-in libraries to load before extensions, dependencies first."""
        if self.root is None:
            return []
        return [self.inner(self._torch_lib() / library.name) for library in stubs.load()]

    def command(self, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> list[str]:
        """Return a command that runs in the toolchain's environment."""
        if self.root is None:
            return list(words)
        return debian.inside(self.root.path, self.inner(cwd), words, env)


def prepare(pin: Pin, extensions: Extensions, env_python: Path, arches: Sequence[str]) -> Ready:
    """Make the toolchain that was decided on ready.

    Args:
        pin: The pin.
        extensions: The decision.
        env_python: Interpreter of the environment with the CPU torch.
        arches: The architectures to compile for.

    Raises:
        StackError: Something cannot be had, or the compiler does not know an architecture.
    """
    if extensions.toolchain == "debian":
        ready = prepare_debian(pin, extensions.mirror, env_python)
        ready.check_arches(arches)
        return ready
    assert extensions.rocm is not None
    kernels = triton_kernels(None, os.environ.get("TRITON_KERNELS_SRC_DIR"))
    env = {"ROCM_PATH": str(extensions.rocm)}
    if kernels:
        env["TRITON_KERNELS_SRC_DIR"] = kernels
    facts = {"toolchain": "host", "hip": extensions.hip, "reason": extensions.reason}
    return Ready(extensions.python, str(extensions.rocm), env, None, facts)


def prepare_debian(pin: Pin, mirror: str, env_python: Path) -> Ready:
    """Make the root ready: packages, interpreter, torch.

    Args:
        pin: The pin.
        mirror: The Debian mirror.
        env_python: Interpreter of the environment with the CPU torch.

    Raises:
        StackError: Something cannot be had; nothing half-made is left.
    """
    root = debian.ensure(mirror)
    stamp = hashlib.sha256((env_python.parent.parent / ".hipstack-stamp").read_bytes())
    for name in ("python.py", "torchhip.py", "stubs.py", "symbols.toml", "toolchain.py"):
        stamp.update((paths.ROOT / "ci" / "rocm" / name).read_bytes())
    text = stamp.hexdigest()
    ready = root.path / "opt" / "env" / "torch-is-rocm"
    llvm = f"/usr/lib/llvm-{root.llvm}/bin"
    env = {
        "PATH": f"{python.ENV}/bin:{llvm}:/usr/bin:/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "CC": f"{llvm}/clang",
        "CXX": f"{llvm}/clang++",
        "ROCM_PATH": "/opt/rocm",
        "HIP_CLANG_PATH": llvm,
        "CCACHE_DIR": debian.CACHE,
        "CCACHE_COMPILERCHECK": "content",
        "CCACHE_MAXSIZE": "5G",
    }
    inner = python.install(root.path, env_python, text)
    site = next((root.path / str(python.ENV)[1:]).glob("lib/python3*/site-packages"))
    hip, rocm = root.version("libamdhip64-dev"), root.version("librocm-core-dev")
    if not ready.is_file():
        script = paths.ROOT / "ci" / "rocm" / "torchhip.py"
        run(
            [str(env_python), str(script), str(site / "torch"), hip, rocm],
            what="making torch ROCm-compatible",
        )
        stubs.make(
            stubs.load(),
            site / "torch" / "lib",
            lambda words: run(
                debian.inside(
                    root.path, f"/{(site / 'torch' / 'lib').relative_to(root.path)}",
                    [env["CC"], *words], env,
                ),
                what="compiling a stand-in library",
            ),
        )  # fmt: skip
        ready.write_text(text)
    placeholder = root.path / NO_TRITON_KERNELS[1:]
    placeholder.mkdir(parents=True, exist_ok=True)
    (placeholder / "ABSENT").write_text("triton_kernels was not given (TRITON_KERNELS_SRC_DIR)\n")
    facts = {
        "toolchain": "debian",
        "mirror": root.mirror,
        "packages": list(root.packages),
        "compiler": f"clang {root.version(f'clang-{root.llvm}')}",
        "hip": hip,
        "rocm": rocm,
        "torch": f"{pin.torch} (CPU build, headers hipified)",
    }
    env["TRITON_KERNELS_SRC_DIR"] = triton_kernels(root, os.environ.get("TRITON_KERNELS_SRC_DIR"))
    return Ready(str(inner), "/opt/rocm", env, root, facts)


def triton_kernels(root: debian.Root | None, given: str | None) -> str:
    """Return the folder that vLLM's CMake takes triton_kernels from.

    vLLM clones ROCm's Triton for it otherwise, which a root without git cannot.

    Args:
        root: The private root, or None.
        given: ``TRITON_KERNELS_SRC_DIR`` of the user, or None.

    Raises:
        StackError: The folder that was given is none.
    """
    if given and not Path(given).is_dir():
        raise StackError(f"TRITON_KERNELS_SRC_DIR {given} is no folder")
    if root is None:
        return given or ""
    if not given:
        return NO_TRITON_KERNELS
    target = root.path / "hipstack" / "triton-kernels"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(given, target)
    return f"/{target.relative_to(root.path)}"
