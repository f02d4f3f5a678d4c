"""Load all of an installed vLLM's extensions and say what they register.

Runs in the environment of the toolchain, on a machine with no GPU: the HIP runtime is the
real one.  Arguments: libraries to load first, which stand in for what only a ROCm torch has.
"""

import ctypes
import json
import os
import sys

# Every symbol is looked up at once, so that a missing one shows here and not in a call.
sys.setdlopenflags(os.RTLD_NOW)
import torch  # noqa: E402

for path in sys.argv[1:]:
    ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_GLOBAL)
hip = ctypes.CDLL("libamdhip64.so.7")
count, runtime = ctypes.c_int(-1), ctypes.c_int(-1)
code = hip.hipGetDeviceCount(ctypes.byref(count))
hip.hipRuntimeGetVersion(ctypes.byref(runtime))

import vllm  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

current_platform.import_kernels()
folder = os.path.dirname(vllm.__file__)
modules = []
for name in sorted(os.listdir(folder)):
    if not name.endswith(".so"):
        continue
    module = name.split(".")[0]
    if module == "_hipdnn_C":  # no Python module: it is loaded by ctypes
        ctypes.CDLL(os.path.join(folder, name), os.RTLD_NOW)
    else:
        __import__(f"vllm.{module}")
    modules.append(module)
wanted = ("_C::", "_rocm_C::", "_moe_C::", "_C_cache_ops::", "_C_cuda_utils::", "_C_custom_ar::")
ops = torch._C._dispatch_get_all_op_names()
print(
    json.dumps(
        {
            "version": vllm.__version__,
            "platform": type(current_platform).__name__,
            "hip": {"version": runtime.value, "hipGetDeviceCount": code},
            "modules": modules,
            "ops": sorted({op.split(".")[0] for op in ops if op.startswith(wanted)}),
        }
    )
)
