"""The mooncake_master of a queue: one with an HTTP metadata server, or several that find each other through etcd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tq_operator.plan.names import selector
from tq_operator.plan.pods import Container, headless, over_nodes, pod_template, service, stateful_set
from tq_operator.plan.queue import Images, Manifest, Queue
from transfer_queue.config.defaults import GROUP
from transfer_queue.config.resource import DevelopmentEtcd, HighAvailability, Mooncake

__all__ = ["etcd_data", "lost_log", "masters", "ready_etcd", "runs_etcd", "same_group", "with_etcd"]

_SERVES = (
    "import sys,urllib.request as u;"
    "h=u.build_opener(u.ProxyHandler({{}}));"
    "sys.exit(b'\"service_ready\":true' not in h.open('http://127.0.0.1:{port}/health',timeout=2).read())"
)
# A standby is ready as well, once it knows whom it follows: updates and evictions go from one master to the next.
_TAKES_PART = (
    "import json,sys,urllib.request as u;"
    "h=json.load(u.build_opener(u.ProxyHandler({{}})).open('http://127.0.0.1:{port}/health',timeout=2));"
    "sys.exit(not (h['service_ready'] or h['leader_address']))"
)
_DATA_DIRECTORY = "/data"
_ETCD_DATA = f"{GROUP}/etcd-data"
"""On the StatefulSets of masters and storage units: ``Queue.etcd_data`` when they started."""
_GROUP_FLAGS = ("--enable_oplog=", "--etcd_endpoints=", "--cluster_id=")


def runs_etcd(queue: Queue) -> bool:
    """Whether the operator runs the etcd of the masters."""
    group = queue.high_availability
    return group is not None and group.etcd.development is not None


def masters(queue: Queue, mooncake: Mooncake, images: Images) -> list[Manifest]:
    """The children for the master or masters, and for their etcd if it is the operator's."""
    group = mooncake.high_availability
    if group is None:
        return _single(queue, mooncake, images)
    etcd = _etcd(queue, group.etcd.development, images) if group.etcd.development else []
    return [*etcd, *_group(queue, mooncake, group, images)]


def same_group(child: Manifest, observed: Manifest) -> bool:
    """Whether masters that start as ``child`` says take over what those of ``observed`` know."""
    found = _group_flags(child)
    return len(found) == len(_GROUP_FLAGS) and found == _group_flags(observed)


def etcd_data(queue: Queue, children: Mapping[tuple[str, str], Manifest], pods: Sequence[Manifest]) -> str:
    """``Queue.etcd_data``: UID of the etcd pod once it is ready, until then that with which the masters started."""
    if not runs_etcd(queue):
        return ""
    if (pod := ready_etcd(queue, pods)) is not None:
        return str(pod["metadata"]["uid"])
    workload = children.get(("StatefulSet", queue.child("mooncake-masters")))
    return _known_data(workload) if workload else ""


def ready_etcd(queue: Queue, pods: Sequence[Manifest]) -> Manifest | None:
    """The pod of the etcd that the operator runs, once it is ready."""
    ready = {"type": "Ready", "status": "True"}.items()
    for pod in pods:
        found = any(ready <= each.items() for each in pod.get("status", {}).get("conditions", []))
        if pod["metadata"]["name"] == f"{queue.child('etcd')}-0" and found:
            return pod
    return None


def with_etcd(queue: Queue, child: Manifest) -> Manifest:
    """``child`` with a mark of the etcd that its pods start with, if that matters to them."""
    metadata = child["metadata"]
    parts = {queue.child("mooncake-masters"), queue.child("storage")}
    if not queue.etcd_data or child["kind"] != "StatefulSet" or metadata["name"] not in parts:
        return child
    annotations = {**metadata["annotations"], _ETCD_DATA: queue.etcd_data}
    return {**child, "metadata": {**metadata, "annotations": annotations}}


def lost_log(child: Manifest, observed: Manifest | None) -> bool:
    """Whether etcd has lost the log of the masters since the pods of ``observed`` started.

    Masters that were behind wait for the lost entries for ever, and even if one leads, no other can take over from it.
    Storage units do not turn to a leader with a lower number than the last one had.
    """
    before, now = _known_data(observed or {}), _known_data(child)
    return bool(before and now) and before != now


def _known_data(workload: Manifest) -> str:
    return str((workload.get("metadata", {}).get("annotations") or {}).get(_ETCD_DATA, ""))


def _group_flags(workload: Manifest) -> set[str]:
    command = workload["spec"]["template"]["spec"]["containers"][0].get("command", [])
    return {word for word in command if word.startswith(_GROUP_FLAGS)}


