"""Compile vLLM's HIP extensions, with an installed ROCm or with none.

decide.py    which toolchain, and why (pure functions)
host.py      an installed ROCm and its torch, checked before anything is compiled
debian.py    a private root of Debian packages: compiler, HIP headers and runtime
python.py    the interpreter and its packages inside that root
torchhip.py  a CPU torch whose headers and CMake files are those of a ROCm torch
stubs.py     libraries that define, for the linker, what a ROCm torch provides at run time
build.py     vLLM's own setup.py in either, with progress by file
audit.py     what the compiled libraries need and hold
__main__.py  ``python3 -m ci.rocm``: make the root, check it with small targets
"""
