"""The GPU architectures that a wheel can be built for, and the cards that have them.

The names are those of ``HIP_SUPPORTED_ARCHS`` in vLLM's CMakeLists.txt at the pin; a
test compares the two.  Card names come from AMD's public product tables.
"""

from collections.abc import Sequence

from ci.errors import StackError

ARCHES: dict[str, str] = {
    "gfx906": "Radeon VII, Instinct MI50/MI60",
    "gfx908": "Instinct MI100",
    "gfx90a": "Instinct MI210/MI250/MI250X",
    "gfx942": "Instinct MI300A/MI300X/MI325X",
    "gfx950": "Instinct MI350X/MI355X",
    "gfx1250": "Instinct MI450 series (not RDNA, although its name starts with gfx12)",
    "gfx1030": "Radeon RX 6800/6900 series, PRO W6800",
    "gfx1100": "Radeon RX 7900 XTX/7900 XT/7900 GRE, PRO W7800/W7900",
    "gfx1101": "Radeon RX 7700 XT/7800 XT, PRO W7700",
    "gfx1102": "Radeon RX 7600, PRO W7500/W7600",
    "gfx1103": "Radeon 740M/760M/780M (Phoenix, Hawk Point)",
    "gfx1150": "Radeon 880M/890M (Strix Point)",
    "gfx1151": "Radeon 8050S/8060S (Strix Halo, Ryzen AI Max)",
    "gfx1152": "Radeon 840M/860M (Krackan Point)",
    "gfx1153": "Radeon 820M class (Krackan Point 2)",
    "gfx1200": "Radeon RX 9060/9060 XT",
    "gfx1201": "Radeon RX 9070/9070 XT/9070 GRE, AI PRO R9700",
}

# What one release carries: a wheel and an image each.  A family's members run the same
# code paths of this stack; its name is the one that AMD's own packages use for it.
FAMILIES: dict[str, tuple[str, ...]] = {
    "gfx110x": ("gfx1100", "gfx1101", "gfx1102", "gfx1103"),
    "gfx1151": ("gfx1151",),
    "gfx120x": ("gfx1200", "gfx1201"),
    "gfx942": ("gfx942",),
    "gfx950": ("gfx950",),
}


def parse(text: str) -> tuple[str, ...]:
    """Turn ``gfx1201,gfx1100`` or ``gfx120x`` into sorted, unique architecture names.

    Args:
        text: Names of architectures or families with commas (or semicolons, as CMake
            writes them) between them.

    Returns:
        The names, sorted, each once.

    Raises:
        StackError: A name is unknown, or there is none.
    """
    names = [n.strip().lower() for n in text.replace(";", ",").split(",") if n.strip()]
    if not names:
        raise StackError("--arch names no architecture", "--arch gfx1201")
    found: set[str] = set()
    for name in names:
        if name not in ARCHES and name not in FAMILIES:
            close = [known for known in ARCHES if known[:6] == name[:6]]
            raise StackError(
                f"unknown architecture {name!r}; known: {', '.join(close or ARCHES)}",
                "--arch list",
            )
        found.update(FAMILIES.get(name, (name,)))
    return tuple(sorted(found))


def family(names: Sequence[str]) -> str:
    """Return the short name of a set of architectures, for tags and file names.

    Args:
        names: Architectures.

    Returns:
        The family's name where they are one, else the names joined by ``-``.
    """
    wanted = tuple(sorted(set(names)))
    return next((f for f, members in FAMILIES.items() if members == wanted), "-".join(wanted))


def listing() -> str:
    """Return the known architectures with their cards, and the families, one a line."""
    rows = [f"{name:<9}{cards}" for name, cards in ARCHES.items()]
    rows += [f"{name:<9}{', '.join(m)}" for name, m in FAMILIES.items() if name not in ARCHES]
    return "\n".join(rows)
