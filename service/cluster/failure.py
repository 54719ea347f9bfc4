"""The errors of clusters."""

from service.errors import ServiceError


class ClusterFailed(ServiceError):
    """Nodes could not be started, looked at or ended; the message says by what."""
