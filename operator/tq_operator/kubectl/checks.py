"""``kubectl tq doctor``: what is wrong with the operator and a queue, each line with the fix. The checks only look."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property
from itertools import combinations
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.api.crd import custom_resource_definitions
from tq_operator.kubectl.access import Access, condition, part_of
from tq_operator.kubectl.overview import bindings_of, restarts
from tq_operator.plan.names import INJECT_LABEL, INJECTED_ANNOTATION
from tq_operator.plan.problems import worst_problem
from tq_operator.plan.queue import Manifest, Queue, queue_from
from tq_operator.runtime.cluster import ClusterError
from transfer_queue.cli.doctor_queue import inside
from transfer_queue.cli.findings import Finding, fail, ok, warn
from transfer_queue.errors import ConfigError, TransferQueueError

__all__ = ["FIXES", "Finding", "Surroundings", "certificate_findings", "examine", "find_operators"]

_OPERATOR = "app.kubernetes.io/name=transferqueue-operator"
_UPGRADE = "install or upgrade the chart: helm upgrade --install transferqueue charts/transferqueue"
_REMAKE = "look at the log of the leader, which recreates a deleted Secret and corrects the bundles"
_RIGHTS = "ask for the right to read it (kubectl auth can-i --list), or let an administrator run this"
_EVENTS_S = 3600.0
_MOST_EVENTS = 10
FIXES: Mapping[str, str] = {
    "NameConflict": "delete the object of that name or rename the queue",
    "QuotaExceeded": "raise the ResourceQuota of the namespace or lower the requests of the queue",
    "MissingRights": "upgrade the chart, whose role has all rights that the operator needs",
    "InvalidSpec": "correct the field that the message names",
    "RdmaUnavailable": "check the RDMA device plugin and rdma.resourceName, or the DRA driver and rdma.claim; or set "
    "rdma.policy to auto",
    "CrashLooping": "kubectl tq logs --previous shows the last words of the pods",
    "OutOfMemory": "raise the memory limit in the resources of that part",
    "ImagePullFailed": "check the image's name, the registry, and imagePullSecrets",
    "Unschedulable": "add nodes or lower the requests, node selectors and affinity of that part",
    "PodsNotReady": "wait for the pods; kubectl tq logs shows what they do",
    "PodsRefused": "the message says what the apiserver refuses",
    "ApplyFailed": "the message says what the apiserver refuses",
    "ContainerNotCreated": "the message says what the container lacks, such as a Secret or a ConfigMap",
    "EtcdUnreachable": "start etcd, or correct highAvailability.etcd.endpoints",
    "NoLeader": "wait about 10 s; if it lasts, kubectl tq logs --part mooncake-masters shows why",
    "NoEndpoints": "take out what was added to spec.selector of the Service, and its annotation "
    "transferqueue.io/ignore-drift",
    "RestorePending": "wait; if it lasts, kubectl tq logs --part checkpoint shows why",
    "CheckpointFailed": "correct what the message says, such as destination or credentialsFrom of spec.checkpoint; the "
    "next save starts on schedule",
    "SecretUnusable": "correct the Secret as the message says, or change spec.security",
    "CertificateNotMade": "correct the Secret that the message names; the operator makes a deleted one again",
    "Held": "wait until the queue is empty, or see docs/operator.md, Changes that would lose rows",
}
"""Reason of a condition or problem -> what to do."""


@dataclass(frozen=True)
class Surroundings:
    """What is examined: the cluster and, if there are any, queues of the namespace."""

    access: Access
    name: str | None = None
    """Of the only queue that is meant; None: all of the namespace."""
    look: Callable[[Manifest], Mapping[str, Any]] | None = None
    """The controller's own picture of a queue. Raises TransferQueueError."""
    now: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @cached_property
    def queues(self) -> list[Manifest]:
        if self.name is not None:
            return [self.access.queue(self.name)]
        return self.access.queues()

    @cached_property
    def operators(self) -> list[Manifest]:
        return find_operators(self.access)

    @cached_property
    def webhooks(self) -> list[Manifest]:
        """Their configurations, mutating and validating."""
        found = []
        for plural in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
            path = f"/apis/admissionregistration.k8s.io/v1/{plural}"
            found += self.access.cluster.call("GET", path, query=[("labelSelector", _OPERATOR)])["items"]
        return found


