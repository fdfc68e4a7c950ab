"""A queue -> the manifests of its children, for server-side apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tq_operator.plan.claims import claim_templates, storage_claim
from tq_operator.plan.masters import masters, runs_etcd
from tq_operator.plan.names import QUEUE_LABEL, digest, label_value, selector
from tq_operator.plan.overrides import overridden
from tq_operator.plan.pods import (
    MIB,
    Container,
    headless,
    http_probes,
    manifest,
    mebibytes,
    over_nodes,
    pod_template,
    service,
    stateful_set,
)
from tq_operator.plan.queue import Images, Manifest, Queue
from tq_operator.plan.settings import (
    ARENA_DIRECTORY,
    CONFIG_DIRECTORY,
    JOURNAL_DIRECTORY,
    SPILL_DIRECTORY,
    STATE_DIRECTORY,
    TLS_DIRECTORY,
    TOKEN_DIRECTORY,
    TOKENS_KEY,
    attach_settings,
    checkpoint_settings,
    controller_settings,
    policy_settings,
    restarting,
    storage_settings,
    yaml_text,
)
from transfer_queue.config.defaults import GROUP
from transfer_queue.config.resource import Checkpoint, SsdOffload

__all__ = ["CONFIG_ANNOTATION", "desired_children", "drains", "empties_units", "uses_storage_units"]

CONFIG_ANNOTATION = f"{GROUP}/config"
"""On pod templates: hash of the file that the process reads, so that a change of settings restarts it."""

# Memory of a storage unit beside its rows: the interpreter, connections, receive buffers, and the program that moves
# its rows before it stops.
_UNIT_OVERHEAD = 512 * MIB
_SHARD_OVERHEAD = 128 * MIB
"""With Mooncake, that program has an engine and a buffer of 64 MiB for each controller."""
_END_SECONDS = 30
"""For the process to end after its drain."""


def uses_storage_units(queue: Queue) -> bool:
    """Whether the operator runs the storage of this backend."""
    return queue.spec.backend.kind in {"simple", "mooncake", "yuanrong"}


def drains(queue: Queue) -> bool:
    """Whether storage pods move their rows before they stop."""
    return empties_units(queue) and queue.spec.storage.drain_seconds > 0


def empties_units(queue: Queue) -> bool:
    """Whether the memory of a storage pod is enough for the program that moves its rows. Mooncake without zeroCopy
    would allocate ``localBufferSize`` there."""
    mooncake = queue.spec.backend.mooncake
    return queue.spec.backend.simple is not None or (mooncake is not None and mooncake.zero_copy.enable)


def desired_children(queue: Queue, images: Images) -> list[Manifest]:
    """Every object that shall exist for ``queue``, in the order of creation."""
    files = {
        "attach.yaml": yaml_text(attach_settings(queue, queue.tls)),
        **{
            f"{name}.yaml": yaml_text(settings)
            for name, settings in controller_settings(queue, ipv6=images.ipv6).items()
        },
    }
    if policy := policy_settings(queue):
        files["policy.yaml"] = yaml_text(policy)
    if uses_storage_units(queue):
        files["storage.yaml"] = yaml_text(storage_settings(queue, ipv6=images.ipv6))
    if saving := checkpoint_settings(queue):
        files["checkpoint.yaml"] = yaml_text(saving)
    children = [manifest(queue, "v1", "ConfigMap", "config", data=files), *claim_templates(queue)]
    if queue.spec.backend.mooncake:
        children += masters(queue, queue.spec.backend.mooncake, images)
    children += _controller(queue, images, files)
    if uses_storage_units(queue):
        children += _storage(queue, images, files["storage.yaml"])
    if saving:
        children.append(_checkpoint(queue, images, restarting(saving)))
    if queue.spec.disruption_budget:
        parts = [
            "controller",
            *(["storage"] if uses_storage_units(queue) else []),
            *(["etcd"] if runs_etcd(queue) else []),
        ]
        children += [_disruption_budget(queue, part, 0) for part in parts]
        if queue.high_availability:
            children.append(_disruption_budget(queue, "mooncake-masters", 1))
    if queue.spec.security.network_policy:
        children.append(_network_policy(queue))
    return [overridden(child, queue.spec.pod_template, fixed_user=images.fixed_user) for child in children]


def _controller(queue: Queue, images: Images, files: Mapping[str, str]) -> list[Manifest]:
    part = queue.spec.controller
    own = [f"{name}.yaml" for name in controller_settings(queue, ipv6=images.ipv6)]
    volumes = {"config": _config_volume(queue, *own), **_secret_volumes(queue), **_journal_volume(queue)}
    containers: dict[str, Container] = {}
    ports: dict[str, int] = {}
    for shard, file in enumerate(own):
        listens, metrics = (f"shard-{shard}", f"metrics-{shard}") if shard else ("transferqueue", "metrics")
        served = {listens: part.port + shard, metrics: queue.metrics_ports[shard]}
        containers[file.removesuffix(".yaml")] = Container(
            image=part.image or images.server,
            pull_policy=images.pull_policy,
            command=_python("transfer_queue.runtime.controller", file),
            ports=served,
            probes=http_probes(metrics, ready="/healthz"),  # it serves with the available units
            requests={"cpu": "100m", "memory": "256Mi"},
            volumes=volumes,
        )
        ports |= served
    chosen = selector(queue.name, "controller")
    mark = digest("".join(restarting(settings) for settings in controller_settings(queue, ipv6=images.ipv6).values()))
    template = pod_template(queue, "controller", part, containers, {CONFIG_ANNOTATION: mark})
    deployment = manifest(
        queue,
        "apps/v1",
        "Deployment",
        "controller",
        spec={
            "replicas": part.replicas,
            "revisionHistoryLimit": 2,
            # Never two at once: rows must have one owner.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": chosen},
            "template": template,
        },
    )
    # A pod that lacks one of its shards is not ready, and the others serve all the same.
    shared = {"publishNotReadyAddresses": True} if queue.shards > 1 else {}
    children = [service(queue, "controller", ports, chosen, **shared), deployment]
    if part.durability == "node":
        claim = _claim_spec(queue, part.journal.size)
        children.insert(0, manifest(queue, "v1", "PersistentVolumeClaim", _journal(queue), spec=claim))
    return children


def _journal(queue: Queue) -> str:
    """The part of the claim. Each number of shards has its own, as none finds anything in the journals of another."""
    return "journal" if queue.shards == 1 else f"journal-of-{queue.shards}"


def _journal_volume(queue: Queue) -> dict[str, tuple[str, Manifest]]:
    """A folder of the node survives the container; a claim survives the node."""
    part = queue.spec.controller
    if part.durability == "none":
        return {}
    source: Manifest = {"emptyDir": {"sizeLimit": mebibytes(part.journal.size)}}
    if part.durability == "node":
        source = {"persistentVolumeClaim": {"claimName": queue.child(_journal(queue))}}
    return {"journal": (JOURNAL_DIRECTORY, source)}


def _claim_spec(queue: Queue, size: int) -> Manifest:
    storage_class = queue.spec.controller.journal.storage_class_name
    return {
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Filesystem",
        "resources": {"requests": {"storage": mebibytes(size)}},
        **({"storageClassName": storage_class} if storage_class else {}),
    }


def _storage(queue: Queue, images: Images, file: str) -> list[Manifest]:
    part, mooncake = queue.spec.storage, queue.spec.backend.mooncake
    ports = {"transferqueue": part.port, "metrics": part.metrics_port}
    # Yuanrong's bytes lie in its worker.
    overhead = _UNIT_OVERHEAD + (_SHARD_OVERHEAD * (queue.shards - 1) if mooncake and drains(queue) else 0)
    memory = mebibytes(0 if queue.spec.backend.yuanrong else queue.spec.unit_capacity, overhead)
    volumes, claims = _storage_volumes(queue)
    container = Container(
        image=part.image or (images.mooncake if mooncake else images.server),
        pull_policy=images.pull_policy,
        command=_python("transfer_queue.runtime.storage_unit", "storage.yaml"),
        ports=ports,
        probes=http_probes("metrics"),
        requests={"cpu": "100m", "memory": memory, **_node_disk(queue)},
        limits={"memory": memory},
        env=_data_environment(queue, images),
        volumes=volumes,
        before_stop=_python("transfer_queue.client.draining", "storage.yaml") if drains(queue) else [],
        stop_seconds=part.drain_seconds + _END_SECONDS if drains(queue) else 0,
    )
    container = _with_devices(queue, container)
    template = pod_template(queue, "storage", part, {"storage": container}, {CONFIG_ANNOTATION: digest(file)})
    template["spec"]["topologySpreadConstraints"] = [
        {**constraint, "labelSelector": {"matchLabels": selector(queue.name, "storage")}}
        for constraint in part.topology_spread
    ] or over_nodes(queue, "storage")
    return [headless(queue, "storage", ports), stateful_set(queue, "storage", part.replicas, template, claims)]


def _data_environment(queue: Queue, images: Images) -> list[Manifest]:
    """Environment variables of a process that moves rows."""
    return [
        _from_field("POD_NAME", "metadata.name"),
        _from_field("POD_IP", "status.podIP"),
        # Mooncake must never announce "localhost" to other pods.
        _from_field("LOCAL_IP", "status.podIP"),
        _from_field("MC_TCP_BIND_ADDRESS", "status.podIP"),
        {"name": "MC_STORE_MEMCPY", "value": "0"},
        *_yuanrong_environment(queue, images.ipv6),
    ]


def _with_devices(queue: Queue, container: Container) -> Container:
    """``container`` with RDMA devices, if the queue uses them."""
    claim = storage_claim(queue)
    resource = queue.spec.rdma.resource_name if queue.transport == "rdma" else None
    if claim is None and resource is None:
        return container
    limits = {**container.limits, **({resource: "1"} if resource else {})}
    return replace(container, limits=limits, capabilities=("IPC_LOCK",), resource_claims=[claim] if claim else [])


def _checkpoint(queue: Queue, images: Images, settings: str) -> Manifest:
    """The process that restores the queue and saves it, in a pod of its own: a change of it restarts no controller, and
    only it has the credentials of the object store."""
    part = queue.spec.checkpoint or Checkpoint()
    own = part.image or queue.spec.storage.image
    secret = part.credentials_from
    container = Container(
        image=own or (images.mooncake if queue.spec.backend.mooncake else images.server),
        pull_policy=images.pull_policy,
        command=_python("transfer_queue.checkpoint.saver", "checkpoint.yaml"),
        ports={"metrics": part.metrics_port},
        probes=http_probes("metrics"),
        requests={"cpu": "100m", "memory": mebibytes(_UNIT_OVERHEAD)},
        env=_data_environment(queue, images),
        env_from=[{"secretRef": {"name": secret}}] if secret else [],
        volumes={
            "config": _config_volume(queue, "checkpoint.yaml", policy=False),
            **{name: volume for name, volume in _secret_volumes(queue).items() if name == "tls"},
            "state": (STATE_DIRECTORY, {"emptyDir": {"sizeLimit": "16Mi"}}),
        },
    )
    containers = {"checkpoint": _with_devices(queue, container)}
    template = pod_template(queue, "checkpoint", part, containers, {CONFIG_ANNOTATION: digest(settings)})
    spec = {
        "replicas": 1,
        "revisionHistoryLimit": 2,
        "strategy": {"type": "Recreate"},  # one save at a time
        "selector": {"matchLabels": selector(queue.name, "checkpoint")},
        "template": template,
    }
    return manifest(queue, "apps/v1", "Deployment", "checkpoint", spec=spec)


def _storage_volumes(queue: Queue) -> tuple[dict[str, tuple[str, Manifest]], list[Manifest]]:
    """Volumes of a storage unit's pod, and the claim templates of those that outlive it."""
    volumes = {
        "config": _config_volume(queue, "storage.yaml"),
        **_secret_volumes(queue),
        "shm": ("/dev/shm", _memory(256 * MIB)),
    }
    simple, size = queue.spec.backend.simple, queue.spec.unit_capacity
    if simple is None:
        return volumes, []
    if simple.ssd_offload:
        volumes["spill"] = (simple.ssd_offload.path or SPILL_DIRECTORY, _spill_volume(simple.ssd_offload))
    if queue.spec.controller.durability != "node":
        volumes["arena"] = (ARENA_DIRECTORY, _memory(size + 16 * MIB))
        return volumes, []
    volumes["arena"] = (ARENA_DIRECTORY, {})
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "arena"},
        "spec": _claim_spec(queue, size + size // 8 + 16 * MIB),
    }
    return volumes, [claim]


