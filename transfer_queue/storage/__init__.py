"""Where blocks are kept: one folder per backend behind the protocols of :mod:`transfer_queue.storage.base`."""
