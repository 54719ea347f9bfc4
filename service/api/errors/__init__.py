"""Errors over HTTP: problems (RFC 9457), or the form of the client's API."""
