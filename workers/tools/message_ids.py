"""Numbers of our requests to an MCP server, which go on where an earlier program of this process has stopped. Pure.

The SDK's session counts from 1 whenever it begins. What it calls 1 is ``base`` + 1 to the server, so that no number is
used twice, and a late answer to a request of the earlier program is known as one.
"""

from typing import Final

MOST_DIGITS: Final = 18
CANCELLED: Final = "notifications/cancelled"
Id = int | str


class MessageIds:
    """``base`` is the last number of the earlier program, ``last`` the highest that the server has been told."""

    def __init__(self, base: int = 0) -> None:
        self.base = self.last = base

    def __repr__(self) -> str:
        return f"<MessageIds {self.base} to {self.last}>"

    def told(self, own: Id) -> Id:
        """Return what the server is told as the number of a request that begins."""
        if not isinstance(own, int):  # of the caller's choosing, which the SDK allows and we do not use
            return own
        self.last = max(self.last, self.base + own)
        return self.base + own

    def cancelled(self, params: dict[str, object]) -> dict[str, object]:
        """Return the parameters of ``notifications/cancelled`` as the server is told them."""
        own = params.get("requestId")
        return {**params, "requestId": self.base + own} if isinstance(own, int) else params

    def own(self, told: Id | None) -> Id | None:
        """Return which of the session's requests an answer is for; None where it is for none of them."""
        number = (
            int(told)
            if isinstance(told, str) and told.isascii() and told.isdecimal() and len(told) <= MOST_DIGITS
            else told
        )
        if not isinstance(number, int):
            return told
        return number - self.base if number > self.base else None
