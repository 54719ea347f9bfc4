"""This machine's package sources, handed to a root on it and read again by every run.

Nothing of them is stored: they reach a root as environment variables, and as mounts below its ``/run``.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

APT = ("acquire::http", "acquire::https", "acquire::ftp", "acquire::check-", "acquire::retries", "acquire::proxy")
PIP_KEEPS = frozenset({"cert", "require-virtualenv", "user", "target", "prefix", "cache-dir"})  # machine settings
CERTIFICATES = "/run/host/ca.crt"
APT_CONFIG = "/run/host/apt.conf"


def _output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def debian_archive() -> str:
    """Return the address from which apt gets Debian, in any form of its sources."""
    form = "$(ORIGIN)\t$(LABEL)\t$(COMPONENT)\t$(REPO_URI)"  # the label separates the archive from its updates
    for line in _output("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines():
        *what, address = line.split("\t")
        if what == ["Debian", "Debian", "main"]:
            return address
    raise RuntimeError("apt knows no archive of Debian, or has no lists: apt-get update")


def apt_options() -> list[str]:
    """Return how apt fetches: proxies, certificates, dates."""
    lines = _output("apt-config", "dump", "--no-empty").splitlines()
    return [line for line in lines if line.lower().startswith(APT)]


def _pip_settings() -> dict[str, str]:
    settings = {}
    lines = _output(sys.executable, "-m", "pip", "config", "list").splitlines()
    for line in sorted(
        lines, key=lambda line: (line.startswith(":env:"), line.startswith("install."))
    ):  # the last wins
        name, _, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        if section.strip(":").split(".")[0] in {"global", "install", "env"} and key not in PIP_KEEPS:
            settings["PIP_" + key.upper().replace("-", "_")] = " ".join(str(ast.literal_eval(quoted)).split())
    return settings


def _folders_of(settings: dict[str, str]) -> set[Path]:
    """Return the folders that pip's settings name; links of an index lead out of its folder, into its parent's."""
    words = " ".join(settings.get(f"PIP_{key}", "") for key in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS")).split()
    paths = {Path(unquote(urlsplit(word).path)) for word in words if not word.startswith("http")}
    return {path.parent if path.name == "simple" else path for path in paths if path.is_absolute() and path.exists()}


def _bind_files_of(settings: dict[str, str]) -> list[tuple[Path, str]]:
    """Name the constraint files as they are called in the root, and return their mounts."""
    binds = []
    words = settings.get("PIP_CONSTRAINT", "").split()
    for number, word in enumerate(words):
        if Path(word).is_file():
            words[number] = f"/run/host/constraints-{number}.txt"
            binds.append((Path(word), words[number]))
    if words:
        settings["PIP_CONSTRAINT"] = " ".join(words)
    return binds


def _certificates() -> Path | None:
    names = (os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt")
    return next((Path(name) for name in names if name and Path(name).is_file()), None)


class Host:
    """Settings of a step that fetches packages: ``environment``, and ``binds`` of our files to places in the root."""

    def __init__(self, folder: Path) -> None:
        settings = _pip_settings()
        files = _bind_files_of(settings)
        proxies = {"http_proxy", "https_proxy", "no_proxy", "all_proxy"}
        self.environment = settings | {name: value for name, value in os.environ.items() if name.lower() in proxies}
        self.environment |= {"APT_CONFIG": APT_CONFIG, "DEBIAN_FRONTEND": "noninteractive"}
        self.binds = [(path, str(path)) for path in sorted(_folders_of(settings))] + files
        options, certificates = apt_options(), _certificates()
        if certificates is not None:
            self.binds.append((certificates, CERTIFICATES))
            self.environment |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), CERTIFICATES)
            options.append(f'Acquire::https::CAInfo "{CERTIFICATES}";')
        configuration = folder / "apt.conf"
        configuration.write_text("\n".join([*options, ""]))
        self.binds += [(configuration, APT_CONFIG), (Path("/etc/hosts"), "/etc/hosts")]
        self.binds.append((Path("/etc/resolv.conf").resolve(), "/etc/resolv.conf"))
        if Path("/etc/apt/auth.conf.d").is_dir():
            self.binds.append((Path("/etc/apt/auth.conf.d"), "/etc/apt/auth.conf.d"))
