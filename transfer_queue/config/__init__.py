"""Settings: the TransferQueue resource, what a client attaches with, and what the server processes read."""
