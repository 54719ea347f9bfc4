"""A turn to the JSON that the store keeps of it, and back."""

import msgspec

from service.conversations.transcript import Turn

_decode = msgspec.json.Decoder(Turn).decode


def encode_turn(turn: Turn) -> str:
    """Return the JSON of a turn."""
    return msgspec.json.encode(turn).decode()


def decode_turn(record: str) -> Turn:
    """Return the turn of its JSON."""
    return _decode(record)
