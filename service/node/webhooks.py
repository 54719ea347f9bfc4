"""Reports the ends of jobs to their callers: at least once, signed, from the outbox written with the end.

The form is that of Standard Webhooks (standardwebhooks.com): ``webhook-id``, ``webhook-timestamp`` and
``webhook-signature``, an HMAC-SHA256 over id, timestamp and body.
"""

import ipaddress
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Final

import anyio
import httpx
from anyio.abc import TaskGroup

from service.config.schema import WebhooksConfig
from service.conversations.record.log_fields import of_job
from service.errors import StoreUnavailable
from service.formats.hosts import canonical_host, sign
from service.store import deliveries
from service.store.deliveries import Delivery
from service.store.store import Store
from transport.bodies import LITTLE_AHEAD, UNPACKED, UnreadableBody, read_beginning
from workers.log_context import line_about
from workers.policy.restart import Backoff

POLL_S: Final = 1.0
AT_ONCE: Final = 32  # messages sent at the same time
AT_ONCE_A_HOST: Final = 4
PAUSES: Final = Backoff(first_s=2.0, last_s=3600.0)
DETAIL_CHARS: Final = 200
# Addresses that a gateway translates to IPv4: RFC 6052, RFC 8215 and RFC 2765.
TRANSLATED: Final = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96")))
COMPATIBLE: Final = ipaddress.IPv6Network("::/96")  # deprecated IPv4-compatible addresses
logger = logging.getLogger(__name__)


