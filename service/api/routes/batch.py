"""Many jobs in one request, one per line (NDJSON); each is accepted or refused by itself."""

import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO, Final, Protocol

import anyio
import msgspec
from fastapi import Request
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from service.api.body import BYTE_ORDER_MARK, HUNG_UP
from service.api.errors.problems import describe
from service.conversations.document.limits import Limits
from service.errors import BodyMalformed, BodyTooLarge, ServiceError
from service.store.records import StoredJob
from workers.errors import OffloadCrowded

MEDIA_TYPE: Final = "application/x-ndjson"
AT_ONCE: Final = 64  # lines that are stored at the same time and share commits
BYTES_AT_ONCE: Final = 1 << 24  # bytes of such lines together, or one longer line
IN_MEMORY: Final = 1 << 20
CHUNK: Final = 1 << 16
logger = logging.getLogger(__name__)


Decode = Callable[[bytes], Awaitable[object]]


class Post(Protocol):
    """Takes one job."""

    def __call__(self, document: object, key: str | None, *, size: int) -> Awaitable[tuple[StoredJob, bool]]:
        """Return the job, and whether it is new."""


def is_batch(request: Request) -> bool:
    """Whether a request brings jobs line by line."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE


async def post_batch(
    request: Request, decode: Decode, post: Post, limits: Limits, key: str | None
) -> StreamingResponse:
    """Post every line's job; answer with a line for each, in order.

    The answer begins when the body has ended, since most clients read nothing before; until then it waits on disk.
    """
    answers: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - closed when it was sent
    number = 0
    group: list[bytes] = []
    try:
        async for line in _lines(request, limits):
            number += 1
            group.append(line)
            if len(group) == AT_ONCE or sum(map(len, group)) >= BYTES_AT_ONCE:
                await _post_group(group, number - len(group), decode, post, key, answers)
                group = []
        await _post_group(group, number - len(group), decode, post, key, answers)
    except ClientDisconnect as error:  # complete lines are accepted; posting again with a key shows which
        await _post_group(group, number - len(group), decode, post, key, answers)
        raise BodyMalformed(HUNG_UP) from error
    except BodyTooLarge as error:  # earlier lines are accepted, and the caller must learn their jobs
        await _post_group(group, number - len(group), decode, post, key, answers)
        answers.write(_line(number + 1, error))
    answers.seek(0)
    return StreamingResponse(_read(answers), media_type=MEDIA_TYPE, background=BackgroundTask(answers.close))


async def _post_group(
    lines: list[bytes], before: int, decode: Decode, post: Post, key: str | None, answers: IO[bytes]
) -> None:
    answered: dict[int, bytes] = {}

    async def post_line(number: int, line: bytes) -> None:
        try:
            document = await decode(line.removeprefix(BYTE_ORDER_MARK))
            stored, is_new = await post(document, None if key is None else f"{key}:{number}", size=len(line))
        except (ServiceError, OffloadCrowded) as error:
            answered[number] = _line(number, error)
            return
        except Exception:
            logger.exception("line %d of a batch: a defect of Roundhouse", number)
            answered[number] = _line(number, ServiceError("the service failed at this line; see its log"))
            return
        status = 202 if is_new else 200
        job = {"id": stored.id, "name": stored.name, "state": stored.state}
        answered[number] = msgspec.json.encode({"line": number, "status": status, **job}) + b"\n"

    async with anyio.create_task_group() as tasks:
        for number, line in enumerate(lines, start=before + 1):
            tasks.start_soon(post_line, number, line)
    for number in sorted(answered):
        answers.write(answered[number])


def _line(number: int, error: Exception) -> bytes:
    fields = describe(error)
    del fields["title"]
    return msgspec.json.encode({"line": number, **fields}) + b"\n"


async def _lines(request: Request, limits: Limits) -> AsyncIterator[bytes]:
    """Yield the lines of a body that are not blank.

    Raises:
        BodyTooLarge: a line is too long, or there are too many; the rest is not read.
    """
    rest, number, blank = bytearray(), 0, 0
    async for chunk in request.stream():
        rest += chunk
        *whole, rest = rest.split(b"\n") if b"\n" in chunk else [rest]
        blank += sum(not line.strip() for line in whole)
        if blank > limits.batch:
            raise BodyTooLarge(f"more than limits.batch = {limits.batch} blank lines")
        for line in filter(bytes.strip, map(bytes, whole)):
            number += 1
            _check_line(line, number, limits)
            yield line
        _check_line(rest, number, limits)
    if rest.strip():
        _check_line(rest, number + 1, limits)
        yield bytes(rest)


def _check_line(line: bytes | bytearray, number: int, limits: Limits) -> None:
    if len(line) > limits.body_bytes:
        raise BodyTooLarge(f"a line is longer than limits.body_bytes = {limits.body_bytes}")
    if number > limits.batch:
        raise BodyTooLarge(f"more than limits.batch = {limits.batch} lines")


async def _read(answers: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := answers.read(CHUNK):
        yield chunk
