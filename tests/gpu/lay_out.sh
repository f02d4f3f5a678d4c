# SPDX-License-Identifier: Apache-2.0
# On the GPU machine, from the folder that pack.py filled:   . ./lay_out.sh
# Installs the pack under $ENGINE_HOME and points Python at it. vLLM will believe that
# it runs on ROCm, on the architecture that FAKE_GFX names (default gfx1201).
ENGINE_HOME=${ENGINE_HOME:-$PWD/home}
if [ ! -e "$ENGINE_HOME/ready" ]; then
    mkdir -p "$ENGINE_HOME/tree/vllm-0.31.0.dist-info"
    tar -xJf tree.tar.xz -C "$ENGINE_HOME/tree"
    tar -xJf patches.tar.xz  # ci.validate names the set by them
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n' \
        > "$ENGINE_HOME/tree/vllm-0.31.0.dist-info/METADATA"
    # There is an NVIDIA driver, and vLLM refuses to choose between two platforms.
    printf '\nbuiltin_platform_plugins.pop("cuda")\n' \
        >> "$ENGINE_HOME/tree/vllm/platforms/__init__.py"
    # Where vLLM imports its compiled extensions it finds the plain ops.
    for extension in _C _C_stable_libtorch _rocm_C; do
        echo 'import plain_ops' > "$ENGINE_HOME/tree/vllm/$extension.py"
    done
    python3 -m pip install --quiet --no-index --no-deps --no-compile \
        --target "$ENGINE_HOME/site" ./*.whl && touch "$ENGINE_HOME/ready"
fi
export PYTHONPATH="$ENGINE_HOME/tree:$ENGINE_HOME/site:$PWD/standins"
export FAKE_GFX=${FAKE_GFX:-gfx1201} FAKE_VRAM_GIB=${FAKE_VRAM_GIB:-139}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# The newer runner wants a compiled op for host memory, the skinny GEMMs are compiled.
export VLLM_USE_V2_MODEL_RUNNER=0 VLLM_ROCM_USE_SKINNY_GEMM=0
export VLLM_ENABLE_V1_MULTIPROCESSING=0
