"""Exits with 0 where the service in this container can serve; for the image's HEALTHCHECK. Standard library alone."""

import os
import sys
import urllib.error
import urllib.request


def main() -> None:
    """Ask readyz, with the first key where there is one, and say what it says."""
    key = os.environ.get("ROUNDHOUSE_API_KEYS", "").partition(",")[0].strip()
    port = os.environ.get("ROUNDHOUSE_PORT", "8080")
    request = urllib.request.Request(f"http://127.0.0.1:{port}/readyz")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:  # noqa: S310
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
