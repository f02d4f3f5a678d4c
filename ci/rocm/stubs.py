"""Stand-in libraries that define, for the linker, what a ROCm torch provides at run time.

With them the extensions get the NEEDED entries that they need: a library that defines none
of the symbols in use would be dropped by ``--as-needed``.  A call into one aborts with the
symbol's name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import toml
from ci.errors import StackError

SYMBOLS = Path(__file__).with_name("symbols.toml")
# Variables of C++ classes and namespaces have no parameter list in their mangled name; the
# one variable here is 8 bytes, and none of its users reads it while loading.
_DATA = ("9allocatorE",)


@dataclass(frozen=True)
class Library:
    """A library that is stood in for.

    Attributes:
        name: What the linker is given, such as "libhipblas.so".
        soname: What the extensions will ask for, such as "libhipblas.so.3".
        symbols: Symbol to the header that declares it.
        needed: Libraries of this list that it asks for itself.
    """

    name: str
    soname: str
    symbols: dict[str, str]
    needed: tuple[str, ...] = ()


def load(path: Path = SYMBOLS) -> list[Library]:
    """Read the tracked list.

    Raises:
        StackError: It is malformed, or names a symbol twice.
    """
    libraries, seen = [], set[str]()
    for name, table in toml.read(path).items():
        symbols: dict[str, str] = {}
        for header, names in table.items():
            if header in ("soname", "needed"):
                continue
            for symbol in names:
                if symbol in seen:
                    raise StackError(f"{path.name}: {symbol} is there twice")
                seen.add(symbol)
                symbols[symbol] = header
        if not table.get("soname") or not symbols:
            raise StackError(f"{path.name}: {name} has no soname or no symbols")
        libraries.append(Library(name, table["soname"], symbols, tuple(table.get("needed", ()))))
    return libraries


def source(library: Library) -> str:
    """Return the C source of a stand-in."""
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        "static void missing(const char *name) {",
        f'  fprintf(stderr, "%s: stand-in for {library.soname} was called\\n", name);',
        "  abort();",
        "}",
    ]
    for symbol in sorted(library.symbols):
        if symbol.endswith(_DATA):
            lines.append(f"void *{symbol};")
        else:
            lines.append(f'void {symbol}(void) {{ missing("{symbol}"); }}')
    return "\n".join(lines) + "\n"


def make(
    libraries: Sequence[Library], folder: Path, compile_: Callable[[list[str]], object]
) -> None:
    """Compile stand-ins into a folder.

    Args:
        libraries: What to stand in for; one that another needs comes first.
        folder: Where they go, under the names for the linker, and where a soname differs a
            link under that, for the loader.
        compile_: Runs a C compiler with these arguments, from within the folder.
    """
    for library in libraries:
        file = folder / f"{library.name}.c"
        file.write_text(source(library))
        compile_(
            [
                "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library.soname}",
                "-o", library.name, file.name, "-Wl,--no-as-needed", *library.needed,
            ]
        )  # fmt: skip
        file.unlink()
        if library.soname != library.name:
            (folder / library.soname).unlink(missing_ok=True)
            (folder / library.soname).symlink_to(library.name)
