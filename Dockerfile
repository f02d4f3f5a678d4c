# The image: torch for ROCm on a ROCm base, and this stack's wheel of vLLM around it.
#
#   docker build --build-arg ARCH=gfx1201 -t hipstack:gfx1201 .            # builds the wheel
#   docker build --build-context wheel=dist --build-arg ARCH=gfx1201 .     # takes it from dist/
#
# `python3 -m ci.image build` does the same and fills in the labels; docs/image.md shows
# how to run the image and which base and torch index go together.

# ROCm without its development files is enough where torch brings its own ROCm libraries;
# upstream's torch for this pin does not, so its base has them.
ARG BASE_IMAGE=rocm/dev-ubuntu-24.04:7.2.3-complete
# Where the wheel is built.  Only its Python must be that of BASE_IMAGE.
ARG BUILD_IMAGE=${BASE_IMAGE}
ARG ARCH=gfx1201
# Only TORCH_PACKAGES come from this index.  Empty: the base image's own torch is used, as
# with vllm/vllm-openai-rocm for a base.
ARG TORCH_INDEX=https://wheels.vllm.ai/rocm/0.31.0/rocm723
ARG TORCH_PACKAGES="torch torchvision triton amdsmi"
# Debian packages that this torch is linked with and the base image lacks.
ARG EXTRA_PACKAGES="libnuma1 libopenmpi3t64"
# Another package index than pip's own, for everything else.
ARG PIP_INDEX_URL=
# 1: accept a torch that is no ROCm build (the stand-in image that tries the recipe).
ARG ANY_TORCH=

# --- the wheel -----------------------------------------------------------------------------
FROM ${BUILD_IMAGE} AS build
ARG TORCH_INDEX
ARG TORCH_PACKAGES
ARG PIP_INDEX_URL
ARG EXTRA_PACKAGES
ARG ANY_TORCH
# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# build.sh installs quilt itself; python3-dev and g++ are for vLLM's own extensions.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git python3 python3-dev python3-venv quilt ${EXTRA_PACKAGES} \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
# The torch that will run the wheel is the one to compile against (--toolchain host).
COPY ci/image/inside/ /opt/hipstack/
RUN --mount=type=cache,target=/root/.cache/pip python3 /opt/hipstack/install.py torch \
    && python3 /opt/hipstack/install.py packages /opt/hipstack/build-tools.txt
ENV PATH=/opt/vllm/bin:${PATH}
ARG ARCH
# As build.sh's options of these names; empty ones are build.sh's own defaults.
ARG EXTENSIONS=auto
ARG TOOLCHAIN=
ARG JOBS=
WORKDIR /hipstack
COPY . .
# What build.sh keeps for its next run (2 GB and more) stays out of the layer.
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=cache,target=/hipstack/build,sharing=locked \
    ./build.sh --arch "${ARCH}" --extensions "${EXTENSIONS}" --out /wheel \
        ${TOOLCHAIN:+--toolchain "${TOOLCHAIN}"} ${JOBS:+--jobs "${JOBS}"}

# `--build-context wheel=FOLDER` puts a folder with a finished wheel in this stage's place;
# nothing is compiled then.
FROM scratch AS wheel
COPY --from=build /wheel/ /

# --- torch for ROCm, which nothing after this stage may replace -----------------------------
FROM ${BASE_IMAGE} AS torch
ARG TORCH_INDEX
ARG TORCH_PACKAGES
ARG PIP_INDEX_URL
ARG EXTRA_PACKAGES
# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# g++ and python3-dev stay: Triton compiles its launchers and Inductor its host code when
# vLLM starts.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ python3 python3-dev python3-venv ${EXTRA_PACKAGES} \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY ci/image/inside/install.py /opt/hipstack/
RUN --mount=type=cache,target=/root/.cache/pip python3 /opt/hipstack/install.py torch

# The list of requirements is a stage of its own: while it stays the same, so does the layer
# with the packages, whatever changes in the wheel.
FROM torch AS requirements
ARG ARCH
RUN --mount=type=bind,from=wheel,target=/wheel \
    python3 /opt/hipstack/install.py requirements /wheel "${ARCH}" > /requirements.txt

