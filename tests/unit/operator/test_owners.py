"""Pods of every kind of owner are injected, by admission and by ``kubectl tq inject --dry-run`` alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.operator.queues import document, queue
from tq_operator.admission.injection import inject
from tq_operator.admission.preview import pod_templates, preview
from tq_operator.admission.review import bound_queue, read_review
from tq_operator.api.binding import binding_from
from tq_operator.kubectl import main

QUEUE = queue("{backend: {simple: {}}}")
TEMPLATE = {
    "metadata": {"labels": {"transferqueue.io/inject": "quickstart"}},
    "spec": {"containers": [{"name": "main", "image": "t:1"}]},
}
RAY = {
    "headGroupSpec": {"rayStartParams": {}, "template": TEMPLATE},
    "workerGroupSpecs": [{"groupName": name, "template": TEMPLATE} for name in ("rollout", "train")],
}
OWNERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Deployment": ("apps/v1", {"template": TEMPLATE}, 1),
    "Job": ("batch/v1", {"template": TEMPLATE}, 1),
    "CronJob": ("batch/v1", {"jobTemplate": {"spec": {"template": TEMPLATE}}}, 1),
    "JobSet": (
        "jobset.x-k8s.io/v1alpha2",
        {"replicatedJobs": [{"name": n, "template": {"spec": {"template": TEMPLATE}}} for n in "ab"]},
        2,
    ),
    "PyTorchJob": (
        "kubeflow.org/v1",
        {"pytorchReplicaSpecs": {"Master": {"template": TEMPLATE}, "Worker": {"template": TEMPLATE}}},
        2,
    ),
    "RayCluster": ("ray.io/v1", RAY, 3),
    "RayJob": ("ray.io/v1", {"rayClusterSpec": RAY}, 3),
    "RayService": ("ray.io/v1", {"rayClusterConfig": RAY}, 3),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        {"leaderWorkerTemplate": {"leaderTemplate": TEMPLATE, "workerTemplate": TEMPLATE}},
        2,
    ),
}


def owner(kind: str) -> dict[str, Any]:
    version, spec, _ = OWNERS[kind]
    text = yaml.safe_dump({"apiVersion": version, "kind": kind, "metadata": {"name": "job"}, "spec": spec})
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize("kind", OWNERS)
def test_every_pod_template_of_an_owner_is_injected_once(kind: str) -> None:
    shown = preview(owner(kind), {("rl", "quickstart"): QUEUE}, "rl")
    templates = list(pod_templates(shown))
    assert len(templates) == OWNERS[kind][2]
    for template in templates:
        # In the container's own environment, so that raylet and everything it starts have it.
        variables = {entry["name"] for entry in template["spec"]["containers"][0]["env"]}
        assert {"TQ_CONFIG_FILE", "LOCAL_IP", "MC_STORE_MEMCPY"} <= variables
        assert inject(template, QUEUE) == template
    assert preview(shown, {("rl", "quickstart"): QUEUE}, "rl") == shown


def test_a_template_that_asks_for_nothing_stays_as_it_is() -> None:
    plain = owner("Deployment")
    plain["spec"]["template"]["metadata"]["labels"] = {}
    assert preview(plain, {}, "rl") == plain


def test_variables_of_env_from_are_kept_when_they_are_listed() -> None:
    pod = {
        "metadata": {"annotations": {"transferqueue.io/keep-env": "TQ_LOGGING_LEVEL, TQ_CONFIG_FILE"}},
        "spec": {"containers": [{"name": "main", "envFrom": [{"configMapRef": {"name": "settings"}}]}]},
    }
    variables = {entry["name"] for entry in inject(pod, QUEUE)["spec"]["containers"][0]["env"]}
    assert "LOCAL_IP" in variables
    assert not {"TQ_LOGGING_LEVEL", "TQ_CONFIG_FILE"} & variables


def test_the_plugin_prints_the_pods_as_admission_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all([document("{backend: {simple: {}}}"), owner("RayCluster")]))
    for mode, options in (("operator", []), ("off", ["--tls", "off"])):
        assert main(["inject", "--dry-run", "-f", str(file), "-n", "rl", *options]) == 0
        made = queue(f'{{backend: {{simple: {{}}}}, security: {{tls: {{mode: "{mode}"}}}}}}')
        assert yaml.safe_load(capsys.readouterr().out) == preview(
            owner("RayCluster"), {("rl", "quickstart"): made}, "rl"
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (yaml.safe_dump(owner("Job")), "TransferQueue default/quickstart is in none of the files; add it with -f"),
        ("{", "is not YAML"),
        ("- 1", "holds something other than Kubernetes objects"),
        (yaml.safe_dump(document("{backend: {}}")), "set exactly one of simple"),
        ("{kind: Pod, metadata: text}", "holds something other than Kubernetes objects"),
        (
            "{apiVersion: transferqueue.io/v1alpha1, kind: TransferQueue, metadata: null, spec: {backend: {ray: {}}}}",
            "metadata.name",
        ),
        (
            "{kind: Pod, metadata: {labels: [a]}, spec: {containers: []}}",
            "not a pod: metadata.labels must be an object",
        ),
    ],
)
def test_the_plugin_says_in_one_line_what_is_wrong(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pod.yaml").write_text(text)
    assert main(["inject", "--dry-run", "-f", str(tmp_path / "pod.yaml")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_pods_of_another_namespace_need_access_offline_too() -> None:
    job = owner("Job")
    job["metadata"]["namespace"] = "jobs"
    job["spec"]["template"]["metadata"]["labels"] = {"transferqueue.io/inject": "rl_quickstart"}
    with pytest.raises(ValueError, match="does not admit pods of namespace jobs"):
        preview(job, {("rl", "quickstart"): QUEUE}, "default")


def binding(name: str, labels: dict[str, str], queue_name: str = "quickstart") -> Any:
    return binding_from(
        {
            "apiVersion": "transferqueue.io/v1alpha1",
            "kind": "TransferQueueBinding",
            "metadata": {"name": name, "namespace": "jobs"},
            "spec": {"queue": {"name": queue_name, "namespace": "rl"}, "selector": {"matchLabels": labels}},
        }
    )


def test_a_binding_chooses_pods_by_all_of_its_labels() -> None:
    def bound(labels: dict[str, str], *bindings: Any) -> Any:
        pod = {"metadata": {"labels": labels}, "spec": {}}
        return bound_queue(read_review({"request": {"uid": "u", "namespace": "jobs", "object": pod}}), bindings)

    trainers, all_verl = binding("t", {"app": "verl", "role": "trainer"}), binding("v", {"app": "verl"})
    other = binding("o", {"role": "trainer"}, "other")
    assert bound({"app": "verl", "role": "trainer"}, trainers) == ("rl", "quickstart")
    assert bound({"app": "verl"}, trainers) is None
    assert bound({}, trainers) is None
    assert bound({"app": "verl", "role": "trainer"}, trainers, all_verl) == ("rl", "quickstart")
    assert bound({"app": "verl", "transferqueue.io/inject": "own"}, all_verl) is None, "the pod asks for one itself"
    with pytest.raises(ValueError, match="the TransferQueueBindings o, t give this pod different queues"):
        bound({"app": "verl", "role": "trainer"}, trainers, other)
