"""Compile Triton kernels for AMD GPUs ahead of time, on a machine that has none.

A *list* (:mod:`ci.aot.lists`) says which kernels of a vLLM tree to compile and how the engine
launches them. Each architecture is compiled in a process of its own: vLLM is imported there for
that architecture through a stand-in for AMD's device library, a stand-in Triton driver is made
active, and every launch with meta tensors becomes the compilation of the very variant that the
engine's launch would need.

The result is a folder::

    manifest.json
    gfx1201/<id>.hsaco
    ...

It is written as a whole or not at all, and the same tree, lists, architectures and Triton give
the same bytes. Inside the wheel it lies at ``vllm/hipstack/aot`` (:func:`install_into`).
"""

from ci.aot.build import (
    WHEEL_FOLDER,
    compile_list,
    install_into,
    verify_manifest,
    verify_wheel,
)
from ci.aot.model import AotError, KernelObject, Manifest, Resources

__all__ = [
    "WHEEL_FOLDER",
    "AotError",
    "KernelObject",
    "Manifest",
    "Resources",
    "compile_list",
    "install_into",
    "verify_manifest",
    "verify_wheel",
]