def _single(queue: Queue, mooncake: Mooncake, images: Images) -> list[Manifest]:
    part = mooncake.master
    ports = {"rpc": part.rpc_port, "metrics": part.metrics_port}
    own = ["--client_ttl=10"]
    if not images.ipv6:  # which its metadata server does not know; without it peers ask each other
        ports = {"rpc": part.rpc_port, "http-metadata": part.http_metadata_port, "metrics": part.metrics_port}
        own = [
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=0.0.0.0",
            f"--http_metadata_server_port={part.http_metadata_port}",
            "--enable_metadata_cleanup_on_timeout=true",
            *own,
        ]
    container = _master(mooncake, images, ports, own, _SERVES)
    template = pod_template(queue, "mooncake-master", part, {"mooncake-master": container}, {})
    return [
        service(queue, "mooncake-master", ports, selector(queue.name, "mooncake-master")),
        stateful_set(queue, "mooncake-master", 1, template),
    ]


def _group(queue: Queue, mooncake: Mooncake, group: HighAvailability, images: Images) -> list[Manifest]:
    name, part = "mooncake-masters", mooncake.master
    ports = {"rpc": part.rpc_port, "metrics": part.metrics_port}
    own = [
        "--enable_ha=true",
        "--enable_oplog=true",
        f"--etcd_endpoints={';'.join(queue.etcd_members)}",
        f"--cluster_id={queue.cluster_id}",
        # Seconds until silent storage units are taken for dead, with all that they hold. The address of a deleted pod
        # does not refuse connections, so that it takes units a while to turn to the next leader.
        "--client_ttl=60",
    ]
    template = pod_template(queue, name, part, {name: _master(mooncake, images, ports, own, _TAKES_PART)}, {})
    template["spec"]["topologySpreadConstraints"] = over_nodes(queue, name)
    return [headless(queue, name, ports), stateful_set(queue, name, group.masters, template)]


def _master(mooncake: Mooncake, images: Images, ports: Mapping[str, int], own: list[str], ready: str) -> Container:
    part = mooncake.master
    # Several name themselves to each other.
    address = "::" if ready == _SERVES else "[$(POD_IP)]"
    return Container(
        image=part.image or images.mooncake,
        pull_policy=images.pull_policy,
        command=[
            "mooncake_master",
            f"--rpc_port={part.rpc_port}",
            # The address that it finds by an interface is one of IPv4.
            *(
                [f"--rpc_address={address}", "--metrics_host=::"]
                if images.ipv6
                else [f"--rpc_interface={part.rpc_interface}"]
            ),
            *own,
            f"--metrics_port={part.metrics_port}",
            # Rows that nobody consumed yet must never be evicted: a full store refuses puts instead.
            "--eviction_ratio=0",
            "--eviction_high_watermark_ratio=1",
            "--default_kv_lease_ttl=5000",
            # Space of a writer that died while it was writing, in seconds.
            "--put_start_discard_timeout_sec=30",
            "--put_start_release_timeout_sec=60",
        ],
        ports=ports,
        probes={
            "startupProbe": {"tcpSocket": {"port": "metrics"}, "periodSeconds": 1, "failureThreshold": 60},
            "readinessProbe": {
                "exec": {"command": ["python3", "-c", ready.format(port=part.metrics_port)]},
                "periodSeconds": 5,
                "timeoutSeconds": 4,
            },
            # A standby serves no RPC.
            "livenessProbe": {
                "tcpSocket": {"port": "rpc" if ready == _SERVES else "metrics"},
                "periodSeconds": 10,
                "failureThreshold": 6,
            },
        },
        requests={"cpu": "100m", "memory": "256Mi"},
        env=[{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}] if images.ipv6 else [],
        # It ends only when it is killed.
        stop_seconds=1,
    )


def _etcd(queue: Queue, part: DevelopmentEtcd, images: Images) -> list[Manifest]:
    ports = {"client": part.port}
    health = {"path": "/health", "port": "client"}
    container = Container(
        image=part.image or images.etcd,
        pull_policy=images.pull_policy,
        command=[
            "etcd",
            f"--data-dir={_DATA_DIRECTORY}",
            f"--listen-client-urls=http://{'[::]' if images.ipv6 else '0.0.0.0'}:{part.port}",
            f"--advertise-client-urls=http://{queue.host('etcd')}:{part.port}",
            # The log of the masters: old revisions go after an hour.
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=1h",
        ],
        ports=ports,
        probes={
            "startupProbe": {"httpGet": health, "periodSeconds": 1, "failureThreshold": 60},
            "readinessProbe": {"httpGet": health, "periodSeconds": 2},
            "livenessProbe": {"tcpSocket": {"port": "client"}, "periodSeconds": 10, "failureThreshold": 6},
        },
        requests={"cpu": "100m", "memory": "256Mi"},
        volumes={"data": (_DATA_DIRECTORY, {"emptyDir": {}})},
    )
    return [
        service(queue, "etcd", ports, selector(queue.name, "etcd")),
        stateful_set(queue, "etcd", 1, pod_template(queue, "etcd", part, {"etcd": container}, {})),
    ]
