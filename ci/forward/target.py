"""Bring the tree that the series shall be tried on: an sdist, a path or a git reference."""

import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci import gitstack, source
from ci.errors import StackError
from ci.paths import SOURCES
from ci.pin import Pin

_VERSION = re.compile(r"v?(\d+\.\d+\.\d+(?:(?:rc|\.post)\d+)?)")


@dataclass(frozen=True)
class Target:
    """Another version of upstream, unpacked.

    Attributes:
        name: What it is called in the report: a version, a file's or folder's name, a
            git reference.
        origin: What exactly it is: the sdist's sha256, the commit, the tree's digest.
        tree: Where it lies.
    """

    name: str
    origin: str
    tree: Path


def lookup_sha256(version: str) -> str:
    """Ask the configured package index for the sha256 of a vLLM sdist.

    Raises:
        StackError: The index cannot be reached, or has no such sdist or no hash of it.
    """
    with source.package_index(
        f"cannot ask the package index for vLLM {version}",
        "check the network, or name a path with a copy of the sdist",
    ) as (_, packages):
        for package in packages:
            if package.filename == f"vllm-{version}.tar.gz" and package.digests.get("sha256"):
                return str(package.digests["sha256"])
    raise StackError(f"the package index lists no sdist of vLLM {version} with a sha256")


def bring(what: str, pin: Pin, folder: Path, sha256: str = "", repository: str = "") -> Target:
    """Unpack a target.

    Args:
        what: A version (``0.33.0``: its sdist), a path to an sdist or a source tree, or a
            git reference.
        pin: The pin; its repository is where a git reference is looked up by default.
        folder: Where to unpack; replaced when it exists.
        sha256: What the sdist's hash must be; the package index's own word by default.
        repository: URL or path for a git reference.

    Returns:
        The target.

    Raises:
        StackError: There is no such thing, or it is not what ``sha256`` says.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".target-") as scratch:
        path = Path(what)
        version = _VERSION.fullmatch(what)
        if path.is_dir() and not repository:
            tree = Path(scratch) / "tree"
            shutil.copytree(
                path, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__")
            )
            name, origin = path.resolve().name, ""
        elif path.is_file() and not repository:
            got = source.sha256(path)
            if sha256 and got != sha256:
                raise StackError(f"{path.name}: sha256 is {got}, wanted is {sha256}")
            tree = _unpack(path, pin, Path(scratch))
            name, origin = path.name, f"sdist, sha256 {got}"
        elif version and not repository:
            number = version[1]
            wanted = sha256 or lookup_sha256(number)
            other = dataclasses.replace(
                pin, version=number, sdist=f"vllm-{number}.tar.gz", sdist_sha256=wanted
            )
            tree = _unpack(source.fetch_sdist(other, SOURCES), other, Path(scratch))
            name, origin = number, f"sdist, sha256 {wanted}"
        else:
            tree, commit = _fetch(repository or pin.git, what, Path(scratch))
            name, origin = what, f"commit {commit}"
        if not (tree / "vllm").is_dir():
            raise StackError(f"{what}: there is no vllm folder in it")
        source.remove_generated(tree)
        origin = origin or f"tree, digest {source.tree_digest(tree)}"
        gitstack.remove_tree(folder)
        os.rename(tree, folder)
    return Target(name, origin, folder)


def _unpack(sdist: Path, pin: Pin, into: Path) -> Path:
    source.unpack(sdist, into)
    folders = [p for p in into.iterdir() if p.is_dir()]
    if len(folders) != 1:
        raise StackError(f"{sdist.name} does not hold one folder")
    return folders[0]


def _fetch(repository: str, reference: str, into: Path) -> tuple[Path, str]:
    """Fetch one commit of a repository without its history."""
    tree = into / "fetched"
    tree.mkdir()
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    for arguments in (
        ["init", "-q"],
        ["fetch", "-q", "--depth=1", repository, reference],
        ["checkout", "-q", "FETCH_HEAD"],
    ):
        result = subprocess.run(
            ["git", *arguments], cwd=tree, env=env, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["git failed"])[-1]
            raise StackError(
                f"{reference!r} is no path and no version, and git cannot fetch it: {reason}",
                "--git URL names another repository",
            )
    commit = gitstack.git(tree, "rev-parse", "HEAD").strip()
    shutil.rmtree(tree / ".git")
    return tree, commit
