"""A private root of Debian packages to compile in, where no ROCm is installed.

mmdebstrap unpacks the packages (none is configured: no script of a package runs) into a
temporary folder, which is renamed when it is whole.  A root is reused as long as the list
of packages, the mirror and the code here are the same.
"""

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import paths, toml
from ci.errors import StackError
from ci.gitstack import remove_tree
from ci.rocm import machine
from ci.run import run

SPEC = Path(__file__).with_name("debian.toml")
HOOK = Path(__file__).with_name("debian_hook.sh")
# The compiler cache, inside the root.
CACHE = "/hipstack/ccache"
RECORD = "packages.json"
# Both trees take 1.1 GB, torch and the packages of the environment 0.1 to 2.5 GB more
# (links where the file system is the same), a build of two architectures 0.6 GB.
NEEDED_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Root:
    """A root that is whole.

    Attributes:
        path: Its folder on this machine.
        packages: What it was made of: ``{"name", "version", "sha256", "part"}`` each.
        mirror: Where they came from.
        llvm: Major version of its compiler, such as "22".
    """

    path: Path
    packages: tuple[dict[str, str], ...]
    mirror: str
    llvm: str

    def version(self, name: str) -> str:
        """Return a package's upstream version ("7.2.4" of "7.2.4-1~exp2"), or ""."""
        found = next((p["version"] for p in self.packages if p["name"] == name), "")
        return upstream_version(found)


def upstream_version(version: str) -> str:
    """Return the leading numbers of a Debian version, without its epoch."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", version)
    return match.group(1) if match else ""


def root_folder(mirror: str) -> Path:
    """Return where the root for a mirror is or will be, by its inputs."""
    digest = hashlib.sha256(mirror.encode())
    for path in (SPEC, HOOK, Path(__file__)):
        digest.update(path.read_bytes())
    return paths.BUILD / f"rocm-root-{digest.hexdigest()[:12]}"


def machine_lacks(mirror: str) -> list[str]:
    """Return what this machine lacks for the root of a mirror, one reason each."""
    folder = root_folder(mirror)
    return machine.lacks(folder, (folder / RECORD).is_file())


def ensure(mirror: str) -> Root:
    """Return the root, made when it is not there.

    Raises:
        StackError: A package is missing, the mirror cannot be reached, or the machine
            lacks something; nothing is left then.
    """
    if reasons := machine_lacks(mirror):
        raise StackError(f"--toolchain debian: {'; '.join(reasons)}")
    folder = root_folder(mirror)
    if not (folder / RECORD).is_file():
        _ensure_mmdebstrap()
        paths.BUILD.mkdir(parents=True, exist_ok=True)
        for stale in paths.BUILD.glob(".rocm-root-*"):
            remove_tree(stale)
        work = Path(tempfile.mkdtemp(dir=paths.BUILD, prefix=".rocm-root-"))
        try:
            _make(work / "root", mirror)
            _take_over(work / "root")
            os.rename(work / "root", folder)
        finally:
            remove_tree(work)
    record = json.loads((folder / RECORD).read_text())
    return Root(folder, tuple(record["packages"]), record["mirror"], record["llvm"])


def _take_over(root: Path) -> None:
    """Keep the compiler cache of an older root, and remove that root."""
    for old in sorted(paths.BUILD.glob("rocm-root-*"), key=lambda p: p.stat().st_mtime):
        cache = old / CACHE[1:]
        if cache.is_dir():
            remove_tree(root / CACHE[1:])
            os.rename(cache, root / CACHE[1:])
        remove_tree(old)


def _ensure_mmdebstrap() -> None:
    if shutil.which("mmdebstrap"):
        return
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "mmdebstrap"]
    archive = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    keyring = [] if archive.exists() else [archive.stem]
    hint = shlex.join(install[:3] + install[-1:] + keyring)
    try:
        run([*install, *keyring], env=env, what="installing mmdebstrap")
    except StackError:  # a machine whose package lists were never fetched
        run(["apt-get", "update", "-q"], env=env, what="apt-get update", hint=hint)
        run([*install, *keyring], env=env, what="installing mmdebstrap", hint=hint)


def _make(folder: Path, mirror: str) -> None:
    spec = toml.read(SPEC)
    folder.parent.mkdir(parents=True, exist_ok=True)
    taken = []
    for part, target in (("rocm", folder), ("sysroot", folder / "opt" / "sysroot")):
        target.parent.mkdir(parents=True, exist_ok=True)
        command, env = mmdebstrap_command(spec[part], mirror, target)
        try:
            run(command, env=env, what=f"unpacking Debian's {spec[part]['suites'][0]}")
        except StackError as error:
            raise StackError(explain(str(error)), "--mirror with another archive") from None
        taken += package_list((target / "packages.sha256").read_text(), part)
        (target / "packages.sha256").unlink()
    lay_out(folder, spec, {p["name"]: upstream_version(p["version"]) for p in taken})
    record = {"mirror": mirror, "llvm": spec["llvm"], "packages": taken}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def mmdebstrap_command(
    part: Mapping[str, Any], mirror: str, target: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the command that unpacks one part of the root, and its variables."""
    options = ['APT::Install-Recommends "false"']
    if shutil.which("apt-config"):
        options += machine.acquire_options(run(["apt-config", "dump", "Acquire"]))
    command = ["mmdebstrap", "--mode=root", "--variant=extract", "--format=directory"]
    command += [f"--aptopt={option}" for option in options]
    if newest := part.get("newest"):
        preferences = (
            f"Package: {' '.join(newest)}\nPin: release a={part['suites'][-1]}\nPin-Priority: 990\n"
        )
        command.append(
            '--setup-hook=mkdir -p "$1/etc/apt/preferences.d" && '
            f'printf %s {shlex.quote(preferences)} > "$1/etc/apt/preferences.d/newest"'
        )
    command += [
        f'--extract-hook={shlex.quote(str(HOOK))} "$1"',
        f"--include={','.join(part['packages'])}",
        part["suites"][0],
        str(target),
        *(f"deb {mirror} {suite} main" for suite in part["suites"]),
    ]
    without = " ".join(f"{name}_*.deb" for name in part.get("without_headers_of", []))
    return command, {"HEADERS": " ".join(part.get("headers", [])), "WITHOUT": without}


