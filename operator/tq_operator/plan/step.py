"""What to write next for a queue. Pure: the observed children in, the writes and what stands in their way out.

A write that would end a process whose rows live in its memory is held back while there are rows, unless they outlive
it: a storage pod moves them to the others before it stops, if those have room, and a controller with a journal on a
volume takes them up again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tq_operator.plan.children import desired_children
from tq_operator.plan.difference import contains, differs, foreign_owner, owned_by, stamped
from tq_operator.plan.drift import drift, managed_fields_cleared
from tq_operator.plan.masters import lost_log, same_group, with_etcd
from tq_operator.plan.names import digest, is_controller
from tq_operator.plan.pods import ready_pods
from tq_operator.plan.problems import Problem
from tq_operator.plan.queue import Images, Manifest, Queue
from transfer_queue.config.defaults import GROUP
from transfer_queue.config.quantity import amount

__all__ = ["ALLOW_LOSS", "PAUSE", "WORKLOADS", "Children", "Step", "lossy_change", "next_step", "wanted_children"]

ALLOW_LOSS = f"{GROUP}/allow-data-loss"
"""On a queue, "true": changes that lose rows are made."""
PAUSE = f"{GROUP}/pause"
"""On a queue, "true": nothing is written but the status."""
_TEMPLATE = f"{GROUP}/template"
"""On Deployments and StatefulSets: hash of the pod template; another one restarts the pods."""
WORKLOADS = ("Deployment", "StatefulSet")
"""Kinds of children whose pods hold rows."""
_FEWER = "removes the storage units"
_FILL = 0.9
"""Of the storage that stays: how full moved rows may make it."""
_FILL_OF_SEGMENTS = 0.7
"""The same with Mooncake, where each part of a block, of up to 64 MiB, lies in one piece."""

Children = Mapping[tuple[str, str], Manifest]
"""Observed objects by (kind, name)."""


@dataclass(frozen=True)
class Step:
    """Writes in their order. ``held``: why others wait, in words. ``lost``: which rows are gone, in words."""

    apply: Sequence[Manifest] = ()
    delete: Sequence[Manifest] = ()
    problems: Sequence[Problem] = ()
    held: str = ""
    lost: str = ""


def wanted_children(queue: Queue, images: Images) -> list[Manifest]:
    """The children as they are applied."""
    return [stamped(_marked(with_etcd(queue, child))) for child in desired_children(queue, images)]


def next_step(
    queue: Queue,
    images: Images,
    children: Children,
    holds_rows: bool,
    used: int | None = None,
    drained: Collection[str] = (),
) -> Step:
    """``children``: everything that has the name of a wanted child, and everything that carries the queue's labels.
    ``used``: bytes in storage, None if unknown. ``drained``: storage units that have no rows and get none."""
    if queue.annotations.get(PAUSE) == "true":
        return Step(held=f"Paused by the annotation {PAUSE}; remove it to go on.")
    wanted = {_key(child): child for child in wanted_children(queue, images)}
    problems, apply = [], []
    for key, child in wanted.items():
        observed = children.get(key)
        if foreign_owner(observed, queue.uid):
            words = f"{key[0]} {key[1]} exists and belongs to something else; delete it or rename the queue"
            problems.append(Problem("NameConflict", words))
        elif differs(child, observed) or managed_fields_cleared(observed) or drift(child, observed):
            apply.append(child)
    surplus = [
        child
        for key, child in children.items()
        if key not in wanted and owned_by(child, queue.uid) and "deletionTimestamp" not in child["metadata"]
    ]
    # Their rows are gone already, so this waits for nothing.
    restarted = [children[_key(child)] for child in apply if lost_log(child, children.get(_key(child)))]
    lost = _loss(queue, used) if restarted else ""
    apply = [child for child in apply if not lost_log(child, children.get(_key(child)))]
    waits = ""
    if holds_rows and any(_restarts(child, children.get(_key(child))) for child in apply):
        apply, waits = _one_at_a_time(apply, children, queue.child("controller"))
    lossy = [_why(child, children.get(_key(child)), queue, used, drained) for child in apply]
    lossy += [f"removes {child['metadata']['name']}" for child in surplus if _has_rows(queue, _key(child))]
    if holds_rows and any(lossy) and queue.annotations.get(ALLOW_LOSS) != "true":
        # What is missing is made all the same: its rows are gone already.
        missing = [child for child in apply if _key(child) not in children]
        return Step(missing, restarted, problems, _advice(queue.name, [why for why in lossy if why]), lost)
    if waits or _keeps_old_pods(("StatefulSet", queue.child("storage")), wanted, apply, children):
        # A pod that is made from the old template needs its claim template; that of a client got its claim long ago.
        surplus = [child for child in surplus if child["kind"] != "ResourceClaimTemplate"]
    recreated = [children[_key(child)] for child in apply if _changes_volumes(child, children.get(_key(child)))]
    ended = {_key(child) for child in recreated}
    apply = [child for child in apply if _key(child) not in ended]
    return Step(apply, [*surplus, *recreated, *restarted], problems, waits, lost)


def lossy_change(before: Queue, after: Queue, holds_rows: bool, used: int | None = None) -> str:
    """Why the change of the spec must not be made now, with what to do instead; empty if it may."""
    if not holds_rows or after.annotations.get(ALLOW_LOSS) == "true":
        return ""
    images = Images("-", "-")
    old = {_key(child): child for child in wanted_children(before, images)}
    new = {_key(child): child for child in wanted_children(after, images)}
    lossy = [_why(child, old.get(key), after, used) for key, child in new.items()]
    lossy += [f"removes {key[1]}" for key in old if key not in new and _has_rows(after, key)]
    return _advice(after.name, [why for why in lossy if why]) if any(lossy) else ""


def _loss(queue: Queue, used: int | None) -> str:
    stored = f", {used} bytes" if used else ""
    return (
        f"Pod {queue.child('etcd')}-0 was replaced, and the log of the masters was in its volume. Masters and storage "
        f"units start over without rows: what was stored before is lost{stored}. Use an etcd of your own to keep it."
    )


def _restarts(child: Manifest, observed: Manifest | None) -> bool:
    """Whether applying ``child`` ends existing pods.

    What others change in a template is taken back at once, as long as pods of the old template run; once all pods are
    of the changed one, that ends them.
    """
    if observed is None or child["kind"] not in WORKLOADS:
        return False
    mark = observed["metadata"].get("annotations", {}).get(_TEMPLATE)
    if mark is not None and mark != child["metadata"]["annotations"][_TEMPLATE]:
        return True
    changed = not contains(_pod(observed), _pod(child)) or any(
        path.startswith("spec.template.") for path in drift(child, observed)
    )
    return changed and _is_settled(observed)


def _one_at_a_time(apply: Sequence[Manifest], children: Children, controller: str) -> tuple[list[Manifest], str]:
    """Storage pods cannot move their rows while the controller starts: their update waits for it."""
    key = "Deployment", controller
    running = children.get(key)
    if running is None:
        return list(apply), ""
    restarting = any(_key(child) == key and _restarts(child, running) for child in apply)
    storage = {_key(c) for c in apply if c["kind"] == "StatefulSet" and _restarts(c, children.get(_key(c)))}
    if not storage or (_is_settled(running) and not restarting):
        return list(apply), ""
    names = ", ".join(sorted(name for _, name in storage))
    words = f"The update of {names} waits until {controller} is ready, so that rows can be moved."
    return [child for child in apply if _key(child) not in storage], words


def _has_rows(queue: Queue, key: tuple[str, str]) -> bool:
    """Whether rows depend on the pods of a child: on those of every workload except the one that saves the queue."""
    return key[0] in WORKLOADS and key[1] != queue.child("checkpoint")


def _is_settled(workload: Manifest) -> bool:
    """Whether all its pods are ready, and made from its template."""
    return ready_pods(workload) >= int(workload["spec"].get("replicas", 1))


def _keeps_old_pods(key: tuple[str, str], wanted: Children, apply: Sequence[Manifest], children: Children) -> bool:
    """Whether pods of a workload may still be made from an older template, once ``apply`` is written."""
    if key not in wanted:
        return False
    return any(_key(child) == key for child in apply) or not _is_settled(children[key])


def _changes_volumes(child: Manifest, observed: Manifest | None) -> bool:
    """Whether its pods get other volumes of their own, which only another StatefulSet can give them."""
    return observed is not None and child["kind"] == "StatefulSet" and _volumes(child) != _volumes(observed)


def _volumes(workload: Manifest) -> list[tuple[Any, ...]]:
    templates = [(each["metadata"]["name"], each["spec"]) for each in workload["spec"].get("volumeClaimTemplates", [])]
    return [
        (name, spec.get("storageClassName"), amount(spec["resources"]["requests"]["storage"]))
        for name, spec in templates
    ]


def _why(
    child: Manifest, observed: Manifest | None, queue: Queue, used: int | None, drained: Collection[str] = ()
) -> str:
    """What applying ``child`` loses; empty if nothing."""
    if observed is None or not _has_rows(queue, _key(child)):
        return ""
    name, wanted, running = child["metadata"]["name"], child["spec"]["replicas"], observed["spec"].get("replicas", 1)
    storage = name == queue.child("storage")
    if name == queue.child("mooncake-masters") and same_group(child, observed):
        return ""  # one after the other: the rest takes over
    if _restarts(child, observed):
        left = min(wanted, running - 1)
        movable = _shape(child) == _shape(observed) and _moves_rows(observed, queue, left, used)
        safe = movable if storage else _keeps_rows(child, observed)
        if not storage and (shards := _shards(child)) != _shards(observed):
            return f"gives {name} {shards} shards instead of {_shards(observed)}"
        return "" if safe else f"restarts {name}"
    leaving = [f"{name}-{number}" for number in range(wanted, running)]
    if storage and set(leaving) <= set(drained):
        return ""
    if leaving and not (storage and _moves_rows(observed, queue, wanted, used)):
        return f"{_FEWER} {', '.join(leaving)}"
    return ""


def _moves_rows(observed: Manifest, queue: Queue, left: int, used: int | None) -> bool:
    """Whether the storage pods that there are move their rows before they stop, and ``left`` others have room."""
    hooks = [
        container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command") or []
        for container in _pod(observed)["containers"]
    ]
    hook = any("transfer_queue.client.draining" in word for command in hooks for word in command)
    return hook and left > 0 and used is not None and used <= _fill(queue) * left * queue.spec.unit_capacity


def _fill(queue: Queue) -> float:
    return _FILL if queue.spec.backend.simple is not None else _FILL_OF_SEGMENTS


def _shape(workload: Manifest) -> tuple[str, list[str]]:
    """What a storage pod of another size or backend differs in."""
    pod = _pod(workload)
    memory = str(pod["containers"][0]["resources"].get("requests", {}).get("memory"))
    return memory, sorted(volume["name"] for volume in pod.get("volumes", []))


def _shards(workload: Manifest) -> int:
    """Controllers in its pod. Another number of them finds none of the rows, wherever the journals are."""
    return sum(is_controller(container["name"]) for container in _pod(workload)["containers"])


def _keeps_rows(child: Manifest, observed: Manifest) -> bool:
    """Whether the controller that starts takes up what the one before it left on a volume."""
    return _claims(child) != set() and _claims(child) == _claims(observed)


def _claims(workload: Manifest) -> set[str]:
    claims = [volume.get("persistentVolumeClaim") for volume in _pod(workload).get("volumes", [])]
    return {claim["claimName"] for claim in claims if claim}


def _pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def _advice(name: str, lossy: Sequence[str]) -> str:
    fewer = any(why.startswith(_FEWER) for why in lossy)
    drain = (
        "; or move the rows of units with tq drain, in a pod that uses the queue, then kubectl scale" if fewer else ""
    )
    return (
        f"This change {' and '.join(lossy)}, and the rows held there would be lost. Let the consumers finish or clear "
        "the partitions until status.storage.used is 0; or make a second TransferQueue and move the jobs there; or "
        f"give the rows up: kubectl annotate transferqueue {name} {ALLOW_LOSS}=true{drain}"
    )


def _marked(child: Manifest) -> Manifest:
    if child["kind"] not in WORKLOADS:
        return child
    metadata = child["metadata"]
    mark = digest(json.dumps(child["spec"]["template"], sort_keys=True), 16)
    return {**child, "metadata": {**metadata, "annotations": {**metadata["annotations"], _TEMPLATE: mark}}}


def _key(child: Manifest) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]
