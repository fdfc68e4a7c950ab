"""Columnar blocks: how batches are laid out in memory and on the wire.

``block`` and everything it needs is numpy only, for servers. ``tensors`` turns batches into blocks and back, for
clients.
"""
