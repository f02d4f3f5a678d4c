# Turn a ROCm image of the pinned vLLM into one with this stack's wheel.
#
#   docker build --build-arg ARCH=gfx1201 -t hipstack:gfx1201 .
#
# BASE_IMAGE must hold ROCm, a ROCm torch and vLLM's requirements: upstream's release image
# of the pinned version is made for that.  Both stages use it, so that the wheel is built
# with the Python and the torch that will run it.
ARG BASE_IMAGE=vllm/vllm-openai-rocm:v0.31.0

FROM ${BASE_IMAGE} AS build
ARG ARCH=gfx1201
ARG EXTENSIONS=auto
USER root
WORKDIR /hipstack
COPY . .
RUN ./build.sh --arch "${ARCH}" --extensions "${EXTENSIONS}" --out /hipstack/dist

FROM ${BASE_IMAGE}
ARG ARCH=gfx1201
LABEL org.opencontainers.image.title="hipstack" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.hipstack.arch="${ARCH}"
COPY --from=build /hipstack/dist /opt/hipstack
# --no-deps: nothing may replace the image's torch and triton.
RUN python3 -m pip install --no-cache-dir --no-deps --force-reinstall /opt/hipstack/*.whl
ENTRYPOINT ["vllm", "serve"]
