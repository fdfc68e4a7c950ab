"""What pods get, as JSON in and JSON out."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
import yaml

from tests.unit.operator.queues import IMAGES, document, queue
from tq_operator.admission.injection import SETTINGS_ANNOTATION, inject, patch, wanted_queue
from tq_operator.admission.preview import preview
from tq_operator.admission.review import MalformedReviewError, Review, mutate_pod, queue_of, read_review, validate_queue
from tq_operator.plan.children import desired_children
from tq_operator.plan.queue import queue_from
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.document import validate_document

TCP = queue("{backend: {mooncake: {protocol: tcp}}, layout: dense}")
RDMA = queue("{backend: {mooncake: {}}, rdma: {policy: required, resourceName: rdma/shared}}")
CLAIM = queue("{backend: {mooncake: {}}, rdma: {policy: required, claim: {deviceClassName: rdma.example.com}}}")
CLAIM_GPU = queue(
    "{backend: {mooncake: {}}, access: {namespaces: [jobs]},"
    " rdma: {claim: {deviceClassName: rdma.example.com, gpuDeviceClassName: gpu.example.com}}}"
)
TLS = queue("{backend: {simple: {}}, security: {tls: {mode: operator}}}")


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """As a Deployment's ReplicaSet makes it."""
    return {
        "metadata": {
            "generateName": "trainer-7d9c-",
            "labels": {"app": "trainer", "transferqueue.io/inject": "quickstart"},
            "ownerReferences": [{"kind": "ReplicaSet", "name": "trainer-7d9c", "uid": "x", "apiVersion": "apps/v1"}],
        },
        "spec": {"containers": list(containers) or [{"name": "trainer", "image": "t:1"}], **spec},
    }


def environment(container: dict[str, Any]) -> dict[str, Any]:
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names)), "a variable is set twice"
    return {
        entry["name"]: entry.get("value") or entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in container["env"]
    }


def applied(before: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """``before`` with a JSON patch, as the apiserver does it (RFC 6902)."""
    result = copy.deepcopy(before)
    for operation in operations:
        *parents, last = operation["path"].strip("/").split("/")
        inner: Any = result
        for part in parents:
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
        if isinstance(inner, list):
            assert operation["op"] == "replace"
            inner[int(last)] = operation["value"]
        elif operation["op"] == "remove":
            del inner[last]
        else:
            inner[last] = operation["value"]
    return result


def test_a_labelled_pod_gets_settings_environment_and_shared_memory() -> None:
    made = inject(pod(), TCP)
    (container,) = made["spec"]["containers"]
    assert environment(container) == {
        "LOCAL_IP": "status.podIP",
        "MC_TCP_BIND_ADDRESS": "status.podIP",
        "MC_STORE_MEMCPY": "0",
        "TQ_LOGGING_LEVEL": "WARNING",
        "TQ_CONFIG_FILE": "/etc/transferqueue/attach.yaml",
    }
    assert {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]} == {
        "/etc/transferqueue": "transferqueue-config",
        "/dev/shm": "transferqueue-shm",
    }
    assert {volume["name"]: volume.get("emptyDir") for volume in made["spec"]["volumes"]} == {
        "transferqueue-config": None,
        "transferqueue-shm": {"medium": "Memory", "sizeLimit": "1Gi"},
    }
    assert made["metadata"]["annotations"]["transferqueue.io/injected"] == "rl/quickstart"


def test_the_settings_in_the_annotation_are_what_the_library_reads() -> None:
    text = inject(pod(), TCP)["metadata"]["annotations"][SETTINGS_ANNOTATION]
    attach = validate_document(AttachConfig, yaml.safe_load(text), "attach.yaml")
    assert (attach.name, attach.layout) == ("quickstart", "dense")
    assert attach.controller.addresses == ["quickstart-controller.rl.svc:50060"]


