"""What tells one document from another, whatever the order of their keys."""

import hashlib

import msgspec


def digest_of(document: object) -> str:
    """Return the digest of a JSON document: the same for the same content."""
    return hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()
