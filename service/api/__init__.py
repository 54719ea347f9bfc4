"""The HTTP surface: thin routes over the service."""