def find_operators(access: Access) -> list[Manifest]:
    """Deployments of the operator, in whatever namespace. Raises ClusterError."""
    found: list[Manifest] = access.cluster.call(
        "GET", "/apis/apps/v1/deployments", query=[("labelSelector", _OPERATOR)]
    )["items"]
    return found


def examine(surroundings: Surroundings) -> list[Finding]:
    """All findings, in the order of the checks."""
    findings = list(_apiserver(surroundings))
    if any(finding.state == "fail" for finding in findings):
        return findings  # whatever else is wrong, it cannot be seen
    checks: dict[str, Callable[[Surroundings], Iterator[Finding]]] = {
        "definitions": _definitions,
        "operator": _operator,
        "webhook": _webhook,
        "certificate": _certificate,
        "missed pods": _missed,
    }
    for name, check in checks.items():
        findings += _guarded(name, lambda check=check: check(surroundings))  # type: ignore[misc]
    if any(finding.check == "definitions" and finding.state == "fail" for finding in findings):
        return findings
    queue_checks: dict[str, Callable[[Surroundings, Manifest], Iterator[Finding]]] = {
        "queue": _conditions,
        "pods": _pods,
        "events": _events,
        "rdma": _rdma,
        "bindings": _bindings,
        "admission": _admission,
        "controller": _controller,
    }
    findings += (listed := _guarded("queue", lambda: _listed(surroundings)))
    if any(finding.state != "ok" for finding in listed):
        return findings
    for document in surroundings.queues:
        for name, check_queue in queue_checks.items():
            findings += _guarded(name, lambda check=check_queue, document=document: check(surroundings, document))  # type: ignore[misc]
    return findings


def _listed(surroundings: Surroundings) -> Iterator[Finding]:
    if not surroundings.queues:
        yield ok("queue", f"none in namespace {surroundings.access.namespace}")


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except ClusterError as error:
        if "is forbidden" in str(error) and "cannot" in str(error):
            return [warn(name, f"cannot be looked at: {error}", _RIGHTS)]
        return [fail(name, str(error), "correct what the message names and run kubectl tq doctor again")]
    except (NotFoundError, ConflictError) as error:
        return [fail(name, f"the apiserver refused: {error.status} {error.reason}", _UPGRADE)]


def _apiserver(surroundings: Surroundings) -> Iterator[Finding]:
    host = surroundings.access.configuration.host
    try:
        version = surroundings.access.cluster.call("GET", "/version")["gitVersion"]
    except ClusterError as error:
        yield fail("apiserver", f"{host}: {error}", "check the kubeconfig (kubectl version); --context names another")
        return
    yield ok("apiserver", f"{version} at {host}")


def _definitions(surroundings: Surroundings) -> Iterator[Finding]:
    for wanted in custom_resource_definitions().values():
        name = wanted["metadata"]["name"]
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        try:
            found = surroundings.access.cluster.call("GET", path)
        except NotFoundError:
            yield fail("definitions", f"{name} is not installed", _UPGRADE)
            continue
        conditions = {each["type"]: each["status"] for each in found.get("status", {}).get("conditions", [])}
        unknown = sorted(_fields(wanted) - _fields(found))
        if conditions.get("Established") != "True":
            yield fail(
                "definitions", f"{name} is not established", "kubectl describe crd says why; its name may be taken"
            )
        elif unknown:
            text = f"{name} is of another version: it does not know {', '.join(unknown[:3])}"
            yield warn(
                "definitions", text, "upgrade the chart (helm leaves definitions that are kept: kubectl apply them)"
            )
        else:
            yield ok("definitions", f"{name} is established")


