# The service, by default with the embedded engine. State is kept in /state, the configuration is /etc/roundhouse.yaml.
# BASE may be any image of Debian or Ubuntu that has an engine, and so its GPU builds:
#   docker build --build-arg BASE=ghcr.io/ggml-org/llama.cpp:server-cuda .   its program is /app/llama-server
#   docker build --build-arg BASE=vllm/vllm-openai:latest .                  its program is vllm
ARG BASE=python:3.12-slim

# What runs needs: a Python where the base has none, what llama.cpp computes with, and an init that reaps.
# hadolint ignore=DL3006
FROM ${BASE} AS base
# Whoever the base runs as; the last stage has a user of its own.
# hadolint ignore=DL3002
USER 0
# The base decides which versions there are.
# hadolint ignore=DL3008
RUN apt-get update \
    && { python3 -c 'import ensurepip' || apt-get install --yes --no-install-recommends python3 python3-venv; } \
    && apt-get install --yes --no-install-recommends ca-certificates libgomp1 tini \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
ARG EXTRAS=
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY roundhouse roundhouse
COPY transport transport
COPY workers workers
COPY service service
COPY client/pyproject.toml client/README.md client/LICENSE client/
COPY client/roundhouse_client client/roundhouse_client
RUN python3 -m venv /opt/roundhouse \
    && /opt/roundhouse/bin/pip install --no-cache-dir --constraint constraints.txt ./client ".${EXTRAS:+[$EXTRAS]}"

FROM base AS roundhouse
# Its home is the volume, so that caches of engines have a place where all else is read-only.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /state roundhouse \
    && install --directory --mode 0700 --owner roundhouse --group roundhouse /state
COPY --from=build /opt/roundhouse /opt/roundhouse
COPY deploy/roundhouse.yaml /etc/roundhouse.yaml
COPY deploy/healthcheck.py /usr/local/lib/roundhouse-healthcheck.py
ENV PATH=/opt/roundhouse/bin:$PATH HOME=/state
ENV ROUNDHOUSE_CONFIG=/etc/roundhouse.yaml ROUNDHOUSE_STATE_DIR=/state
USER 10001:10001
WORKDIR /state
VOLUME /state
EXPOSE 8080
# Healthy is what can serve: every model has a ready worker. A model that loads for longer needs a longer start period.
HEALTHCHECK --interval=10s --start-period=10m --timeout=5s CMD ["python", "/usr/local/lib/roundhouse-healthcheck.py"]
ENTRYPOINT ["tini", "--", "roundhouse"]
CMD ["serve"]
