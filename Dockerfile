# Two images. `engine`, the default: kvguard in front of vLLM, on vLLM's own image.
#   docker build --build-arg ENGINE_IMAGE=vllm/vllm-openai:v0.32.0 --tag kvguard-vllm .
# `kvguard`: without an engine, for the chart's init container, `kvguard verify` and the like.
#   docker build --target kvguard --tag kvguard:0.1.0 .
# Both carry the same folder /opt/kvguard, which an interpreter of Python 3.11 to 3.13 runs without touching its own packages.
# Another package index: --build-arg PIP_INDEX_URL=…, which pip reads.

ARG PYTHON_IMAGE=python:3.13.9-slim-bookworm
ARG ENGINE_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/source/constraints.txt SOURCE_DATE_EPOCH=315532800
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvguard kvguard
RUN ["python3", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "/wheels", "."]
COPY deploy/image deploy/image
RUN ["python3", "deploy/image/build_tree.py", "/wheels", "constraints.txt", "/opt/kvguard"]

FROM ${PYTHON_IMAGE} AS kvguard
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvguard" \
      org.opencontainers.image.description="Establishes, enforces and records the KV cache that a vLLM engine really runs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/kvguard /opt/kvguard
ENV HOME=/tmp XDG_CACHE_HOME=/tmp/cache XDG_STATE_HOME=/tmp/state PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 9464
HEALTHCHECK --interval=30s --timeout=6s --start-period=30s CMD ["python3", "-I", "-S", "/opt/kvguard/health.py"]
ENTRYPOINT ["python3", "-I", "-S", "/opt/kvguard"]
CMD ["--help"]

FROM ${ENGINE_IMAGE} AS engine
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG ENGINE_IMAGE
LABEL org.opencontainers.image.title="kvguard with vLLM" \
      org.opencontainers.image.description="vLLM behind kvguard, which proves the KV cache that runs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${ENGINE_IMAGE}"
COPY --from=build /opt/kvguard /opt/kvguard
# Engines look up a user and a home; this user has neither in the image.
ENV HOME=/tmp USER=kvguard XDG_CACHE_HOME=/tmp/cache XDG_STATE_HOME=/tmp/state VLLM_NO_USAGE_STATS=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000 9464
HEALTHCHECK --interval=30s --timeout=6s --start-period=30s CMD ["python3", "-I", "-S", "/opt/kvguard/health.py"]
ENTRYPOINT ["python3", "-I", "-S", "/opt/kvguard"]
CMD ["--help"]