def _fields(definition: Manifest) -> set[str]:
    """Paths of all fields of the spec that a definition knows."""

    def paths(schema: Mapping[str, Any], at: str) -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            yield f"{at}.{name}"
            yield from paths(inner, f"{at}.{name}")

    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return set(paths(schema["properties"].get("spec", {}), "spec"))


def _operator(surroundings: Surroundings) -> Iterator[Finding]:
    if not surroundings.operators:
        yield fail("operator", "no Deployment of it is in the cluster: queues are not looked after", _UPGRADE)
    for deployment in surroundings.operators:
        metadata, spec, status = deployment["metadata"], deployment["spec"], deployment.get("status", {})
        where = f"{metadata['namespace']}/{metadata['name']}"
        ready, wanted = status.get("readyReplicas", 0), spec.get("replicas", 1)
        fix = f"kubectl logs -n {metadata['namespace']} deployment/{metadata['name']} says why; /readyz what is missing"
        if ready < wanted:
            yield (warn if ready else fail)("operator", f"{where}: {ready} of {wanted} pods are ready", fix)
        else:
            yield ok("operator", f"{where}: {ready} of {wanted} pods are ready")
        yield from _lease(surroundings, deployment)
    for one, other in combinations(surroundings.operators, 2):
        if _share_namespaces(one, other):
            names = " and ".join("{namespace}/{name}".format(**each["metadata"]) for each in (one, other))
            fix = "uninstall one of them, or give each namespaces of its own with the chart's watchNamespaces"
            yield fail("operator", f"{names} work in the same namespaces: each queue is kept by one of them", fix)


def _share_namespaces(one: Manifest, other: Manifest) -> bool:
    watched = [_variables(each).get("TQ_WATCH_NAMESPACES", "") for each in (one, other)]
    first, second = ({name.strip() for name in text.split(",")} for text in watched)
    return "" in first | second or bool(first & second)


def _lease(surroundings: Surroundings, deployment: Manifest) -> Iterator[Finding]:
    namespace = deployment["metadata"]["namespace"]
    name = _variables(deployment).get("TQ_LEASE_NAME", deployment["metadata"]["name"])
    fix = "without a leader nothing is written: look at the operator's log"
    try:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        spec = surroundings.access.cluster.call("GET", path).get("spec") or {}
    except NotFoundError:
        yield fail("leader", f"there is no Lease {namespace}/{name}: no operator has led yet", fix)
        return
    holder = spec.get("holderIdentity") or "nobody"
    age = (surroundings.now - _time(spec["renewTime"])).total_seconds() if spec.get("renewTime") else 0.0
    if holder == "nobody" or age > 3 * spec.get("leaseDurationSeconds", 10):
        yield fail("leader", f"Lease {namespace}/{name} is held by {holder}, renewed {age:.0f} s ago", fix)
    else:
        yield ok("leader", holder)


def _webhook(surroundings: Surroundings) -> Iterator[Finding]:
    found = surroundings.webhooks
    if len(found) < 2:
        yield fail("webhook", f"{len(found)} of 2 webhook configurations are there: pods get no queue", _UPGRADE)
    services, trusted = set(), True
    for document in found:
        for hook in document.get("webhooks", []):
            settings = hook["clientConfig"]
            if not settings.get("caBundle"):
                trusted = False
                yield fail("webhook", f"{hook['name']} has no caBundle, so the apiserver trusts no answer", _REMAKE)
            if "service" in settings:
                services.add((settings["service"]["namespace"], settings["service"]["name"]))
    if len(found) >= 2 and trusted:
        yield ok("webhook", f"{len(found)} webhook configurations name whom to trust")
    for namespace, name in sorted(services):
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        query = [("labelSelector", f"kubernetes.io/service-name={name}")]
        slices = surroundings.access.cluster.call("GET", path, query=query)["items"]
        serving = [
            each for part in slices for each in part.get("endpoints") or [] if each.get("conditions", {}).get("ready")
        ]
        if serving:
            yield ok("webhook", f"Service {namespace}/{name} has {len(serving)} ready endpoints")
        else:
            text = f"Service {namespace}/{name} has no ready endpoint: pods that ask for a queue are refused"
            yield fail("webhook", text, "get an operator pod ready; the line of the operator says how")


