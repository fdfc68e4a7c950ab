<<<<<<< HEAD
"""Where blocks are kept: one folder per backend behind the protocols of :mod:`transfer_queue.storage.base`."""
=======
"""Backends that keep blocks of bytes, and the processes that hold them."""
>>>>>>> columns
