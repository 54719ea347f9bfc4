"""The error of clusters."""


class ClusterFailed(Exception):
    """Nodes could not be started, looked at or ended; the message says by what."""
