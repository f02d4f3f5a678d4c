"""The resource table of a manifest, as text."""

from __future__ import annotations

from ci.aot.model import KernelObject, Manifest

_COLUMNS = (
    "ARCH",
    "VARIANT",
    "KERNEL",
    "VGPR",
    "SGPR",
    "SPILL V/S",
    "SCRATCH",
    "LDS",
    "OCC",
    "MATRIX",
    "CODE",
    "LOOP",
    "PER KV",
)
_LEFT = 3
_LEGEND = (
    "SPILL vector/scalar registers; SCRATCH and LDS in bytes; OCC waves per SIMD; MATRIX WMMA, "
    "SWMMAC and MFMA\ninstructions; CODE in bytes; LOOP instructions in the main loop; PER KV "
    "the same per KV token."
)


def resource_table(manifest: Manifest) -> str:
    """Lay out one row per object, with a legend.

    A row names the first variant that uses the object, and how many more do.
    """
    objects = sorted(manifest.objects, key=lambda item: (item.arch, item.kernel, item.variants))
    rows = [_COLUMNS, *map(_row, objects)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if index < _LEFT else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, _LEGEND])


def _row(item: KernelObject) -> tuple[str, ...]:
    use = item.resources
    assert use is not None
    others = len(item.variants) - 1
    per_token = use.instructions_per_kv_token
    return (
        item.arch,
        item.variants[0] + (f" +{others}" if others else ""),
        item.kernel,
        str(use.vgprs),
        str(use.sgprs),
        f"{use.vgpr_spills}/{use.sgpr_spills}",
        str(use.scratch_bytes),
        str(use.lds_bytes),
        str(use.occupancy),
        str(use.matrix_instructions),
        str(use.code_bytes),
        str(use.loop_instructions),
        "-" if per_token is None else f"{per_token:.1f}",
    )
