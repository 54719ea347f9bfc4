"""A hub's models: the commit and the files that a name means now, and how they are fetched.

Source: Hugging Face, "Hub API Endpoints": ``/api/models/…/revision/…?blobs=true``, ``/…/resolve/…``.
"""

import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import httpx2
import msgspec

from workers.errors import ModelUnavailable
from workers.files.atomic import replace_file
from workers.models.download import SILENCE_S, LeastRate, LoggedProgress, Progress, RemoteFile, fetch
from workers.models.hub_cache import MOST_PAGE_BYTES, HubSettings, find_kept, folder_of, is_settled, note_meaning
from workers.models.hub_name import GGUF, HubName, choose_files

MOST_FILES: Final = 10_000
LISTING_S: Final = 60.0  # for a whole listing
REFUSED: Final = frozenset({httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN})
logger = logging.getLogger(__name__)

Digits = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{40}|[0-9a-f]{64})$")]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**60)]


class HubUnreachable(ModelUnavailable):
    """A hub does not answer about a model for now: a cached one may do."""


class LargeFile(msgspec.Struct, frozen=True):
    """A file that Git stores elsewhere, by its SHA-256."""

    sha256: Digits
    size: Size


class HubFile(msgspec.Struct, frozen=True, rename="camel"):
    """A file of a repository; ``blob_id`` is Git's."""

    rfilename: str
    size: Size | None = None
    blob_id: Digits | None = None
    lfs: LargeFile | None = None

    @property
    def digest(self) -> str | None:
        """The digest that names it in the cache."""
        return self.blob_id if self.lfs is None else self.lfs.sha256

    @property
    def length(self) -> int | None:
        """Its bytes; None if the hub does not report them."""
        return self.size if self.lfs is None else self.lfs.size


class Listing(msgspec.Struct, frozen=True):
    """A revision of a repository."""

    sha: Digits
    siblings: Annotated[list[HubFile], msgspec.Meta(max_length=MOST_FILES)]


class FoundModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the hub has it now: ``name`` has its commit and its file, ``files`` must be fetched."""

    name: HubName
    files: list[HubFile]

    @property
    def is_gguf(self) -> bool:
        """Whether llama.cpp serves it."""
        return self.files[-1].rfilename.endswith(GGUF)

    @property
    def weights_bytes(self) -> int:
        """The size of all its files, which are nearly all weights."""
        return sum(file.length or 0 for file in self.files)


def find_model(name: HubName, settings: HubSettings) -> FoundModel:
    """Ask the hub what a name means now.

    Raises:
        HubUnreachable: the hub does not answer, or offline mode forbids asking.
        ModelUnavailable: it has no such model, or none that this token may read.
    """
    if settings.is_offline:
        raise HubUnreachable(f"{name}: HF_HUB_OFFLINE forbids a fetch, and the cache does not have all of it")
    with _open_session(settings) as session:
        return _find(name, settings, session)


def ensure_hub_model(name: HubName, settings: HubSettings, progress: Progress | None = None) -> Path:
    """Return a model's file or folder; missing files are fetched, and a complete commit needs no request.

    Raises:
        ModelUnavailable: it cannot be fetched; the message says why.
    """
    kept = find_kept(name, settings.cache)
    if kept is not None and is_settled(name, kept, settings.cache):
        return kept
    try:
        found = find_model(name, settings)
    except HubUnreachable as error:
        if kept is None or (name.is_of_commit and name.file is None):  # it may mean another file than the cached one
            raise
        logger.warning("%s; what was fetched before is used", error)
        return kept
    try:
        with _open_session(settings) as session:
            path = _fetch_all(found, name.revision, settings, session, progress or LoggedProgress())
            if found.is_gguf:
                note_meaning(name, found.name.revision, str(found.name.file), settings.cache)
            return path
    except OSError as error:
        raise ModelUnavailable(f"{name} cannot be kept in {settings.cache}: {error}") from error


def _open_session(settings: HubSettings) -> httpx2.Client:
    # A redirect to another host drops this header: the hosts of files must not see it.
    if settings.token is not None and not re.fullmatch("[!-~]+", settings.token):
        raise ModelUnavailable("the hub's token in HF_TOKEN, or in its file, has characters that no token has")
    headers = {} if settings.token is None else {"Authorization": f"Bearer {settings.token}"}
    return httpx2.Client(headers=headers, follow_redirects=True, timeout=SILENCE_S)


def _find(name: HubName, settings: HubSettings, session: httpx2.Client) -> FoundModel:
    url = f"{settings.endpoint}/api/models/{name.owner}/{name.repository}/revision/{name.revision}?blobs=true"
    rate = LeastRate(LISTING_S)
    try:
        with rate, session.stream("GET", url, headers=rate.headers, extensions=rate.extensions) as answer:
            _check(name, answer, has_token=settings.token is not None)
            listing = msgspec.json.decode(_page(name, answer), type=Listing)
    except httpx2.InvalidURL as error:
        raise ModelUnavailable(f"{name}: HF_ENDPOINT is no address: {error}") from error
    except httpx2.HTTPError as error:
        because = rate.fault or str(error) or type(error).__name__
        raise HubUnreachable(f"{name}: {settings.endpoint} does not answer: {because}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelUnavailable(f"{name}: {settings.endpoint} lists no files of it: {error}") from error
    files = {file.rfilename: file for file in listing.siblings}
    chosen = [files[path] for path in choose_files(name, files.keys())]
    unknown = next((file.rfilename for file in chosen if file.digest is None), None)
    if unknown is not None:
        raise ModelUnavailable(f"{name}: {settings.endpoint} gives no digest of {unknown}")
    first = chosen[0].rfilename
    pinned = msgspec.structs.replace(name, revision=listing.sha, file=first if first.endswith(GGUF) else None)
    return FoundModel(name=pinned, files=chosen)


def _check(name: HubName, answer: httpx2.Response, *, has_token: bool) -> None:
    if answer.status_code in REFUSED:
        why = "its terms are not accepted, or the token may not read it" if has_token else "give a token in HF_TOKEN"
        raise ModelUnavailable(f"{name}: {answer.url.host} answers {answer.status_code}: {why}, or it does not exist")
    if answer.status_code == httpx2.codes.NOT_FOUND:
        raise ModelUnavailable(f"{name}: {answer.url.host} has no such repository or revision")
    answer.raise_for_status()


def _page(name: HubName, answer: httpx2.Response) -> bytes:
    page = bytearray()
    for piece in answer.iter_bytes():
        page += piece
        if len(page) > MOST_PAGE_BYTES:
            raise ModelUnavailable(f"{name}: the answer of {answer.url.host} about it is too large")
    return bytes(page)


def _fetch_all(
    found: FoundModel, revision: str, settings: HubSettings, session: httpx2.Client, progress: Progress
) -> Path:
    name, folder = found.name, folder_of(found.name, settings.cache)
    snapshot = folder / "snapshots" / name.revision
    blobs = {file.rfilename: folder / "blobs" / str(file.digest) for file in found.files}
    missing = {file.rfilename: file for file in found.files if not blobs[file.rfilename].is_file()}
    _check_room(name, sum(file.length or 0 for file in missing.values()), settings.cache)
    for path, blob in blobs.items():
        file = missing.get(path)
        if file is not None:
            url = f"{settings.endpoint}/{name.owner}/{name.repository}/resolve/{name.revision}/{path}"
            remote = RemoteFile(url=url, digest=str(file.digest), size=file.length, name=path.rpartition("/")[2])
            fetch(session, remote, blob, progress)
        _link(snapshot / path, blob)
    if revision != name.revision:
        replace_file(folder / "refs" / revision, name.revision.encode())
    return snapshot / found.files[0].rfilename if found.is_gguf else snapshot


def _check_room(name: HubName, needed: int, cache: Path) -> None:
    """Check that missing files fit the disk before the first is fetched."""
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise ModelUnavailable(
            f"{name}: {needed / 1e9:,.1f} GB are missing, and {free / 1e9:,.1f} GB are free in {cache}"
        )


def _link(link: Path, blob: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)  # a link to a missing file
        with suppress(FileExistsError):  # another program's, to the same
            link.symlink_to(os.path.relpath(blob, link.parent))
