"""An interpreter of this machine and the packages of an environment, inside a root.

The interpreter keeps its path, so that it finds itself; the environment becomes
``/opt/env``.  Files are linked where the file system allows it and never written through.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.gitstack import remove_tree
from ci.run import run

ENV = Path("/opt/env")
# Changed by torchhip.py, so never links to the environment's own files.
CHANGED = ("torch/include", "torch/share", "torch/version.py")
_ASK = """
import json, os, sys, sysconfig as s
v = s.get_config_vars()
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "prefix": sys.base_prefix,
    "program": os.path.realpath(sys._base_executable),
    "folders": [s.get_path("stdlib"), s.get_path("platstdlib")],
    "include": [s.get_path("include"), s.get_path("platinclude"),
                os.path.join("/usr/include", v.get("MULTIARCH") or "-",
                             "python%d.%d" % sys.version_info[:2])],
    "library": os.path.join(v.get("LIBDIR") or "", v.get("INSTSONAME") or "")
               if v.get("Py_ENABLE_SHARED") else "",
    "site": s.get_path("purelib"),
}))
"""


def ask(python: Path) -> dict[str, Any]:
    """Return where an interpreter keeps what a copy of it needs.

    Raises:
        StackError: It cannot be run, or has no headers.
    """
    found: dict[str, Any] = json.loads(run([str(python), "-c", _ASK]).splitlines()[-1])
    base = ("include", f"python{found['version']}")
    found["include"] += [str(Path(found["prefix"], *base))]
    found["include"] = sorted({p for p in found["include"] if Path(p).is_dir()})
    if not any(Path(p, "Python.h").is_file() for p in found["include"]):
        raise StackError(
            f"Python {found['version']} has no headers (Python.h)",
            f"apt-get install -y python{found['version']}-dev",
        )
    return found


def install(root: Path, python: Path, stamp: str) -> Path:
    """Put an environment and its interpreter into a root, unless they are there.

    Args:
        root: The root.
        python: Interpreter of the environment.
        stamp: What the environment is determined by.

    Returns:
        The interpreter's path inside the root.

    Raises:
        StackError: The interpreter has no headers.
    """
    inner = ENV / "bin" / "python"
    target = root / str(ENV)[1:]
    if (target / "stamp").is_file() and (target / "stamp").read_text() == stamp:
        return inner
    facts = ask(python)
    copy_interpreter(root, facts)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".env-"))
    try:
        site = work / "lib" / f"python{facts['version']}" / "site-packages"
        link_tree(Path(facts["site"]), site, CHANGED)
        tools = work / "bin"
        tools.mkdir()
        (tools / "python").symlink_to(facts["program"])
        (tools / "python3").symlink_to("python")
        for name in ("cmake", "ninja"):
            _tool(python.parent / name, site, tools / name)
        home = Path(facts["program"]).parent
        (work / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
        (work / "stamp").write_text(stamp)
        work.chmod(0o755)
        remove_tree(target)
        os.rename(work, target)
    finally:
        remove_tree(work)
    return inner


def _tool(program: Path, site: Path, target: Path) -> None:
    """Bring a program that a package installed, or the binary that its script starts."""
    binary = site / program.name / "data" / "bin" / program.name
    if binary.is_file():
        target.symlink_to(os.path.relpath(binary, target.parent))
    else:
        shutil.copy2(program, target)


def copy_interpreter(root: Path, facts: dict[str, Any]) -> None:
    """Copy an interpreter, its standard library and its headers to the same paths."""
    skip = shutil.ignore_patterns(
        "site-packages", "dist-packages", "__pycache__", "test", "idlelib", "*.a"
    )
    for folder in sorted({*facts["folders"], *facts["include"]}):
        shutil.copytree(
            folder, root / folder[1:], ignore=skip, symlinks=True, dirs_exist_ok=True
        )  # fmt: skip
    for file in (facts["program"], facts["library"]):
        if file:
            real = os.path.realpath(file)
            for path in {file, real}:
                (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(real, root / path[1:])


def link_tree(source: Path, target: Path, copied: Iterable[str]) -> None:
    """Copy a tree by hard links, and some paths of it by content.

    Args:
        source: The tree.
        target: The copy; it must not exist.
        copied: Paths in it that will be changed and must be files of their own.
    """
    real = tuple(copied)

    def copy(origin: str, destination: str) -> str:
        relative = Path(origin).relative_to(source).as_posix()
        if not any(relative == r or relative.startswith(f"{r}/") for r in real):
            try:
                os.link(origin, destination)
                return destination
            except OSError:  # another file system, or too many links
                pass
        return str(shutil.copy2(origin, destination))

    shutil.copytree(
        source, target, symlinks=True, copy_function=copy,
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
