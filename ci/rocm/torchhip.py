"""Turn a CPU torch into one that extensions for ROCm can be compiled against.

The CPU wheel has the sources that a ROCm torch is made from: CUDA's headers and
LoadHIP.cmake.  This does with them what PyTorch's own ROCm build does (hipify), switches
ROCm on in its CMake files and its version, and adds stand-in libraries for the linker.
Nothing of it reaches a wheel.

It runs as a script, by an interpreter with the same torch::

    python torchhip.py TORCH_FOLDER HIP_VERSION ROCM_VERSION
"""

import re
import sys
from pathlib import Path

# Written by CMake when CUDA or HIP is on, so a CPU wheel has neither.
CUDA_MACROS = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"
CUDA_CONFIG = """\
#pragma once
#define AT_CUDNN_ENABLED() 0
#define AT_CUSPARSELT_ENABLED() 0
#define AT_HIPSPARSELT_ENABLED() 0
#define AT_ROCM_ENABLED() 1
#define AT_MAGMA_ENABLED() 0
#define NVCC_FLAGS_EXTRA ""
"""
# PyTorch's own ROCm build renames these out of place and edits torch/ in place.
HIPIFIED = (
    "ATen/cuda/*", "ATen/cudnn/*", "ATen/native/cuda/*", "ATen/native/transformers/cuda/*",
    "c10/cuda/*", "THC/*", "torch/*",
)  # fmt: skip
SWITCH = 'if (OFF)\n  include("${CMAKE_CURRENT_LIST_DIR}/public/LoadHIP.cmake")'
AFTER = "set(Caffe2_MAIN_LIBS torch_library)\n"
# What a ROCm torch's Caffe2Targets.cmake says of its two libraries.
TARGETS = """
get_filename_component(_hip_lib "${CMAKE_CURRENT_LIST_DIR}/../../../lib" ABSOLUTE)
foreach(_name c10_hip torch_hip)
  add_library(${_name} SHARED IMPORTED)
  set_target_properties(${_name} PROPERTIES
    IMPORTED_LOCATION "${_hip_lib}/lib${_name}.so" IMPORTED_SONAME "lib${_name}.so")
endforeach()
set_target_properties(torch_hip PROPERTIES
  INTERFACE_COMPILE_OPTIONS
    "-fPIC;-D__HIP_PLATFORM_AMD__=1;-DCUDA_HAS_FP16=1;-DUSE_ROCM;-D__HIP_NO_HALF_OPERATORS__=1"
  INTERFACE_LINK_LIBRARIES "c10_hip;hip::amdhip64;${_hip_lib}/libhipblas.so")
set_property(TARGET torch_hip APPEND PROPERTY INTERFACE_COMPILE_OPTIONS
  -D__HIP_NO_HALF_CONVERSIONS__=1 -DTORCH_HIP_VERSION=${TORCH_HIP_VERSION} -DHIPBLAS_V2
  -DHIP_ENABLE_WARP_SYNC_BUILTINS)
set_property(TARGET torch APPEND PROPERTY INTERFACE_LINK_LIBRARIES torch_hip)
"""


def switch_on(config: str) -> str:
    """Return Caffe2Config.cmake as a ROCm torch has it.

    Raises:
        ValueError: It is not that of a CPU wheel this knows.
    """
    for wanted in (SWITCH, AFTER):
        if config.count(wanted) != 1:
            raise ValueError(f"Caffe2Config.cmake has no {wanted.splitlines()[0]!r}")
    return config.replace(SWITCH, SWITCH.replace("OFF", "ON")).replace(AFTER, AFTER + TARGETS)


def set_versions(version: str, hip: str, rocm: str) -> str:
    """Return version.py with a HIP and a ROCm version.

    Raises:
        ValueError: It has no such lines.
    """
    for name, value in (("hip", hip), ("rocm", rocm)):
        version, count = re.subn(
            rf"^{name}: .*$", f"{name}: Optional[str] = {value!r}", version, flags=re.M
        )
        if count != 1:
            raise ValueError(f"version.py has no line for {name}")
    return version


def hipify(include: Path) -> int:
    """Hipify torch's own headers; return how many changed."""
    from torch.utils.hipify import hipify_python

    (include / "c10/cuda/impl/cuda_cmake_macros.h").write_text(CUDA_MACROS)
    (include / "ATen/cuda/CUDAConfig.h").write_text(CUDA_CONFIG)
    result = hipify_python.hipify(
        project_directory=str(include),
        output_directory=str(include),
        includes=[str(include / pattern) for pattern in HIPIFIED],
        ignores=["*/ATen/hip/*"],
        is_pytorch_extension=False,
        hip_clang_launch=True,
        show_progress=False,
    )
    return sum(1 for item in result.values() if item.hipified_path)


def convert(torch: Path, hip: str, rocm: str) -> None:
    """Convert an unpacked CPU torch in place; the switch in its CMake files comes last."""
    config = torch / "share/cmake/Caffe2/Caffe2Config.cmake"
    switched = switch_on(config.read_text())
    (torch / "version.py").write_text(set_versions((torch / "version.py").read_text(), hip, rocm))
    changed = hipify(torch / "include")
    if not (torch / "include/c10/hip/HIPStream.h").is_file():
        raise ValueError("hipify made no c10/hip/HIPStream.h")
    config.write_text(switched)
    print(f"{changed} headers hipified")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    except (ValueError, OSError) as error:
        sys.exit(f"error: this torch cannot be made ROCm-compatible: {error}")