@pytest.mark.parametrize(
    ("spec", "shards"),
    [("{backend: {mooncake: {protocol: tcp}}}", 1), ("{backend: {simple: {}}, controller: {shards: 3}}", 3)],
)
def test_a_pod_of_kuberay_gets_what_a_pod_of_a_deployment_gets(spec: str, shards: int) -> None:
    """For any backend and number of controllers; the container in which a worker waits for the head stays."""
    waiting = {"name": "wait-gcs-ready", "image": "ray:1"}
    worker = pod(initContainers=[waiting])
    worker["metadata"]["ownerReferences"][0] = {
        "kind": "RayCluster",
        "name": "r",
        "uid": "x",
        "apiVersion": "ray.io/v1",
    }
    made, other = inject(worker, queue(spec)), inject(pod(), queue(spec))
    assert made["spec"].pop("initContainers") == [waiting]
    assert made["spec"] == other["spec"]
    assert made["metadata"]["annotations"] == other["metadata"]["annotations"]
    attach = validate_document(AttachConfig, yaml.safe_load(made["metadata"]["annotations"][SETTINGS_ANNOTATION]), "")
    assert len(attach.controller.addresses) == shards


def test_with_rdma_the_pod_asks_for_its_device_and_may_lock_memory() -> None:
    (container,) = inject(pod(), RDMA)["spec"]["containers"]
    assert environment(container)["MC_ENABLE_DEST_DEVICE_AFFINITY"] == "1"
    assert container["resources"] == {"limits": {"rdma/shared": "1"}, "requests": {"rdma/shared": "1"}}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def requests(given: Any, claim: dict[str, Any]) -> list[str]:
    """Names of the requests in the template of a pod's claim."""
    (template,) = [
        child
        for child in desired_children(given, IMAGES)
        if (child["kind"], child["metadata"]["name"]) == ("ResourceClaimTemplate", claim["resourceClaimTemplateName"])
    ]
    return [request["name"] for request in template["spec"]["spec"]["devices"]["requests"]]


@pytest.mark.parametrize(("given", "wanted"), [(CLAIM, ["rdma"]), (CLAIM_GPU, ["rdma", "gpu"])])
def test_with_a_claim_the_pod_gets_one_and_its_containers_use_it(given: Any, wanted: list[str]) -> None:
    before = pod({"name": "a"}, {"name": "b"}, {"name": "istio-proxy"})
    made = inject(before, given)
    (claim,) = made["spec"]["resourceClaims"]
    assert claim["name"] == "rdma"
    assert requests(given, claim) == wanted
    first, second, proxy = made["spec"]["containers"]
    for container in (first, second):
        assert container["resources"] == {"claims": [{"name": "rdma"}]}
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert environment(container)["MC_ENABLE_DEST_DEVICE_AFFINITY"] == "1"
    assert proxy == {"name": "istio-proxy"}
    assert applied(before, patch(before, made)) == made


@pytest.mark.parametrize("source", ["resourceClaimName", "resourceClaimTemplateName"])
def test_a_pod_with_a_claim_of_its_own_keeps_it(source: str) -> None:
    own = {"name": "rdma", source: "mine"}
    used = {"name": "a", "resources": {"claims": [{"name": "rdma", "request": "nic"}]}}
    made = inject(pod(used, {"name": "b"}, resourceClaims=[own]), CLAIM)
    assert made["spec"]["resourceClaims"] == [own]
    first, second = made["spec"]["containers"]
    assert first["resources"] == used["resources"]
    assert second["resources"] == {}


def test_a_pod_that_has_a_claim_of_the_template_gets_no_second_one() -> None:
    (template,) = {entry["resourceClaimTemplateName"] for entry in inject(pod(), CLAIM)["spec"]["resourceClaims"]}
    own = {"name": "nic", "resourceClaimTemplateName": template}
    made = inject(pod({"name": "a", "resources": {"claims": [{"name": "nic"}]}}, resourceClaims=[own]), CLAIM)
    assert made["spec"]["resourceClaims"] == [own]
    assert made["spec"]["containers"][0]["resources"] == {"claims": [{"name": "nic"}]}


