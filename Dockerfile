# One image per role:
#
#   docker build --build-arg ROLE=router -t noria-router .
#
# ROLE: router, tokenizer, worker-cpu, worker-cuda. For the workers TORCH_INDEX is the address of
# PyTorch's wheels (CPU, or CUDA 13.0); for worker-cuda FLASH_ATTN may be the address of a
# flash-attn 2.8.3 wheel for Python 3.11, torch 2.13 and that CUDA. Without it attention runs on
# Noria's Triton kernels.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG ROLE
ARG TORCH_INDEX=
ARG FLASH_ATTN=
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The kernels for CPUs are compiled here; their image has no compiler.
# hadolint ignore=DL3008
RUN if [ "${ROLE}" = worker-cpu ]; then \
      apt-get update && apt-get install -y --no-install-recommends g++ && \
      rm -rf /var/lib/apt/lists/*; \
    fi
WORKDIR /src
COPY . .
RUN PYTHON=python3 images/install.sh "${ROLE}" /opt/noria

FROM python:${PYTHON_VERSION}-slim-bookworm
ARG ROLE
# Triton compiles its kernels for the card at the first start.
# hadolint ignore=DL3008
RUN if [ "${ROLE}" = worker-cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
      rm -rf /var/lib/apt/lists/*; \
    fi && \
    groupadd --gid 65532 noria && \
    useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/cache/noria noria && \
    install -d -o noria -g noria /var/cache/noria
COPY --from=build /opt/noria /opt/noria
ENV PATH=/opt/noria/bin:$PATH \
    NORIA_CACHE_DIR=/var/cache/noria \
    TRITON_CACHE_DIR=/var/cache/noria/triton \
    PYTHONUNBUFFERED=1
USER 65532:65532
# All that is ever written: downloaded models and compiled kernels.
VOLUME /var/cache/noria
ENTRYPOINT ["noria-service"]
