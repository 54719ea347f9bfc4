"""Errors over HTTP: problems (RFC 9457), or the form of the surface that was asked."""