def test_other_claims_of_a_pod_stay_beside_that_for_rdma() -> None:
    own = {"name": "disk", "resourceClaimName": "mine"}
    made = inject(pod({"name": "a", "resources": {"claims": [{"name": "disk"}]}}, resourceClaims=[own]), CLAIM)
    assert [entry["name"] for entry in made["spec"]["resourceClaims"]] == ["disk", "rdma"]
    assert made["spec"]["containers"][0]["resources"] == {"claims": [{"name": "disk"}, {"name": "rdma"}]}


def test_a_pod_of_another_namespace_needs_a_claim_of_its_own() -> None:
    response = mutate_pod(review(pod(), "jobs"), CLAIM_GPU)["response"]
    assert response["allowed"] is False
    words = response["status"]["message"]
    assert words.startswith("TransferQueue rl/quickstart gives RDMA devices by resource claims")
    assert "make a ResourceClaimTemplate in jobs and give the pod a resource claim rdma of it" in words
    asked = pod()
    asked["metadata"]["labels"]["transferqueue.io/inject"] = "rl_quickstart"
    with pytest.raises(ValueError, match="make a ResourceClaimTemplate in jobs"):
        preview(asked, {("rl", "quickstart"): CLAIM_GPU}, "jobs")
    own = pod(
        {"name": "a", "resources": {"claims": [{"name": "rdma"}]}},
        resourceClaims=[{"name": "rdma", "resourceClaimTemplateName": "mine"}],
    )
    made = inject(own, CLAIM_GPU, "jobs")
    assert mutate_pod(review(own, "jobs"), CLAIM_GPU)["response"]["allowed"] is True
    assert made["spec"]["resourceClaims"] == own["spec"]["resourceClaims"]
    assert made["spec"]["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_over_tcp_pods_of_any_namespace_come_without_a_claim() -> None:
    stored = document("{backend: {mooncake: {}}, access: {namespaces: [jobs]}, rdma: {claim: {deviceClassName: a.b}}}")
    fallen_back = queue_from({**stored, "status": {"transport": "tcp"}})
    assert mutate_pod(review(pod(), "jobs"), fallen_back)["response"]["allowed"] is True
    assert "resourceClaims" not in inject(pod(), fallen_back, "jobs")["spec"]


def test_what_the_pod_says_itself_stays() -> None:
    own = {
        "name": "trainer",
        "env": [{"name": "TQ_LOGGING_LEVEL", "value": "DEBUG"}, {"name": "PEER", "value": "$(LOCAL_IP):1"}],
        "volumeMounts": [{"name": "mine", "mountPath": "/dev/shm/"}],
        "resources": {"limits": {"rdma/shared": "2"}},
    }
    made = inject(pod(own, volumes=[{"name": "mine", "emptyDir": {"medium": "Memory"}}]), RDMA)
    (container,) = made["spec"]["containers"]
    assert environment(container)["TQ_LOGGING_LEVEL"] == "DEBUG"
    assert container["resources"]["limits"] == {"rdma/shared": "2"}
    assert [mount["name"] for mount in container["volumeMounts"]] == ["mine", "transferqueue-config"]
    assert [volume["name"] for volume in made["spec"]["volumes"]] == ["mine", "transferqueue-config"]
    names = [entry["name"] for entry in container["env"]]
    assert names.index("LOCAL_IP") < names.index("PEER"), "the pod's own variables can refer to ours"


@pytest.mark.parametrize("variable", ["TQ_CONTROLLER_ADDRESS", "TQ_CONFIG_FILE"])
def test_a_pod_that_names_its_queue_itself_keeps_it(variable: str) -> None:
    (container,) = inject(pod({"name": "t", "env": [{"name": variable, "value": "own"}]}), TCP)["spec"]["containers"]
    assert {name: value for name, value in environment(container).items() if name.startswith("TQ_C")} == {
        variable: "own"
    }


def test_init_containers_and_known_sidecars_are_left_as_they_are() -> None:
    init, sidecar = {"name": "fetch"}, {"name": "istio-proxy"}
    before = pod({"name": "trainer"}, sidecar, initContainers=[init, {"name": "log", "restartPolicy": "Always"}])
    made = inject(before, TCP)
    assert made["spec"]["initContainers"] == before["spec"]["initContainers"]
    assert made["spec"]["containers"][1] == sidecar
    everywhere = queue("{backend: {simple: {}}, injection: {initContainers: true, excludeContainers: [log]}}")
    made = inject(before, everywhere)
    assert ["env" in container for container in made["spec"]["initContainers"]] == [True, False]


def secrets(pod: dict[str, Any]) -> dict[str, str]:
    """Mount path -> Secret, where the first container has it."""
    volumes = {
        volume["name"]: volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume
    }
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts if mount["name"] in volumes}