class Webhooks:
    """Takes due messages from the store; ``run`` owns its tasks.

    ``note_try`` gets the outcome of each try: ``delivered``, ``waiting`` for the next one, or ``given_up``.
    """

    def __init__(self, store: Store, config: WebhooksConfig, note_try: Callable[[str], None] = lambda _: None) -> None:
        self._store = store
        self._config = config
        self._note_try = note_try
        self._sending: Counter[bytes] = Counter()  # by host and port
        # No proxy of the environment and no redirect: a message goes only to the address that was checked.
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(trust_env=False, socket_options=LITTLE_AHEAD),
            trust_env=False,
            follow_redirects=False,
            timeout=config.timeout_s,
        )

    def __repr__(self) -> str:
        return f"<Webhooks to {self._config.hosts}>"

    def use(self, config: WebhooksConfig) -> None:
        """Use another configuration from the next message on."""
        self._config = config
        self._http.timeout = httpx.Timeout(config.timeout_s)

    async def run(self) -> None:
        """Send due messages, until cancelled."""
        async with self._http, anyio.create_task_group() as tasks:
            while True:
                try:
                    await self._send_due(tasks)
                except StoreUnavailable as error:
                    logger.debug("no messages are sent: %s", error)
                await anyio.sleep(POLL_S)

    async def _send_due(self, tasks: TaskGroup) -> None:
        hold_s = 2 * self._config.timeout_s + POLL_S  # if a node dies while it sends, others take its messages over
        while self._sending.total() < AT_ONCE and await self._store.read(deliveries.is_any_due, datetime.now(UTC)):
            room = AT_ONCE - self._sending.total()
            due = await self._store.write(partial(deliveries.take, now=datetime.now(UTC), hold_s=hold_s, limit=room))
            late: list[str] = []
            for delivery in due:
                host = httpx.URL(delivery.url).netloc
                if self._sending[host] >= AT_ONCE_A_HOST:
                    late.append(delivery.id)
                    continue
                self._sending[host] += 1
                tasks.start_soon(self._send_counted, delivery, host)
            if late:  # a host that hangs must not delay messages to others
                later = datetime.now(UTC) + timedelta(seconds=2 * POLL_S)
                await self._store.write(partial(deliveries.postpone, delivery_ids=late, until=later))
            if len(late) == len(due):
                return  # other due messages may be for the same hosts: the next look is soon enough

    async def _send_counted(self, delivery: Delivery, host: bytes) -> None:
        try:
            await self._send(delivery)
        finally:
            self._sending[host] -= 1

    async def _send(self, delivery: Delivery) -> None:
        error: str | None = None
        is_final = False
        try:
            with anyio.fail_after(self._config.timeout_s):
                status, outcome = await self._post(delivery)
            if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
                error = f"answered {status}: {outcome}"
                is_final = status == HTTPStatus.GONE
        except TimeoutError:
            error = f"no answer within webhooks.timeout_s = {self._config.timeout_s:g} s"
        except Exception as failure:  # noqa: BLE001 - no receiver may end the service
            error = f"{type(failure).__name__}: {failure}"[:DETAIL_CHARS]
        now = datetime.now(UTC)
        is_final |= now - delivery.created_at > timedelta(seconds=self._config.give_up_s)
        state = "delivered" if error is None else "given_up" if is_final else "waiting"
        self._note_try(state)
        next_at = now + timedelta(seconds=pause_after(delivery.attempts))
        if error is not None:
            host = httpx.URL(delivery.url).host  # without the rest: paths and queries hold secrets
            line = line_about(of_job(delivery.job_id))
            logger.warning(
                "webhook %s of job %s to %s: %s, %s", delivery.id, delivery.job_id, host, state, error, extra=line
            )
        text = error and error.replace("\0", "")
        try:
            await self._store.write(lambda each: deliveries.settle(each, delivery.id, state, next_at, text))
        except StoreUnavailable:
            line = line_about(of_job(delivery.job_id))
            logger.warning("webhook %s is sent again, since its end cannot be written", delivery.id, extra=line)

    async def _post(self, delivery: Delivery) -> tuple[int, str]:
        """Return the receiver's status and the beginning of its answer; the rest is not read."""
        url = httpx.URL(delivery.url)
        if canonical_host(url.host) not in self._config.hosts:
            raise ValueError(f"{url.host} is not one of webhooks.hosts any more")
        address = await self._address(url)
        body = delivery.body.encode()
        headers = {
            "content-type": "application/json",
            "host": url.netloc.decode(),
            **UNPACKED,
            **self._signed(delivery, body, datetime.now(UTC)),
        }
        # To the address that was checked: a second look-up could return another.
        request = self._http.build_request(
            "POST",
            url.copy_with(host=address),
            content=body,
            headers=headers,
            extensions={"sni_hostname": url.host},
        )
        answer = await self._http.send(request, stream=True)
        try:
            begin = b"" if answer.is_success else await read_beginning(answer, DETAIL_CHARS)
        except UnreadableBody as error:
            begin = str(error).encode()
        finally:
            await answer.aclose()
        return answer.status_code, begin[:DETAIL_CHARS].decode("utf-8", "replace")

    async def _address(self, url: httpx.URL) -> str:
        port = url.port or (443 if url.scheme == "https" else 80)
        found = await anyio.getaddrinfo(url.host, port)
        addresses = [str(entry[4][0]) for entry in found]
        if not self._config.private:
            addresses = [address for address in addresses if is_public(address)]
        if not addresses:
            raise ValueError(f"{url.host} has only private addresses, and webhooks.private is false")
        return addresses[0]

    def _signed(self, delivery: Delivery, body: bytes, now: datetime) -> Mapping[str, str]:
        at = str(int(now.timestamp()))
        headers = {"webhook-id": delivery.id, "webhook-timestamp": at}
        if delivery.secret is None:
            return headers
        secret = self._config.secrets.get(delivery.secret)
        if secret is None:
            raise ValueError(f"the secret {delivery.secret!r} is configured no more")
        return {**headers, "webhook-signature": sign(secret, delivery.id, at, body)}


def is_public(address: str) -> bool:
    """Whether an address belongs to the public network, in any of its forms."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        inside = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in COMPATIBLE or any(found in network for network in TRANSLATED):
            inside.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if found.is_site_local or any(each is not None and not each.is_global for each in inside):
            return False
        if found in COMPATIBLE:
            return False
    return found.is_global and not found.is_multicast


def pause_after(attempts: int) -> float:
    """Return the seconds to wait after ``attempts`` tries: doubled each time, and spread."""
    return PAUSES.after(attempts) * random.uniform(0.75, 1.25)  # noqa: S311
