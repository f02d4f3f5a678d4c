"""What a machine offers and lacks for a private root, decided before anything is made."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.errors import StackError
from ci.rocm.host import MEMORY_BYTES

DEFAULT_MIRROR = "http://deb.debian.org/debian"
# Both trees take 1.1 GB, torch and the packages of the environment 0.1 to 2.5 GB more
# (links where the file system is the same), a build of two architectures 0.6 GB.
NEEDED_BYTES = 5_000_000_000


def machine_mirror(sources: Sequence[str]) -> str | None:
    """Return the Debian mirror that a machine's own apt uses.

    Args:
        sources: The texts of its sources.list and .sources files.

    Returns:
        The first that serves the main archive, or None (another distribution).
    """
    for text in sources:
        lines = [line.split("#")[0].strip() for line in text.splitlines()]
        for line in lines:
            words = re.sub(r"\[[^]]*\]", "", line).split()
            first = words[:1]
            for uri in words[1:2] if first == ["deb"] else words[1:] if first == ["URIs:"] else ():
                if re.search(r"/debian/?$", uri) and not uri.startswith(("cdrom:", "file:")):
                    return uri.rstrip("/")
    return None


def acquire_options(dump: str) -> list[str]:
    """Return how a machine's apt fetches (proxies, what it checks), for another apt.

    Args:
        dump: The output of ``apt-config dump Acquire``.
    """
    return [
        line.strip().rstrip(";")
        for line in dump.splitlines()
        if re.match(r'Acquire::[\w:.-]+ "[^"]+";', line)
        and "IndexTargets" not in line
        and not line.startswith("Acquire::Languages")
    ]


def find_mirror(asked: str | None) -> str:
    """Return the mirror to use: the one asked for, the machine's own, or Debian's."""
    if asked:
        if not re.match(r"(https?|file|copy)://?\S+$", asked):
            raise StackError(f"--mirror {asked!r} is no address of an archive", DEFAULT_MIRROR)
        return asked.rstrip("/")
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    texts = [f.read_text(errors="replace") for f in files if f.is_file()]
    return machine_mirror(texts) or DEFAULT_MIRROR


def lacking(
    machine: str, uid: int, tools: Mapping[str, str | None], memory: int, free: int, exists: bool
) -> list[str]:
    """Say what a machine lacks for a root, one reason each; empty when nothing.

    Args:
        machine: What ``uname -m`` says.
        uid: The effective user.
        tools: Where ``mmdebstrap``, ``apt-get`` and ``chroot`` are, or None.
        memory: Bytes of memory.
        free: Bytes free where the root goes.
        exists: Whether the root is there already.
    """
    reasons = []
    if machine != "x86_64":
        reasons.append(f"the machine is {machine}, not x86_64")
    if uid != 0:
        reasons.append("not root (a chroot is used; root in a container will do)")
    if not tools.get("chroot"):
        reasons.append("no chroot")
    if not exists and not tools.get("mmdebstrap") and not tools.get("apt-get"):
        reasons.append("no mmdebstrap and no apt-get (Debian, Ubuntu or a container of them)")
    if memory < MEMORY_BYTES:
        reasons.append(f"{memory / 1e9:.1f} GB of memory, one file takes 5 GB to compile")
    if not exists and free < NEEDED_BYTES:
        reasons.append(f"{free / 1e9:.1f} GB free, {NEEDED_BYTES / 1e9:.0f} GB are needed")
    return reasons


def lacks(folder: Path, whole: bool) -> list[str]:
    """Return what this machine lacks for a root (see :func:`lacking`).

    Args:
        folder: Where the root is or will be.
        whole: Whether it is there.
    """
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    tools = {name: shutil.which(name) for name in ("mmdebstrap", "apt-get", "chroot")}
    return lacking(
        os.uname().machine,
        os.geteuid(),
        tools,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shutil.disk_usage(existing).free,
        whole,
    )