def attach_config(pod: dict[str, Any]) -> AttachConfig:
    text = pod["metadata"]["annotations"][SETTINGS_ANNOTATION]
    return validate_document(AttachConfig, yaml.safe_load(text), "attach.yaml")


def test_with_tls_the_pod_gets_the_certificate_of_its_namespace_and_checks_the_servers() -> None:
    made = inject(pod(), TLS)
    assert secrets(made) == {"/etc/transferqueue-tls": "quickstart-tls-client"}
    tls = attach_config(made).security.tls
    assert tls is not None
    assert (tls.ca, tls.certificate, tls.key, tls.server_name) == (
        "/etc/transferqueue-tls/ca.crt",
        "/etc/transferqueue-tls/tls.crt",
        "/etc/transferqueue-tls/tls.key",
        "quickstart-controller.rl.svc",
    )
    (elsewhere,) = secrets(inject(pod(), TLS, "jobs")).values()
    assert elsewhere not in secrets(made).values(), "a queue of that name may be there too"


def test_a_pod_that_names_a_token_shows_it_instead_of_a_certificate() -> None:
    before = pod()
    before["metadata"]["annotations"] = {"transferqueue.io/token-secret": "mine"}
    made = inject(before, TLS)
    assert secrets(made) == {"/etc/transferqueue-tls": "quickstart-tls-client", "/etc/transferqueue-token": "mine"}
    security = attach_config(made).security
    assert security.token_file == "/etc/transferqueue-token/token"
    assert security.tls is not None
    assert security.tls.certificate is None


def test_secrets_of_ones_own_are_used_as_they_are_called() -> None:
    tls = "{mode: secret, serverSecret: servers, clientSecret: clients}"
    own = queue(f"{{backend: {{simple: {{}}}}, security: {{tls: {tls}}}}}")
    for namespace in ("rl", "jobs"):
        assert secrets(inject(pod(), own, namespace)) == {"/etc/transferqueue-tls": "clients"}


def test_pods_get_what_the_servers_run_with_until_those_have_changed() -> None:
    stored = {**document("{backend: {simple: {}}}"), "status": {"transport": "tcp", "tls": "off"}}
    assert attach_config(inject(pod(), queue_from(stored, "operator"))).security.tls is None
    stored["status"]["tls"] = "operator"
    assert attach_config(inject(pod(), queue_from(stored, "off"))).security.tls is not None


