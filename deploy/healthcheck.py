"""Exits with 0 if the service in this container can serve; for the image's HEALTHCHECK."""

import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def main() -> None:
    """Ask /readyz with the first key, if any, and print its answer; with only hashes of keys, ask /healthz."""
    server = configured_server()
    named = [entry for entry in server.get("keys") or [] if isinstance(entry, dict)]
    keys = os.environ.get("ROUNDHOUSE_API_KEYS", "").split(",") + list(server.get("api_keys") or [])
    keys += [entry.get("key") or "" for entry in named]
    key = next((str(key).strip() for key in keys if str(key).strip()), None)
    path = "/healthz" if not key and (named or server.get("keys_file")) else "/readyz"
    port = os.environ.get("ROUNDHOUSE_PORT") or server.get("port", 8080)
    host = os.environ.get("ROUNDHOUSE_HOST") or server.get("host", "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - the service's address, not ours
    request = urllib.request.Request(f"http://{host}:{port}{path}")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:  # noqa: S310
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())
    except OSError as error:
        sys.exit(str(error))


def configured_server() -> dict[str, Any]:
    """Return the configuration's ``server``, with its variables replaced as the service does."""
    try:
        text = Path(os.environ["ROUNDHOUSE_CONFIG"]).read_text(encoding="utf-8")
        document = yaml.safe_load(VARIABLE.sub(lambda name: os.environ.get(name[1], name[2] or ""), text))
    except (KeyError, OSError, ValueError, yaml.YAMLError):
        return {}
    server = document.get("server") if isinstance(document, dict) else None
    return server if isinstance(server, dict) else {}


if __name__ == "__main__":
    main()