def explain(error: str) -> str:
    """Turn what apt says about a package that it cannot find into one sentence."""
    if match := re.search(r"Unable to locate package (\S+)", error):
        return f"the mirror has no package {match.group(1)}; Debian may have moved on"
    return error


def package_list(sums: str, part: str) -> list[dict[str, str]]:
    """Read the output of sha256sum over .deb files."""
    result = []
    for line in sums.splitlines():
        digest, name = line.split(maxsplit=1)
        package, version, _ = Path(name.lstrip("*")).name.split("_", 2)
        result.append(
            {
                "name": package,
                "version": version.replace("%3a", ":"),
                "sha256": digest,
                "part": part,
            }
        )
    return result


def lay_out(root: Path, spec: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Turn unpacked packages into something that looks like an installed ROCm.

    Debian keeps ROCm's files in /usr; AMD's CMake files and torch's expect one prefix.
    """
    llvm, libraries = f"/usr/lib/llvm-{spec['llvm']}", "/usr/lib/x86_64-linux-gnu"
    rocm = root / "opt" / "rocm"
    rocm.mkdir(parents=True)
    links = {
        "include": "/usr/include",
        "lib": libraries,
        "bin": "/usr/bin",
        "llvm": llvm,
        "share": "/usr/share",
        "amdgcn": f"{llvm}/lib/clang/{spec['llvm']}/amdgcn",
    }
    for name, target in links.items():
        (rocm / name).symlink_to(target)
    # amd_comgr's CMake file looks for itself relative to a prefix below /opt.
    (root / "opt" / "lib").symlink_to("/usr/lib")
    make_links_relative(root / "opt" / "sysroot")
    for name in spec["cmake"]["packages"]:
        write_cmake_package(root / libraries[1:] / "cmake", name, versions)
    # Every call of the compiler builds for the older system, whoever makes it.
    gcc = f"/opt/sysroot/usr/lib/gcc/x86_64-linux-gnu/{spec['sysroot']['gcc']}"
    config = (
        f"--sysroot=/opt/sysroot\n--gcc-install-dir={gcc}\n--rocm-path=/opt/rocm\n"
        "-idirafter /opt/rocm/include\n"
        # The HIP runtime itself is linked for the newer system.
        "-Wl,--allow-shlib-undefined\n"
    )
    for name in ("clang", "clang++"):
        (root / llvm[1:] / "bin" / f"{name}.cfg").write_text(config)
    for name in ("tmp", "proc", "dev", "root", "hipstack"):
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    _device(root / "dev" / "null", 1, 3)
    _device(root / "dev" / "urandom", 1, 9)
    run(["chroot", str(root), "/sbin/ldconfig"], what="ldconfig in the root")


def make_links_relative(tree: Path) -> None:
    """Keep absolute links of an unpacked system inside its own tree."""
    for folder, names, files in os.walk(tree):
        for path in (Path(folder, name) for name in [*names, *files]):
            if path.is_symlink() and os.readlink(path).startswith("/"):
                inside_ = tree / os.readlink(path)[1:]
                path.unlink()
                path.symlink_to(os.path.relpath(inside_, path.parent))


def write_cmake_package(folder: Path, name: str, versions: Mapping[str, str]) -> None:
    """Write the CMake package of a library that is here as headers only."""
    package = next((p for p in versions if p == f"lib{name.replace('_', '-')}-dev"), "")
    version = versions.get(package, "0")
    target = folder / name
    if (target / f"{name}-config.cmake").exists() and package not in versions:
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / f"{name}-config.cmake").write_text(
        f"# Headers only: the library comes with the ROCm that the result runs on.\n"
        f"set({name}_INCLUDE_DIR /usr/include)\n"
    )
    (target / f"{name}-config-version.cmake").write_text(
        f'set(PACKAGE_VERSION "{version}")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
    )


def _device(path: Path, major: int, minor: int) -> None:
    if path.exists() and stat.S_ISCHR(path.stat().st_mode):
        return
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    except OSError as error:
        raise StackError(
            f"cannot make {path.name} in the root: {error.strerror}",
            "a container that may use mknod (the default of Docker and Podman)",
        ) from None
    path.chmod(0o666)


@functools.cache
def _may_mount() -> bool:
    command = ["unshare", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def inside(root: Path, folder: str, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command that runs a command in the root, and in nothing else's environment.

    /proc is mounted for it alone, where that is allowed; nothing stays mounted.

    Args:
        root: The root.
        folder: Where to run it, inside the root.
        command: Program and arguments.
        env: All variables that it gets.
    """
    variables = [f"{key}={value}" for key, value in env.items()]
    program = ["/usr/bin/env", "-i", *variables, "/bin/sh", "-c", 'cd "$0" && exec "$@"', folder]
    change = ["chroot", str(root), *program, *command]
    if not _may_mount():
        return change
    script = 'mount -t proc proc "$0/proc" 2>/dev/null; exec "$@"'
    return ["unshare", "--mount", "/bin/sh", "-c", script, str(root), *change]
