"""The Kubernetes operator: runs a TransferQueue resource and lets labelled pods find it."""