@pytest.mark.parametrize("given", [TCP, RDMA, TLS, CLAIM, CLAIM_GPU])
def test_a_second_injection_changes_nothing(given: Any) -> None:
    once = inject(pod({"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}), given)
    assert inject(once, given) == once
    assert patch(once, inject(once, given)) == []


def test_a_pod_made_again_from_an_injected_one_gets_the_queue_that_it_asks_for_now() -> None:
    after = queue("{backend: {simple: {}}, controller: {port: 50070}, injection: {sharedMemory: 3Gi}}")
    assert inject(inject(pod(), TLS), after) == inject(pod(), after)
    assert secrets(inject(inject(pod(), after), TLS)) == secrets(inject(pod(), TLS))


@pytest.mark.parametrize("first", [TCP, RDMA, TLS, CLAIM, CLAIM_GPU])
@pytest.mark.parametrize("then", [TCP, RDMA, CLAIM_GPU])
def test_nothing_of_an_earlier_injection_is_left(first: Any, then: Any) -> None:
    before = pod({"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"})
    once = inject(before, first)
    again = inject(once, then)
    assert again == inject(before, then)
    assert applied(once, patch(once, again)) == again


def test_variables_of_an_earlier_queue_go_and_what_was_changed_since_stays() -> None:
    first = queue("{backend: {simple: {}}, injection: {env: {A: '1', B: '1', C: '1'}}}")
    then = queue("{backend: {simple: {}}, injection: {env: {B: '2', D: '2'}}}")
    once = inject(pod({"name": "t"}), first)
    entry = next(entry for entry in once["spec"]["containers"][0]["env"] if entry["name"] == "C")
    entry["value"] = "own"
    found = environment(inject(once, then)["spec"]["containers"][0])
    assert {name: found.get(name) for name in "ABCD"} == {"A": None, "B": "2", "C": "own", "D": "2"}


def test_a_container_that_the_queue_leaves_out_now_is_as_it_was() -> None:
    then = queue("{backend: {simple: {}}, injection: {excludeContainers: [b]}}")
    made = inject(inject(pod({"name": "a"}, {"name": "b"}), RDMA), then)
    assert {name: value for name, value in made["spec"]["containers"][1].items() if value} == {"name": "b"}


def test_variables_of_an_operator_that_wrote_nothing_down_are_known() -> None:
    once = inject(pod(), RDMA)
    del once["metadata"]["annotations"]["transferqueue.io/added"]
    again = inject(once, RDMA)
    assert again["spec"] == once["spec"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            pod(volumes=[{"name": "transferqueue-tls", "emptyDir": {}}]),
            "transferqueue-tls is the name of a volume that",
        ),
        (
            pod({"name": "t", "volumeMounts": [{"name": "mine", "mountPath": "/etc/transferqueue/"}]}),
            "container t: volume mine is mounted at /etc/transferqueue, where TransferQueue rl/quickstart injects its",
        ),
        (
            pod({"name": "t", "volumeMounts": [{"name": "mine", "mountPath": "/etc/transferqueue-tls/ca"}]}),
            "container t: volume mine is mounted at /etc/transferqueue-tls/ca",
        ),
    ],
)
def test_names_and_places_that_are_ours_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    response = mutate_pod(review(given), TLS)["response"]
    assert response["allowed"] is False
    assert words in response["status"]["message"]


def test_settings_of_a_pod_that_names_its_queue_itself_may_lie_where_ours_do() -> None:
    mounts = [{"name": "mine", "mountPath": "/etc/transferqueue"}]
    own = pod({"name": "t", "env": [{"name": "TQ_CONFIG_FILE", "value": "own"}], "volumeMounts": mounts})
    assert mutate_pod(review(own), TCP)["response"]["allowed"] is True
    assert mutate_pod(review(inject(pod(), TLS)), TLS)["response"]["allowed"] is True


def test_label_and_annotation_that_name_different_queues_are_refused() -> None:
    key = "transferqueue.io/inject"
    for label, annotation in (("a", "b"), ("rl_a", "jobs/a")):
        with pytest.raises(ValueError, match=f'says "{label}" and the annotation of that name "{annotation}"'):
            wanted_queue({"metadata": {"labels": {key: label}, "annotations": {key: annotation}}}, "jobs")
    long = "a" * 64  # no label can say so
    assert wanted_queue({"metadata": {"labels": {key: "x"}, "annotations": {key: long}}}, "jobs") == ("jobs", long)


def test_the_deletion_of_a_queue_in_use_is_warned_of() -> None:
    status = {"injected": 2, "storage": {"used": "3Gi"}}
    request = {"uid": "1", "namespace": "rl", "operation": "DELETE", "object": None}
    used = {**request, "oldObject": {**document("{backend: {simple: {}}}"), "status": status}}
    response = validate_queue(read_review({"request": used}))["response"]
    assert response["allowed"] is True
    pods, rows = response["warnings"]
    assert "2 pods use it" in pods
    assert "3Gi of rows" in rows
    idle = {**request, "oldObject": document("{backend: {simple: {}}}")}
    assert "warnings" not in validate_queue(read_review({"request": idle}))["response"]


def test_another_webhook_in_between_costs_nothing_but_its_own_container() -> None:
    once = inject(pod(), TCP)
    once["spec"]["containers"].append({"name": "added", "image": "a:1"})
    operations = patch(once, inject(once, TCP))
    assert [operation["path"] for operation in operations] == ["/metadata/annotations", "/spec/containers/1"]


@pytest.mark.parametrize(
    "before",
    [
        pod(),
        pod({"name": "a", "env": None, "volumeMounts": None}, volumes=None),
        pod({"name": "a"}, {"name": "b"}, initContainers=[{"name": "i"}], volumes=[{"name": "v"}]),
        {"metadata": {"annotations": {"a/b": "c"}, "labels": {}}, "spec": {"containers": [{"name": "x"}]}},
        {"spec": {"containers": [{"name": "x"}]}},
    ],
)
def test_the_patch_makes_of_the_pod_what_injection_wants(before: dict[str, Any]) -> None:
    unchanged = copy.deepcopy(before)
    after = inject(before, TCP)
    assert before == unchanged, "the pod that was given is not touched"
    assert applied(before, patch(before, after)) == after


@pytest.mark.parametrize(
    ("labels", "annotations", "wanted"),
    [
        ({}, {}, None),
        ({"transferqueue.io/inject": ""}, {}, None),
        ({"transferqueue.io/inject": "q"}, {}, ("jobs", "q")),
        ({"transferqueue.io/inject": "with.dots"}, {}, ("jobs", "with.dots")),
        ({"transferqueue.io/inject": "rl_q"}, {}, ("rl", "q")),
        ({"transferqueue.io/inject": "q"}, {"transferqueue.io/inject": "rl/q"}, ("rl", "q")),
    ],
)
def test_label_and_annotation_name_the_queue(labels: Any, annotations: Any, wanted: Any) -> None:
    assert wanted_queue({"metadata": {"labels": labels, "annotations": annotations}}, "jobs") == wanted


@pytest.mark.parametrize("asked", ["a/b/c", "/q", "rl/", "_q"])
def test_a_name_that_is_none_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="is neither NAME nor NAMESPACE_NAME of a TransferQueue"):
        wanted_queue({"metadata": {"annotations": {"transferqueue.io/inject": asked}}}, "jobs")


