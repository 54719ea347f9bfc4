"""How errors are told over HTTP: as problems (RFC 9457), or in the form of the surface that was asked."""
