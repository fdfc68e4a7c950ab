"""Tests that every storage backend has to pass, with real controller and storage unit processes::

    pytest --pyargs transfer_queue.storage.conformance --backend=NAME [--backend-settings='{"field": "value"}']

``NAME``: ``memory``, another built-in backend, or one of an installed package. What a case asks for depends on the
``Capabilities`` that the backend states, but every case runs for every backend. ``docs/backends.md`` explains both.
"""
