"""What this machine shows to the servers of a queue that runs with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tq_operator.kubectl.access import Access
from tq_operator.plan.queue import Manifest, queue_from
from tq_operator.runtime.certificates import KEYS, secret_data
from tq_operator.runtime.cluster import ClusterError
from transfer_queue.config.attach import AttachSecurity
from transfer_queue.config.security import TlsFiles
from transfer_queue.errors import TransferQueueError

__all__ = ["credentials"]


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
        secret = access.cluster.child({"kind": "Secret", "metadata": {"namespace": queue.namespace, "name": name}})
    except ClusterError as error:
        raise TransferQueueError(
            f"queue {queue.name} runs with TLS, and its Secret {name} cannot be read: {error}; kubectl auth can-i get "
            f"secret/{name} says whether you may"
        ) from None
    data = {} if secret is None else secret_data(secret)
    if missing := [key for key in KEYS if key not in data]:
        raise TransferQueueError(f"Secret {name} lacks {', '.join(missing)}; kubectl tq doctor {queue.name} says more")
    with TemporaryDirectory(prefix="kubectl-tq-") as folder:
        paths = [Path(folder) / key for key in KEYS]
        for path in paths:
            path.touch(mode=0o600)
            path.write_bytes(data[path.name])
        ca, certificate, key = map(str, paths)
        yield AttachSecurity(
            tls=TlsFiles(ca=ca, certificate=certificate, key=key, server_name=queue.host("controller"))
        )
