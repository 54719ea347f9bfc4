# The service with the embedded engine. Mount a configuration at /etc/roundhouse.yaml; state is kept in /state.
# For llama-server's GPU builds, copy this onto upstream's image and name /app/llama-server in `command`.
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY transport transport
COPY workers workers
COPY service service
COPY client/roundhouse_client client/roundhouse_client
# llama.cpp's server computes with it, and the slim image has none.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --constraint constraints.txt '.[embedded]' \
    && useradd --create-home --uid 10001 roundhouse \
    && install --directory --mode 0700 --owner roundhouse /state
COPY deploy/roundhouse.yaml /etc/roundhouse.yaml

USER 10001
WORKDIR /state
ENV ROUNDHOUSE_CONFIG=/etc/roundhouse.yaml ROUNDHOUSE_STATE_DIR=/state
VOLUME /state
EXPOSE 8080
# Healthy is what can serve: every model has a ready worker. A model that loads for longer needs a longer start period.
COPY deploy/healthcheck.py /usr/local/lib/roundhouse-healthcheck.py
HEALTHCHECK --interval=10s --start-period=10m --timeout=5s CMD ["python", "/usr/local/lib/roundhouse-healthcheck.py"]
ENTRYPOINT ["roundhouse"]
CMD ["serve"]