def review(subject: Any, namespace: str = "rl") -> Review:
    return read_review({"request": {"uid": "1", "namespace": namespace, "object": subject}})


def test_the_answer_carries_the_patch() -> None:
    response = mutate_pod(review(pod()), TCP)["response"]
    operations = json.loads(base64.b64decode(response["patch"]))
    assert (response["uid"], response["allowed"], response["patchType"]) == ("1", True, "JSONPatch")
    assert applied(pod(), operations) == inject(pod(), TCP)


@pytest.mark.parametrize(
    ("namespaces", "allowed"), [("[]", False), ("[other]", False), ("[jobs]", True), ('["*"]', True)]
)
def test_another_namespace_needs_access(namespaces: str, allowed: bool) -> None:
    given = queue(f"{{backend: {{simple: {{}}}}, access: {{namespaces: {namespaces}}}}}")
    response = mutate_pod(review(pod(), "jobs"), given)["response"]
    assert response["allowed"] is allowed
    if not allowed:
        assert (
            "does not admit pods of namespace jobs; add it to spec.access.namespaces" in response["status"]["message"]
        )


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        [],
        "text",
        {},
        {"request": 5},
        {"request": {"uid": 5}},
        {"request": {"uid": "1"}},
        {"request": {"uid": "1", "object": "text"}},
    ],
)
def test_garbage_is_no_review(garbage: Any) -> None:
    with pytest.raises(MalformedReviewError):
        read_review(garbage)