def _certificate(surroundings: Surroundings) -> Iterator[Finding]:
    bundles: dict[str, list[str]] = {}
    for document in surroundings.webhooks:
        for hook in document.get("webhooks", []):
            if service := hook["clientConfig"].get("service"):
                bundles.setdefault(service["namespace"], []).append(hook["clientConfig"].get("caBundle", ""))
    for deployment in surroundings.operators:
        namespace = deployment["metadata"]["namespace"]
        name = _variables(deployment).get("TQ_WEBHOOK_SECRET")
        if not name:
            continue
        try:
            secret = surroundings.access.cluster.call("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
        except NotFoundError:
            yield fail("certificate", f"there is no Secret {namespace}/{name}", _UPGRADE)
            continue
        yield certificate_findings(secret, bundles.get(namespace, []), surroundings.now)


def certificate_findings(secret: Manifest, bundles: Sequence[str], now: datetime) -> Finding:
    """Whether the apiserver, which trusts ``bundles`` (base64 of PEM), accepts the webhook's certificate."""
    where = f"Secret {secret['metadata']['namespace']}/{secret['metadata']['name']}"
    try:
        certificate = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
        trusted = [x509.load_pem_x509_certificates(base64.b64decode(text)) for text in bundles]
    except (KeyError, ValueError) as error:
        return fail("certificate", f"{where} or a caBundle holds no certificate: {error}", _REMAKE)
    if not all(any(_signed(certificate, authority) for authority in authorities) for authorities in trusted):
        text = f"{where} is not signed by the authority in the webhook configurations"
        return fail("certificate", text, _REMAKE)
    ends, begins = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    left = f"ends {ends:%Y-%m-%d %H:%M} UTC"
    if not begins <= now < ends:
        return fail("certificate", f"{where} is not valid now: it began {begins:%Y-%m-%d %H:%M} and {left}", _REMAKE)
    if ends - now < max((ends - begins) / 6, timedelta(hours=1)):
        fix = "the operator renews at a third of the life: look at the log of the leader"
        return warn("certificate", f"{where} {left} and was not renewed", fix)
    return ok("certificate", f"{where} {left}")


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _missed(surroundings: Surroundings) -> Iterator[Finding]:
    for pod in surroundings.access.cluster.missed_pods([surroundings.access.namespace]):
        if pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
            continue
        name = pod["metadata"]["name"]
        text = f"{name} asks for the queue {pod['metadata']['labels'][INJECT_LABEL]} and was made without it"
        yield fail("missed pods", text, "delete it once the webhook answers; its owner creates it again")


def _conditions(surroundings: Surroundings, document: Manifest) -> Iterator[Finding]:
    name, status = document["metadata"]["name"], document.get("status") or {}
    ready, degraded, progress = (condition(document, kind) for kind in ("Ready", "Degraded", "Progressing"))
    if not ready:
        yield fail("queue", f"{name}: the operator has not looked at it", "get the operator ready; see its line")
        return
    generation, seen = document["metadata"].get("generation", 0), status.get("observedGeneration", 0)
    if seen < generation:
        text = f"{name}: the operator has taken up generation {seen} of {generation}"
        yield warn("queue", text, "wait a moment; if it stays so, look at the operator's log")
    if degraded.get("status") == "True":
        yield fail("queue", f"{name}: {degraded['reason']}: {degraded.get('message', '')}", _fix(degraded["reason"]))
    if ready["status"] == "True":
        yield ok("queue", f"{name} is Ready")
    elif ready["reason"] != degraded.get("reason"):
        yield fail("queue", f"{name}: {ready['reason']}: {ready.get('message', '')}", _fix(ready["reason"]))
    if progress.get("reason") == "Held":
        yield warn("queue", f"{name}: a change waits: {progress.get('message', '')}", _fix("Held"))


def _fix(reason: str) -> str:
    return FIXES.get(reason, "docs/operator.md, Conditions, says what the reason means")


def _pods(surroundings: Surroundings, document: Manifest) -> Iterator[Finding]:
    pods = surroundings.access.pods(document["metadata"]["name"])
    well = 0
    for pod in pods:
        name = pod["metadata"]["name"]
        if problem := worst_problem([], [pod]):
            yield fail("pods", f"{part_of(pod)}: {problem.message}", _fix(problem.reason))
        elif pod.get("status", {}).get("phase") == "Failed":
            text = f"{name} failed: {pod['status'].get('reason', '')} {pod['status'].get('message', '')}".strip()
            yield fail("pods", text, "delete it; its owner creates it again")
        elif count := restarts(pod):
            last = next(
                (
                    each["lastState"]["terminated"].get("reason", "")
                    for each in pod["status"]["containerStatuses"]
                    if each.get("lastState", {}).get("terminated")
                ),
                "",
            )
            text = f"{name} was restarted {count} times, last: {last or 'no reason given'}"
            yield warn(
                "pods", text, "rows of its memory were lost then; kubectl tq logs --previous shows its last words"
            )
        else:
            well += 1
    if pods and well == len(pods):
        yield ok("pods", f"{well} pods of {document['metadata']['name']} have no problem")


def _events(surroundings: Surroundings, document: Manifest) -> Iterator[Finding]:
    name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
    cluster = surroundings.access.cluster
    own = {name, *(child for _, child in cluster.children(namespace, name))}
    own |= {pod["metadata"]["name"] for pod in surroundings.access.pods(name)}
    path = f"/api/v1/namespaces/{namespace}/events"
    latest: dict[tuple[str, str], tuple[datetime, str]] = {}
    for event in cluster.call("GET", path, query=[("fieldSelector", "type=Warning")])["items"]:
        stamp = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
        about, when = event["involvedObject"].get("name", ""), _time(stamp)
        if about in own and (surroundings.now - when).total_seconds() < _EVENTS_S:
            key = (about, event.get("reason", ""))
            latest[key] = max(latest.get(key, (when, "")), (when, " ".join(str(event.get("message", "")).split())))
    for (about, reason), (when, message) in sorted(latest.items(), key=lambda item: item[1], reverse=True)[
        :_MOST_EVENTS
    ]:
        minutes = (surroundings.now - when).total_seconds() / 60
        fix = FIXES.get(reason, f"kubectl describe tells more of {about}; nothing to do if it is over")
        yield warn("events", f"{about}: {reason}, {minutes:.0f} min ago: {message}", fix)
    if not latest:
        yield ok("events", f"no warning about {name} in the last hour")


def _rdma(surroundings: Surroundings, document: Manifest) -> Iterator[Finding]:
    queue = _valid(document)
    if queue is None or queue.spec.transport != "rdma":
        return
    name, policy = queue.spec.rdma.resource_name, queue.spec.rdma.policy
    if claim := queue.spec.rdma.claim:
        device_class = claim.device_class_name
        count, missing = surroundings.access.cluster.claimable(device_class)
        if count is None:
            text = "DeviceClasses and ResourceSlices may not be read, so it is not known whether there are devices"
            yield warn("rdma", text, _RIGHTS)
        elif missing:
            fix = "check that the DRA driver runs on the nodes (kubectl get deviceclasses,resourceslices)"
            yield (fail if policy == "required" else warn)("rdma", missing, fix)
        else:
            yield ok("rdma", f"DeviceClass {device_class} exists, and ResourceSlices list {count} devices")
        return
    if name is None:
        fix = "set rdma.resourceName to the resource of the device plugin, or rdma.claim, or rdma.policy to off"
        yield warn("rdma", f"{queue.name} names no resource and no claim, so its bytes move over TCP", fix)
        return
    offered, needed = surroundings.access.cluster.offered(name), queue.spec.storage.replicas
    fix = f"check that the RDMA device plugin runs on the nodes (kubectl describe node lists {name})"
    if offered is None:
        yield warn("rdma", "nodes may not be read, so the capacity is not known", _RIGHTS)
    elif offered < needed:
        text = f"nodes offer {offered} of {name}, and the storage units of {queue.name} need {needed}"
        yield (fail if policy == "required" else warn)("rdma", text, fix)
    else:
        yield ok("rdma", f"nodes offer {offered} of {name}, and the storage units of {queue.name} need {needed}")


def _valid(document: Manifest) -> Queue | None:
    try:
        return queue_from(document)
    except ConfigError:
        return None  # its condition says so


def _bindings(surroundings: Surroundings, document: Manifest) -> Iterator[Finding]:
    metadata = document["metadata"]
    for binding in bindings_of(surroundings.access, metadata["namespace"], metadata["name"]):
        where = f"{binding['namespace']}/{binding['name']}"
        if binding["bound"] == "True":
            yield ok("bindings", f"{where} is bound")
        else:
            text = f"{where}: {binding['reason'] or 'not looked at'}: {binding['message']}"
            yield fail("bindings", text, "correct what the message names; kubectl get tqb shows the state")


def _admission(surroundings: Surroundings, document: Manifest) -> Iterator[Finding]:
    """Asks for a pod that is never made."""
    metadata = document["metadata"]
    container = {
        "name": "probe",
        "image": "tq-doctor",
        "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}, "limits": {"cpu": "1m", "memory": "1Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "tq-doctor-", "labels": {INJECT_LABEL: metadata["name"]}},
        "spec": {"containers": [container], "securityContext": security, "automountServiceAccountToken": False},
    }
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods"
    try:
        made = surroundings.access.cluster.call("POST", path, pod, [("dryRun", "All")])
    except ClusterError as error:
        if "webhook" not in str(error):
            raise
        fix = "correct what operator, webhook and certificate report; pods that ask for a queue are refused until then"
        yield fail("admission", str(error), fix)
        return
    given = (made["metadata"].get("annotations") or {}).get(INJECTED_ANNOTATION)
    if given == f"{metadata['namespace']}/{metadata['name']}":
        yield ok("admission", f"a pod labelled {INJECT_LABEL}: {metadata['name']} gets the queue")
    else:
        text = f"a pod labelled {INJECT_LABEL}: {metadata['name']} does not get the queue"
        fix = "the chart leaves out this namespace (webhook.excludeNamespaces, watchNamespaces), or the webhook is gone"
        yield fail("admission", text, fix)


def _controller(surroundings: Surroundings, document: Manifest) -> Iterator[Finding]:
    """Its own words, if it is Ready: else the lines before say what is wrong."""
    if surroundings.look is None or condition(document, "Ready").get("status") != "True":
        return
    try:
        picture = surroundings.look(document)
    except TransferQueueError as error:
        yield fail(
            "controller", str(error), "kubectl tq logs shows its log; port-forward needs the right pods/portforward"
        )
        return
    clients = f"{picture['clients']} client{'' if picture['clients'] == 1 else 's'}"
    yield ok("controller", f"queue {picture['queue']} answers, {picture['rows']} rows, {clients}")
    yield from inside(picture)


def _variables(deployment: Manifest) -> dict[str, str]:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry.get("value", "") for each in containers for entry in each.get("env") or []}


def _time(stamp: str) -> datetime:
    """Of RFC 3339 with up to six digits after the second."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00"))
