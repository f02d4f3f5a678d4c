"""The GPU architectures that a wheel can be built for, and the cards that have them.

The names are those of ``HIP_SUPPORTED_ARCHS`` in vLLM's CMakeLists.txt at the pin; a
test compares the two.  Card names come from AMD's public product tables.
"""

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


def parse(text: str) -> tuple[str, ...]:
    """Turn ``gfx1201,gfx1100`` into sorted, unique architecture names.

    Args:
        text: Names with commas (or semicolons, as CMake writes them) between them.

    Returns:
        The names, sorted, each once.

    Raises:
        StackError: A name is unknown, or there is none.
    """
    names = [n.strip().lower() for n in text.replace(";", ",").split(",") if n.strip()]
    if not names:
        raise StackError("--arch names no architecture", "--arch gfx1201")
    for name in names:
        if name not in ARCHES:
            close = [known for known in ARCHES if known[:6] == name[:6]]
            raise StackError(
                f"unknown architecture {name!r}; known: {', '.join(close or ARCHES)}",
                "--arch list",
            )
    return tuple(sorted(set(names)))


def listing() -> str:
    """Return the known architectures with their cards, one a line."""
    return "\n".join(f"{name:<9}{cards}" for name, cards in ARCHES.items())
