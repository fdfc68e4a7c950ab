"""The one exception of the cluster tool."""

from __future__ import annotations


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message names the cause and what to do about it."""