@pytest.mark.parametrize(
    "subject",
    [
        {"spec": "text"},
        {"spec": {"containers": "text"}},
        {"spec": {"containers": ["text"]}},
        {"spec": {"containers": [{"env": 5}]}},
        {"spec": {"containers": [{"env": ["X=1"]}]}},
        {"spec": {"containers": [], "volumes": [None]}},
        {"spec": {"containers": [], "resourceClaims": ["rdma"]}},
        {"spec": {"containers": [{"resources": "text"}]}},
        {"spec": {"containers": [{"resources": {"claims": ["rdma"]}}]}},
    ],
)
def test_a_pod_that_is_none_is_refused_in_words(subject: Any) -> None:
    with pytest.raises(ValueError, match="not a pod: "):
        queue_of(review(subject))


def test_a_queue_is_validated_with_the_words_of_the_library() -> None:
    assert validate_queue(review(document("{backend: {simple: {}}}")))["response"]["allowed"] is True
    process = "{backend: {simple: {}}, controller: {durability: process}}"
    (warning,) = validate_queue(review(document(process)))["response"]["warnings"]
    assert "deleting the controller's pod loses every row" in warning
    assert len(warning) <= 256, "kubectl shows no more"
    response = validate_queue(review(document("{backend: {simple: {}, ray: {}}}")))["response"]
    assert response["allowed"] is False
    assert response["status"]["message"] == "spec.backend: set exactly one of simple, mooncake, yuanrong, ray"


def test_a_queue_that_an_older_version_accepted_can_be_changed_but_for_its_spec() -> None:
    stored = document("{backend: {simple: {}, ray: {}}}", finalizers=["someone.example/x"])
    kept = Review("u", "rl", document("{backend: {simple: {}, ray: {}}}"), stored)
    assert validate_queue(kept)["response"]["allowed"] is True
    other = Review("u", "rl", document("{backend: {simple: {}, mooncake: {}}}"), stored)
    assert validate_queue(other)["response"]["allowed"] is False


def update(before: str, after: str, used: str, **annotations: str) -> dict[str, Any]:
    status = {"storage": {"used": used}}
    return {
        "request": {
            "uid": "u",
            "namespace": "rl",
            "object": document(after, annotations=annotations),
            "oldObject": {**document(before), "status": status},
        }
    }


@pytest.mark.parametrize(("used", "allowed"), [("3Mi", False), ("0", True)])
def test_a_change_that_would_lose_rows_is_refused_with_what_to_do(used: str, allowed: bool) -> None:
    review = read_review(update("{backend: {simple: {}}}", "{backend: {ray: {}}}", used))
    response = validate_queue(review)["response"]
    assert response["allowed"] is allowed
    if not allowed:
        words = response["status"]["message"]
        assert words.startswith("This change restarts quickstart-controller and removes quickstart-storage")
        assert "kubectl annotate transferqueue quickstart transferqueue.io/allow-data-loss=true" in words


@pytest.mark.parametrize(("used", "allowed"), [("3Mi", True), ("1.5Gi", False)])
def test_storage_units_are_taken_away_if_the_others_have_room_for_their_rows(used: str, allowed: bool) -> None:
    two, one = (f"{{backend: {{simple: {{}}}}, storage: {{replicas: {count}, capacity: 1Gi}}}}" for count in (2, 1))
    response = validate_queue(read_review(update(two, one, used)))["response"]
    assert response["allowed"] is allowed
    assert allowed or "This change removes the storage units quickstart-storage-" in response["status"]["message"]


def test_rows_that_are_given_up_stand_in_the_way_of_nothing() -> None:
    given_up = {"transferqueue.io/allow-data-loss": "true"}
    review = read_review(update("{backend: {simple: {}}}", "{backend: {ray: {}}}", "3Mi", **given_up))
    assert validate_queue(review)["response"]["allowed"]
