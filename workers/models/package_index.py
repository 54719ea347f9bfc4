"""The package indexes that pip and uv use on this machine: a wheel that holds a model is found there.

Source: pip's user guide, "Configuration"; uv's reference, "Settings" and "Environment variables".
"""

import configparser
import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import httpx2
import msgspec
from unearth import PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import Fetcher
from unearth.fetchers.sync import PyPIClient

from workers.errors import ModelUnavailable

ETC: Final = Path("/etc")
PIP_SECTIONS: Final = ("global", "download")  # the later one wins
LARGEST_SETTINGS: Final = 1024 * 1024  # bytes of a settings file
logger = logging.getLogger(__name__)


class IndexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of wheels on this machine; ``index`` None is the public index."""

    index: str | None = None
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    certificates: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()

    def over(self, lower: "IndexSettings") -> "IndexSettings":
        """Return these settings, with ``lower`` for those that are unset; lists are joined."""
        return IndexSettings(
            index=self.index or lower.index,
            extra_indexes=self.extra_indexes + lower.extra_indexes,
            find_links=self.find_links + lower.find_links,
            no_index=self.no_index or lower.no_index,
            certificates=self.certificates or lower.certificates,
            proxy=self.proxy or lower.proxy,
            trusted_hosts=self.trusted_hosts + lower.trusted_hosts,
        )


def read_settings(environment: Mapping[str, str], home: Path, prefix: Path, machine: Path = ETC) -> IndexSettings:
    """Read the settings of the environment, the user and the machine; ``prefix`` is the Python environment's.

    An unreadable file is skipped with a warning, since Roundhouse was installed without it.
    """
    settings = IndexSettings()
    for path in _pip_files(environment, home, prefix, machine):
        settings = _read(path, _of_pip).over(settings)
    for path in _uv_files(environment, home, machine):
        settings = _read(path, _of_uv).over(settings)
    return _of_environment(environment).over(settings)


def find_wheel(name: str, project: str, settings: IndexSettings, session: PyPIClient) -> Iterator[str]:
    """Find addresses of the wheel ``name`` of a project, source by source.

    Raises:
        ModelUnavailable: no source has it; the message gives each source's answer.
    """
    faults: list[str] = []
    has_any = False
    for label, make_finder in _sources(settings, session):
        try:
            for package in make_finder().find_all_packages(project):
                if package.link.filename == name:
                    has_any = True
                    yield package.link.url_without_fragment
                    break
            else:
                faults.append(f"{label} has no {name}")
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
            faults.append(f"{label}: {str(error) or type(error).__name__}")
    if not has_any:
        raise ModelUnavailable(
            "; ".join(faults) or "pip or uv is configured with neither an index nor a folder of wheels"
        )


def open_session(settings: IndexSettings) -> PyPIClient:
    """Return a session for indexes, with the proxy and certificates of the settings; it never prompts for a password.

    Raises:
        ModelUnavailable: the certificates cannot be read.
    """
    trust = httpx2.create_ssl_context()
    if settings.certificates is not None:
        is_folder = Path(settings.certificates).is_dir()
        try:
            trust.load_verify_locations(**{"capath" if is_folder else "cafile": settings.certificates})
        except OSError as error:
            raise ModelUnavailable(f"the certificates in {settings.certificates} cannot be used: {error}") from error
    indexes = [index for index in (settings.index, *settings.extra_indexes) if index]
    session = PyPIClient(trusted_hosts=settings.trusted_hosts, verify=trust, proxy=settings.proxy)
    session.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes)
    return session


def _sources(settings: IndexSettings, session: PyPIClient) -> Iterator[tuple[str, Callable[[], PackageFinder]]]:
    finder = partial(PackageFinder, session=cast("Fetcher", session), ignore_compatibility=True)
    for place in dict.fromkeys(settings.find_links):
        yield _without_password(place), partial(finder, find_links=[place])
    if settings.no_index:
        return
    if settings.index is None:
        yield "the package index", finder  # unearth knows its address
    for index in dict.fromkeys(filter(None, (settings.index, *settings.extra_indexes))):
        yield _without_password(index), partial(finder, index_urls=[index])


def _without_password(address: str) -> str:
    scheme, mark, rest = address.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else address


# Files


def _pip_files(environment: Mapping[str, str], home: Path, prefix: Path, machine: Path) -> list[Path]:
    """List the files that pip reads, the strongest last; PIP_CONFIG_FILE set to the null device disables all."""
    own = environment.get("PIP_CONFIG_FILE")
    if own == "/dev/null":
        return []
    paths = [Path(folder) / "pip" / "pip.conf" for folder in reversed(_config_folders(environment, machine))]
    paths += [machine / "pip.conf", home / ".pip" / "pip.conf", _config_home(environment, home) / "pip" / "pip.conf"]
    return [*paths, prefix / "pip.conf", *([Path(own)] if own else [])]


def _uv_files(environment: Mapping[str, str], home: Path, machine: Path) -> list[Path]:
    if environment.get("UV_NO_CONFIG"):
        return []
    if own := environment.get("UV_CONFIG_FILE"):
        return [Path(own)]
    folders = [machine, *map(Path, reversed(_config_folders(environment, machine))), _config_home(environment, home)]
    return [folder / "uv" / "uv.toml" for folder in folders]


def _config_folders(environment: Mapping[str, str], machine: Path) -> list[str]:
    named = [folder for folder in environment.get("XDG_CONFIG_DIRS", "").split(":") if folder]
    return named or [str(machine / "xdg")]


def _config_home(environment: Mapping[str, str], home: Path) -> Path:
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config")


def _read(path: Path, parse: Callable[[str], IndexSettings]) -> IndexSettings:
    try:
        with path.open("rb") as file:
            return parse(file.read(LARGEST_SETTINGS).decode())
    except FileNotFoundError:
        return IndexSettings()
    except (OSError, ValueError, TypeError, AttributeError, LookupError, configparser.Error) as error:
        logger.warning("%s is ignored: %s", path, error)
        return IndexSettings()


def _of_pip(text: str) -> IndexSettings:
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    said = {
        name.replace("_", "-"): value
        for section in PIP_SECTIONS
        if parser.has_section(section)
        for name, value in parser.items(section)
    }
    return IndexSettings(
        index=said.get("index-url"),
        extra_indexes=_words(said.get("extra-index-url")),
        find_links=_words(said.get("find-links")),
        no_index=_is_true(said.get("no-index")),
        certificates=said.get("cert"),
        proxy=said.get("proxy"),
        trusted_hosts=_words(said.get("trusted-host")),
    )


def _of_uv(text: str) -> IndexSettings:
    said: dict[str, Any] = tomllib.loads(text)
    named = [index for index in said.get("index", []) if not index.get("explicit")]
    default = [str(index["url"]) for index in named if index.get("default")]
    return IndexSettings(
        index=default[0] if default else said.get("index-url"),
        extra_indexes=(
            *(str(index["url"]) for index in named if not index.get("default")),
            *map(str, said.get("extra-index-url", ())),
        ),
        find_links=tuple(map(str, said.get("find-links", ()))),
        no_index=said.get("no-index") is True,
        trusted_hosts=tuple(map(str, said.get("allow-insecure-host", ()))),
    )


def _of_environment(environment: Mapping[str, str]) -> IndexSettings:
    said = environment.get
    default = said("UV_DEFAULT_INDEX") or said("UV_INDEX_URL")
    return IndexSettings(
        index=_address_of(default) if default else said("PIP_INDEX_URL"),
        extra_indexes=(
            *map(_address_of, _words(said("UV_INDEX"))),
            *_words(said("UV_EXTRA_INDEX_URL")),
            *_words(said("PIP_EXTRA_INDEX_URL")),
        ),
        find_links=(*said("UV_FIND_LINKS", "").replace(",", " ").split(), *_words(said("PIP_FIND_LINKS"))),
        no_index=_is_true(said("UV_NO_INDEX")) or _is_true(said("PIP_NO_INDEX")),
        certificates=said("PIP_CERT") or said("SSL_CERT_FILE") or said("REQUESTS_CA_BUNDLE"),
        proxy=said("PIP_PROXY"),
        trusted_hosts=(*_words(said("UV_INSECURE_HOST")), *_words(said("PIP_TRUSTED_HOST"))),
    )


def _address_of(index: str) -> str:
    """Return the address of an index that may have a name: ``name=https://…``."""
    name, mark, address = index.partition("=")
    return address if mark and "://" not in name else index


def _words(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").split())


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in {"1", "true", "yes", "on", "y", "t"}