# --- what runs -----------------------------------------------------------------------------
FROM torch AS runtime
ARG ARCH
ARG PIP_INDEX_URL
ARG ANY_TORCH
COPY --from=requirements /requirements.txt /opt/hipstack/
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 /opt/hipstack/install.py packages /opt/hipstack/requirements.txt
RUN --mount=type=bind,from=wheel,target=/wheel \
    python3 /opt/hipstack/install.py wheel /wheel "${ARCH}"
COPY LICENSE ci/image/inside/healthcheck.py /opt/hipstack/
COPY tuned/ /opt/hipstack/tuned/

# Any user may run it: the home and the caches are writable for all, with the sticky bit, as
# /tmp is.  The groups let `--group-add video --group-add render` work by name; their numbers
# are the host's business, so numbers are safer (docs/image.md).
RUN for group in video render; do \
        getent group "${group}" >/dev/null || groupadd --system "${group}"; \
    done \
    && groupadd --gid 2000 vllm \
    && useradd --uid 2000 --gid 2000 --groups video,render --home-dir /home/vllm vllm \
    && install -d -m 1777 /home/vllm /cache /cache/huggingface /cache/vllm \
    && python3 /opt/hipstack/install.py tuned /opt/hipstack/tuned "${ARCH}"

# PATH, VIRTUAL_ENV: the environment with vLLM, for every program that is started here.
# HOME: one that every user can write, for those that /etc/passwd does not know.
# USER, LOGNAME: torch asks for the user's name, which such a user does not have.
# XDG_CACHE_HOME: one place for all caches (vLLM's, Triton's within it, comgr's) to mount.
# HF_HOME: models, apart from the other caches, since they are large and shared by hosts.
# MIOPEN_*: MIOpen looks at HOME alone.
# HSA_NO_SCRATCH_RECLAIM: RCCL needs it since ROCm 7.1, says upstream's base image.
# HSA_ENABLE_IPC_MODE_LEGACY: trouble with pinned GPU memory in the new IPC mode, says
#   upstream's image (https://github.com/ROCm/rocm-libraries/issues/6266).
# PYTORCH_NVML_BASED_CUDA_CHECK: torch.cuda.is_available() must not initialise HIP in a
#   process that forks later; upstream sets it.
# TOKENIZERS_PARALLELISM: tokenizers' threads and forked workers do not go together;
#   upstream sets it.
# Left out of upstream's: HIP_FORCE_DEV_KERNARG and SAFETENSORS_FAST_GPU, whose effect on
# these cards nobody has shown; `docker run -e` sets them.
# hadolint ignore=DL3064
ENV PATH=/opt/vllm/bin:${PATH} \
    VIRTUAL_ENV=/opt/vllm \
    HOME=/home/vllm \
    USER=vllm \
    LOGNAME=vllm \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    MIOPEN_USER_DB_PATH=/cache/miopen \
    MIOPEN_CUSTOM_CACHE_DIR=/cache/miopen \
    HSA_NO_SCRATCH_RECLAIM=1 \
    HSA_ENABLE_IPC_MODE_LEGACY=1 \
    PYTORCH_NVML_BASED_CUDA_CHECK=1 \
    TOKENIZERS_PARALLELISM=false

# What `python3 -m ci.image build` fills in.
ARG BASE_IMAGE
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=
ARG PIN=0.31.0
ARG PIN_COMMIT=db9527a46873454610df6dbedf79a36d6bf1a7f6
ARG SET_HASH=unknown
ARG PATCHES=
LABEL org.opencontainers.image.title="hipstack" \
      org.opencontainers.image.description="vLLM for AMD GPUs with the hipstack patches" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      hipstack.arches="${ARCH}" \
      hipstack.pin="${PIN}" \
      hipstack.pin.commit="${PIN_COMMIT}" \
      hipstack.set-hash="${SET_HASH}" \
      hipstack.patches="${PATCHES}"

USER 2000:2000
WORKDIR /home/vllm
VOLUME ["/cache"]
EXPOSE 8000
# Loading a large model takes long, and so may a first start's compiling.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m --retries=3 \
    CMD ["/opt/vllm/bin/python", "/opt/hipstack/healthcheck.py"]
ENTRYPOINT ["vllm", "serve"]
