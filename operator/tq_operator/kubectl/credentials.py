"""What this machine shows to the servers of a queue that runs with TLS."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kubernetes import client

from tq_operator.kubectl.access import Access
from tq_operator.plan.queue import Manifest, queue_from
from transfer_queue.config.attach import AttachSecurity
from transfer_queue.config.security import TlsFiles
from transfer_queue.errors import TransferQueueError

__all__ = ["credentials"]

_FILES = ("ca.crt", "tls.crt", "tls.key")


@contextmanager
def credentials(access: Access, document: Manifest) -> Iterator[AttachSecurity]:
    """The certificate of the queue's own clients, from its Secret, in files of this user that end here.

    Raises TransferQueueError if the Secret cannot be read or is not complete.
    """
    queue = queue_from(document)
    if queue.running_tls == "off":
        yield AttachSecurity()
        return
    name = queue.client_secret(queue.namespace)
    try:
        secret = client.CoreV1Api(access.api()).read_namespaced_secret(name, queue.namespace)
    except client.ApiException as error:
        raise TransferQueueError(
            f"queue {queue.name} runs with TLS, and its Secret {name} cannot be read: {error.reason}; kubectl auth "
            f"can-i get secret/{name} says whether you may"
        ) from None
    data = secret.data or {}
    if missing := [file for file in _FILES if file not in data]:
        raise TransferQueueError(f"Secret {name} lacks {', '.join(missing)}; kubectl tq doctor {queue.name} says more")
    with TemporaryDirectory(prefix="kubectl-tq-") as folder:
        paths = [Path(folder) / file for file in _FILES]
        for path in paths:
            path.touch(mode=0o600)
            path.write_bytes(base64.b64decode(data[path.name]))
        ca, certificate, key = map(str, paths)
        yield AttachSecurity(
            tls=TlsFiles(ca=ca, certificate=certificate, key=key, server_name=queue.host("controller"))
        )
