"""A turn to the JSON that the store keeps of it, and back."""

import msgspec

from service.conversations.transcript import Turn, UnfinishedTurn

_decode = msgspec.json.Decoder(Turn).decode
_decode_unfinished = msgspec.json.Decoder(UnfinishedTurn).decode


def encode_turn(turn: Turn | UnfinishedTurn) -> str:
    """Return the JSON of a turn."""
    return msgspec.json.encode(turn).decode()


def decode_turn(record: str) -> Turn:
    """Return the turn of its JSON."""
    return _decode(record)


def decode_unfinished(record: str) -> UnfinishedTurn:
    """Return the unfinished turn of its JSON."""
    return _decode_unfinished(record)