def _spill_volume(offload: SsdOffload) -> Manifest:
    """Lives as long as its pod: nothing in it is read again."""
    size = mebibytes(offload.capacity, 16 * MIB)
    if offload.storage_class_name is None:
        return {"emptyDir": {"sizeLimit": size}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": offload.storage_class_name,
        # File systems take a part of their disk for themselves.
        "resources": {"requests": {"storage": mebibytes(offload.capacity + offload.capacity // 16, 64 * MIB)}},
    }
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _node_disk(queue: Queue) -> dict[str, str]:
    """What the scheduler has to find on the node, so that a full disk does not evict the pod with its rows."""
    offload = queue.spec.backend.simple.ssd_offload if queue.spec.backend.simple else None
    if offload is None or offload.storage_class_name is not None:
        return {}
    return {"ephemeral-storage": mebibytes(offload.capacity, 16 * MIB)}


def _yuanrong_environment(queue: Queue, ipv6: bool) -> list[Manifest]:
    """The worker of the pod's own node, unless all have one."""
    yuanrong = queue.spec.backend.yuanrong
    if yuanrong is None or yuanrong.worker is not None:
        return []
    host = "[$(HOST_IP)]" if ipv6 else "$(HOST_IP)"
    return [
        _from_field("HOST_IP", "status.hostIP"),
        {"name": "TQ_YUANRONG_WORKER", "value": f"{host}:{yuanrong.worker_port}"},
    ]


def _disruption_budget(queue: Queue, part: str, unavailable: int) -> Manifest:
    # Whatever a pod holds ends with it, so no eviction is harmless but that of one of several masters.
    spec = {
        "maxUnavailable": unavailable,
        "selector": {"matchLabels": selector(queue.name, part)},
        # A pod that is never ready would otherwise block the drain of its node for ever.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return manifest(queue, "policy/v1", "PodDisruptionBudget", part, spec=spec)


def _network_policy(queue: Queue) -> Manifest:
    users = {"namespaceSelector": {}, "podSelector": {"matchLabels": {QUEUE_LABEL: label_value(queue.name)}}}
    ports = {*queue.metrics_ports, queue.spec.storage.metrics_port}
    if queue.spec.backend.mooncake:
        ports.add(queue.spec.backend.mooncake.master.metrics_port)
    if saving := checkpoint_settings(queue):
        ports.add(saving["metricsPort"])
    metrics = [{"port": port, "protocol": "TCP"} for port in sorted(ports)]
    spec = {
        "podSelector": {"matchLabels": selector(queue.name)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [users]}, {"ports": metrics}],
    }
    return manifest(queue, "networking.k8s.io/v1", "NetworkPolicy", "access", spec=spec)


def _config_volume(queue: Queue, *own: str, policy: bool = True) -> tuple[str, Manifest]:
    files = [*own] if queue.spec.security.policy is None or not policy else [*own, "policy.yaml"]
    source = {"name": queue.child("config"), "items": [{"key": name, "path": name} for name in files]}
    return CONFIG_DIRECTORY, {"configMap": source}


def _secret_volumes(queue: Queue) -> dict[str, tuple[str, Manifest]]:
    """Certificates and tokens. The kubelet renews the files, and the processes read them again."""
    if queue.tls == "off":
        return {}
    volumes = {"tls": (TLS_DIRECTORY, _secret(queue.server_secret, "ca.crt", "tls.crt", "tls.key"))}
    if tokens := queue.spec.security.tokens_secret:
        volumes["token"] = (TOKEN_DIRECTORY, _secret(tokens, TOKENS_KEY))
    return volumes


def _secret(name: str, *keys: str) -> Manifest:
    items = [{"key": key, "path": key} for key in keys]
    return {"secret": {"secretName": name, "items": items, "defaultMode": 0o440}}


def _memory(size: int) -> Manifest:
    return {"emptyDir": {"medium": "Memory", "sizeLimit": mebibytes(size)}}


def _python(module: str, file: str) -> list[str]:
    return ["python3", "-m", module, "--config", f"{CONFIG_DIRECTORY}/{file}"]


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
