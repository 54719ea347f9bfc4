# The service with the embedded engine. Mount a configuration at /etc/roundhouse.yaml; state is kept in /state.
# For llama-server's GPU builds, copy this onto upstream's image and name /app/llama-server in `command`.
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY transport transport
COPY workers workers
COPY service service
RUN pip install --no-cache-dir --constraint constraints.txt '.[embedded]' \
    && useradd --create-home roundhouse \
    && install --directory --owner roundhouse /state
COPY deploy/roundhouse.yaml /etc/roundhouse.yaml

USER roundhouse
WORKDIR /state
ENV ROUNDHOUSE_CONFIG=/etc/roundhouse.yaml ROUNDHOUSE_STATE_DIR=/state
VOLUME /state
EXPOSE 8080
HEALTHCHECK --interval=10s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/healthz', timeout=3)"]
ENTRYPOINT ["roundhouse"]
CMD ["serve"]
