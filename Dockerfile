# syntax=docker/dockerfile:1
# One image for everything: the Prefect server, workers of both kinds, and the runs. Built and used by deployments/compose
# and deployments/kubernetes. What is installed is pinned by constraints.txt; torch's own wheel brings CUDA's libraries,
# so the final stage needs the base image alone, and only the stage that compiles FlashAttention has the toolkit.
#
# CUDA must be the version that the pinned torch was built with (torch 2.13.0: 13.0), or FlashAttention refuses to build.
ARG CUDA=13.0.3

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12-dev python3.12-venv g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/virnucpro
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt deployments/image-constraints.txt /build/
RUN python3.12 -m venv .venv \
    && .venv/bin/pip install --constraint /build/constraints.txt --constraint /build/image-constraints.txt \
        torch numpy ninja packaging psutil setuptools wheel
# GPUs to compile kernels for: 80 is A100, 90 is H100 and H200, 100 is B200, 120 is RTX Blackwell. Each takes long.
ARG GPU_ARCHITECTURES="80;90"
# Compilers at a time: each takes 8 GB of memory or more.
ARG MAX_JOBS=4
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="${GPU_ARCHITECTURES}" MAX_JOBS="${MAX_JOBS}" NVCC_THREADS=1 \
    .venv/bin/pip install --constraint /build/constraints.txt --constraint /build/image-constraints.txt \
        --no-build-isolation flash-attn
COPY . .
RUN .venv/bin/pip install --constraint constraints.txt --constraint deployments/image-constraints.txt \
        --editable '.[flash,parquet]' prefect-kubernetes \
    && .venv/bin/pip check \
    && .venv/bin/python -m compileall -q virnucpro flows

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /var/lib/virnucpro --shell /usr/sbin/nologin virnucpro \
    && install -d -o 10001 -g 10001 /srv/virnucpro
COPY --from=build /opt/virnucpro /opt/virnucpro
WORKDIR /opt/virnucpro
# Only /srv/virnucpro (data) and /tmp are written: the root may be read-only.
ENV PATH=/opt/virnucpro/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    PREFECT_HOME=/tmp/prefect \
    PREFECT_SERVER_UI_STATIC_DIRECTORY=/tmp/prefect-page \
    PREFECT_SERVER_CSRF_PROTECTION_ENABLED=true \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    DO_NOT_TRACK=1 \
    PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 \
    PREFECT_WORKER_WEBSERVER_PORT=8081 \
    VIRNUCPRO_DATA_ROOTS=/srv/virnucpro
USER 10001:10001
# For the worker; the server's own check is in compose.yaml.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["/opt/virnucpro/deployments/healthy", "http://127.0.0.1:8081/health"]
ENTRYPOINT ["tini", "--", "/opt/virnucpro/deployments/with-password", "PREFECT_API_AUTH_STRING"]
CMD ["python", "-m", "flows.worker", "--pool", "virnucpro", "--with-healthcheck", "--install-policy", "never"]
