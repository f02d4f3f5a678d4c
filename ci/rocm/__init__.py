"""Compile vLLM's HIP extensions, with an installed ROCm or with none.

host.py       an installed ROCm and its torch, checked before anything is compiled
machine.py    what a machine offers and lacks for a private root
debian.py     that root: Debian's compiler, HIP headers and runtime
python.py     the interpreter and its packages inside it
torchhip.py   a CPU torch whose headers and CMake files are those of a ROCm torch
stubs.py      libraries that define, for the linker, what a ROCm torch has at run time
toolchain.py  one of the two, ready to compile with
build.py      vLLM's own setup.py run with it, with progress by file
audit.py      what compiled libraries need and hold
proof.py      the proof of a compiled wheel
check.py      the root alone, and what compiles in it in seconds (python3 -m ci.rocm)
"""
