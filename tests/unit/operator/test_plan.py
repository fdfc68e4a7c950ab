"""A spec in, manifests out: each plans/NAME.yaml holds a spec and then every child that the operator makes of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.operator.queues import IMAGES, queue
from tests.unit.operator.served import NEWER, SERVED
from tq_operator.admission.injection import inject
from tq_operator.plan.children import CONFIG_ANNOTATION, desired_children
from tq_operator.plan.difference import differs, stamped
from tq_operator.plan.issued import client_certificate, server_certificate
from tq_operator.plan.names import child_name, selector
from tq_operator.plan.settings import controller_settings
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import CheckpointConfig, ControllerConfig, StorageUnitConfig
from transfer_queue.config.security import Policy
from transfer_queue.launch.plan import plan_local
from transfer_queue.storage.mooncake.settings import parse_settings

PLANS = Path(__file__).parent / "plans"
SPECS = {
    "simple": "{backend: {simple: {}}}",
    "mooncake-tcp": "{backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi}}, storage: {replicas: 3}}",
    "mooncake-rdma": "{backend: {mooncake: {}}, rdma: {policy: required, resourceName: rdma/shared}}",
    "mooncake-rdma-claim": """
backend: {mooncake: {}}
rdma: {policy: required, claim: {deviceClassName: rdma.example.com, gpuDeviceClassName: gpu.example.com}}
""",
    "mooncake-ha": """
backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi, highAvailability: {etcd: {endpoints: [a:2379, b:2379]}}}}
""",
    "mooncake-ha-development": """
backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi, highAvailability: {etcd: {development: {}}}}}
""",
    "overrides": """
backend: {simple: {}}
controller:
  image: registry.example/own:2
  port: 6000
  resources: {limits: {memory: 2Gi}}
  sampler: {name: GRPOGroupNSampler, args: {n_samples_per_prompt: 8}}
storage:
  capacity: 1.5Gi
  nodeSelector: {disk: fast}
  tolerations: [{key: gpu, operator: Exists}]
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: []}}}
  annotations: {team: rl}
  env: [{name: MC_STORE_MEMCPY, value: "1"}, {name: OWN, value: own}]
  extraContainers: [{name: log-shipper, image: "shipper:1"}]
  topologySpread: [{maxSkew: 2, topologyKey: rack, whenUnsatisfiable: DoNotSchedule}]
security: {networkPolicy: true}
layout: dense
""",
    "ray": "{backend: {ray: {}}}",
    "yuanrong-of-each-node": "{backend: {yuanrong: {}}, storage: {image: 'registry.example/yuanrong:1'}}",
    "yuanrong-of-all": "{backend: {yuanrong: {worker: 'head:1', requestTimeout: 5}}}",
    "spill": "{backend: {simple: {ssdOffload: {capacity: 500Gi}}}}",
    "spill-to-a-class": "{backend: {simple: {ssdOffload: {path: /fast, storageClassName: local-ssd}}}}",
    "durable-process": "{backend: {simple: {}}, controller: {durability: process}}",
    "tls": "{backend: {mooncake: {protocol: tcp}}, security: {tls: {mode: operator}}}",
    "tls-with-a-policy": """
backend: {simple: {}}
security:
  tls: {mode: secret, serverSecret: own-server, clientSecret: own-client}
  tokensSecret: tokens
  policy:
    - {name: rollout, token: rollout, roles: [producer], partitions: [train/]}
    - {name: team-a, namespace: team-a, roles: [producer, consumer], partitions: [a/]}
    - {name: root, certificate: root.example, roles: [admin], partitions: [""]}
""",
    "checkpoint": """
backend: {mooncake: {}}
rdma: {policy: required, resourceName: rdma/shared}
security: {networkPolicy: true, tls: {mode: operator}}
checkpoint: {schedule: 10m, destination: "s3://bucket/run7", keep: 5, credentialsFrom: bucket}
restoreFrom: s3://bucket/run6
""",
    "durable-node": "{backend: {simple: {}}, controller: {durability: node, journal: {storageClassName: fast}}}",
    "shards": """
backend: {simple: {}}
controller: {shards: 3, durability: node, sampleCapacity: 11, resources: {limits: {memory: 2Gi}}}
security: {networkPolicy: true}
""",
}


class _Dumper(yaml.SafeDumper):
    """Configuration files inside of manifests stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def children(spec: str, name: str = "quickstart") -> dict[tuple[str, str], dict[str, Any]]:
    found = desired_children(queue(spec, name), IMAGES)
    return {(child["kind"], child["metadata"]["name"]): child for child in found}


@pytest.mark.parametrize("name", SPECS)
def test_the_children_are_as_recorded(name: str, regenerate: bool) -> None:
    documents = [{"spec": yaml.safe_load(SPECS[name])}, *desired_children(queue(SPECS[name]), IMAGES)]
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
    path = PLANS / f"{name}.yaml"
    if regenerate:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"see the difference: pytest {__file__} --regenerate; git diff"


@pytest.mark.parametrize("name", ["mooncake-tcp", "mooncake-ha", "yuanrong-of-all"])
def test_the_units_of_every_backend_serve_all_shards(name: str) -> None:
    spec = yaml.safe_load(SPECS[name])
    spec["controller"] = {**spec.get("controller", {}), "shards": 2}
    data = children(yaml.safe_dump(spec))["ConfigMap", "quickstart-config"]["data"]
    files = ["controller-0.yaml", "controller-1.yaml"]
    shards = [validate_document(ControllerConfig, yaml.safe_load(data[file]), file) for file in files]
    unit = validate_document(StorageUnitConfig, yaml.safe_load(data["storage.yaml"]), "storage.yaml")
    addresses = [f"quickstart-controller.rl.svc:{port}" for port in (50060, 50061)]
    assert [unit.shards, *(one.shards for one in shards)] == 3 * [addresses]
    assert unit.backend == shards[0].backend == shards[1].backend


def test_shards_have_what_those_of_tq_up_have_and_nothing_of_each_other() -> None:
    found = children(SPECS["shards"])
    data = {name: yaml.safe_load(text) for name, text in found["ConfigMap", "quickstart-config"]["data"].items()}
    files = [f"controller-{shard}.yaml" for shard in range(3)]
    shards = [validate_document(ControllerConfig, data[file], file) for file in files]
    local = plan_local(queue(SPECS["shards"]).resource).controllers([50060, 50061, 50062])
    for here, there in zip(shards, local, strict=True):
        kept = ("port", "metrics_port", "sample_capacity", "shard", "durability", "backend", "sampler")
        assert {name: getattr(here, name) for name in kept} == {name: getattr(there, name) for name in kept}
    assert [one.journal for one in shards] == ["/journal/0-of-3", "/journal/1-of-3", "/journal/2-of-3"]
    addresses = [f"quickstart-controller.rl.svc:{one.port}" for one in shards]
    unit = validate_document(StorageUnitConfig, data["storage.yaml"], "storage.yaml")
    assert [unit.shards, unit.controller, *(one.shards for one in shards)] == 5 * [addresses]
    assert data["attach.yaml"]["controller"]["addresses"] == addresses

    pod = found["Deployment", "quickstart-controller"]["spec"]["template"]["spec"]
    for container, file, one in zip(pod["containers"], files, shards, strict=True):
        assert container["command"][-1] == f"/etc/transferqueue/{file}"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert sorted(ports.values()) == [one.metrics_port, one.port]
        probes = [container[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert [ports[name] for name in probes] == 3 * [one.metrics_port]
        assert container["resources"]["limits"] == {"memory": "2Gi"}
        assert container["securityContext"] == pod["containers"][0]["securityContext"]
    names = [port["name"] for container in pod["containers"] for port in container["ports"]]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 15, "what a port may be called"
    front = found["Service", "quickstart-controller"]["spec"]
    assert [port["targetPort"] for port in front["ports"]] == names
    assert front["publishNotReadyAddresses"] is True, "one that is gone would cut off the others"
    open_to_all = found["NetworkPolicy", "quickstart-access"]["spec"]["ingress"][1]["ports"]
    assert {one.metrics_port for one in shards} <= {port["port"] for port in open_to_all}


PLACE = {
    "host": "loopback alone on one machine, all addresses of a pod on a cluster",
    "advertise_host": "the name of a Service, the address of a pod",
    "controller": "where the controllers are",
    "shards": "where the controllers are",
    "journal": "tq up has a folder for each queue, a cluster a volume",
    "directory": "tq up has a folder for each queue, a cluster a volume",
    "security": "tq up adds the files of its certificates at the start",
    "uid": "tq up makes it at the first start, a cluster has that of the resource",
}
OF_EACH_UNIT = {
    "name": "the kubelet tells each pod its name",
    "port": "units of one machine share its ports",
    "metrics_port": "units of one machine share its ports",
}
BACKEND_PLACE = {
    "metadataServer",
    "masterServerAddress",
    "adminAddress",
    "clusterId",
    "worker",
    "evictionDisabled",  # as the operator starts the master
}


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("ray", "spill", "tls-with-a-policy")])
def test_the_processes_have_the_same_settings_on_a_cluster_and_on_one_machine(name: str) -> None:
    wanted = queue(SPECS[name])
    plan = plan_local(wanted.resource)
    data = {
        file: yaml.safe_load(text)
        for file, text in children(SPECS[name])["ConfigMap", "quickstart-config"]["data"].items()
    }
    ports = [wanted.spec.controller.port + shard for shard in range(plan.shards)]
    files = ["controller.yaml"] if plan.shards == 1 else [f"controller-{shard}.yaml" for shard in range(plan.shards)]
    pairs: list[tuple[Any, Any, dict[str, str]]] = [
        (validate_document(ControllerConfig, data[file], file), here, PLACE)
        for file, here in zip(files, plan.controllers(ports), strict=True)
    ]
    if "storage.yaml" in data:
        there = validate_document(StorageUnitConfig, data["storage.yaml"], "storage.yaml")
        pairs += [(there, here, PLACE | OF_EACH_UNIT) for here in plan.unit_configs("127.0.0.1:1")]
    for there, here, reasons in pairs:
        for field in type(there).model_fields.keys() - reasons.keys() - {"backend"}:
            assert getattr(there, field) == getattr(here, field), field
        assert there.backend.kind == here.backend.kind
        assert _without_place(there.backend.settings) == _without_place(here.backend.settings)


def _without_place(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in BACKEND_PLACE}


def test_a_controller_expects_the_units_of_the_resource_and_is_not_restarted_by_their_number() -> None:
    def made(replicas: int) -> tuple[int, str]:
        found = children(f"{{backend: {{simple: {{}}}}, storage: {{replicas: {replicas}}}}}")
        settings = yaml.safe_load(found["ConfigMap", "quickstart-config"]["data"]["controller.yaml"])
        template = found["Deployment", "quickstart-controller"]["spec"]["template"]
        return settings["expectedUnits"], template["metadata"]["annotations"][CONFIG_ANNOTATION]

    (two, before), (three, after) = made(2), made(3)
    assert (two, three) == (2, 3)
    assert before == after


@pytest.mark.parametrize("name", [name for name in SPECS if name != "shards"])
def test_the_files_in_the_config_map_are_what_the_processes_accept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = children(SPECS[name])["ConfigMap", "quickstart-config"]["data"]
    controller = validate_document(ControllerConfig, yaml.safe_load(data["controller.yaml"]), "controller.yaml")
    attach = validate_document(AttachConfig, yaml.safe_load(data["attach.yaml"]), "attach.yaml")
    assert attach.controller.addresses == [f"quickstart-controller.rl.svc:{controller.port}"]
    if "storage.yaml" in data:
        unit = validate_document(StorageUnitConfig, yaml.safe_load(data["storage.yaml"]), "storage.yaml")
        assert unit.controller == attach.controller.addresses
        assert unit.backend == controller.backend
    if "checkpoint.yaml" in data:
        saves = validate_document(CheckpointConfig, yaml.safe_load(data["checkpoint.yaml"]), "checkpoint.yaml")
        assert saves.attach == attach
        assert saves.restore_from == "s3://bucket/run6"
    if controller.backend.kind == "mooncake":
        settings = parse_settings(controller.backend.settings)
        etcd = {"mooncake-ha": "a:2379;b:2379", "mooncake-ha-development": "quickstart-etcd.rl.svc:2379"}.get(name)
        master = f"etcd://{etcd}" if etcd else "quickstart-mooncake-master.rl.svc:50051"
        assert settings.master_server_address == master
        assert settings.metadata_server == (
            master if etcd else "http://quickstart-mooncake-master.rl.svc:8080/metadata"
        )


@pytest.mark.parametrize(
    "name", ["simple", "mooncake-tcp", "mooncake-ha-development", "overrides", "tls-with-a-policy"]
)
def test_every_pod_is_admitted_by_the_restricted_pod_security_standard(name: str) -> None:
    templates = [
        child["spec"]["template"]["spec"]
        for child in children(SPECS[name]).values()
        if "template" in child.get("spec", {})
    ]
    assert templates
    for pod in templates:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert set(pod) & {"hostNetwork", "hostPID", "hostIPC"} == set()
        assert all("hostPath" not in volume for volume in pod["volumes"])
        for container in pod["containers"][:1]:  # others are the user's own
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", SPECS)
def test_only_a_claim_needs_a_newer_kubernetes_than_1_29(name: str) -> None:
    newer = set()
    for child in desired_children(queue(SPECS[name]), IMAGES):
        version, kind = child["apiVersion"], child["kind"]
        if kind not in SERVED.get(version, ()):
            assert kind in NEWER[version]
            newer.add(kind)
    assert newer == ({"ResourceClaimTemplate"} if name == "mooncake-rdma-claim" else set())


@pytest.mark.parametrize("name", [name for name in SPECS if name != "ray"])
def test_a_network_policy_lets_in_whoever_has_the_queue_and_opens_the_metrics_ports_that_there_are(name: str) -> None:
    spec = yaml.safe_load(SPECS[name])
    spec["security"] = {**spec.get("security", {}), "networkPolicy": True}
    made = children(yaml.safe_dump(spec))
    policy = made["NetworkPolicy", "quickstart-access"]["spec"]
    pods = [child["spec"]["template"] for (kind, _), child in made.items() if kind in ("Deployment", "StatefulSet")]
    (users,), metrics = (rule["from"] for rule in policy["ingress"][:1]), policy["ingress"][1]["ports"]
    trainer = inject({"metadata": {}, "spec": {"containers": []}}, queue(SPECS[name]))
    for pod in pods:
        labels = pod["metadata"]["labels"].items()
        assert policy["podSelector"]["matchLabels"].items() <= labels
        assert users[0]["podSelector"]["matchLabels"].items() <= labels, "the parts reach each other"
    assert users[0]["podSelector"]["matchLabels"].items() <= trainer["metadata"]["labels"].items()
    ports = [port for pod in pods for each in pod["spec"]["containers"] for port in each.get("ports", [])]
    open_to_all = {port["containerPort"] for port in ports if port["name"].startswith("metrics")}
    assert {port["port"] for port in metrics} == open_to_all


def test_every_child_names_the_queue_as_its_owner_and_carries_its_labels() -> None:
    for child in children(SPECS["mooncake-tcp"]).values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "TransferQueue",
            "quickstart",
            "11111111-2222",
            True,
        )
        assert selector("quickstart").items() <= child["metadata"]["labels"].items()


def test_a_change_of_the_policy_restarts_nothing_and_reaches_the_servers_as_a_file() -> None:
    spec = SPECS["tls-with-a-policy"]
    before, after = children(spec), children(spec.replace("roles: [producer],", "roles: [consumer],"))
    (changed,) = [key for key in before if before[key] != after[key]]
    assert changed == ("ConfigMap", "quickstart-config")
    policy = validate_document(Policy, yaml.safe_load(after[changed]["data"]["policy.yaml"]), "policy.yaml")
    assert [(entry.name, entry.roles) for entry in policy.principals] == [
        ("storage", ["storage"]),
        ("rollout", ["consumer"]),
        ("team-a", ["producer", "consumer"]),
        ("root", ["admin"]),
    ]


def test_with_a_policy_the_servers_may_save_only_where_the_resource_says_so() -> None:
    spec = SPECS["tls-with-a-policy"]
    saving = f"{spec}checkpoint: {{schedule: 1h, destination: /x}}"
    for text, roles in ((spec, ["storage"]), (saving, ["storage", "admin"])):
        data = children(text)["ConfigMap", "quickstart-config"]["data"]
        policy = validate_document(Policy, yaml.safe_load(data["policy.yaml"]), "policy.yaml")
        assert policy.principals[0].roles == roles


def test_storage_with_a_policy_is_drained_as_any_other() -> None:
    storage = children(SPECS["tls-with-a-policy"])["StatefulSet", "quickstart-storage"]
    hook = storage["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert "transfer_queue.client.draining" in hook


def test_certificates_of_an_issuer_have_secrets_of_their_own_for_servers_and_each_namespace() -> None:
    made = queue(
        "{backend: {simple: {}}, access: {namespaces: [jobs]},"
        " security: {tls: {mode: issuer, issuerRef: {name: corporate, kind: ClusterIssuer}}}}"
    )
    certificates = [server_certificate(made), client_certificate(made, "rl"), client_certificate(made, "jobs")]
    assert [entry["spec"]["issuerRef"] for entry in certificates] == 3 * [
        {"name": "corporate", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    ]
    server, own, others = (entry["spec"] for entry in certificates)
    assert server["secretName"] == made.server_secret == "quickstart-issued-server"
    assert made.host("controller") in server["dnsNames"]
    assert own["secretName"] == made.client_secret("rl") == "quickstart-issued-client"
    assert others["secretName"] == made.client_secret("jobs") != own["secretName"]
    assert others["uris"] == ["urn:transferqueue:namespace:jobs"]
    assert "server auth" in server["usages"]
    assert "server auth" not in own["usages"] + others["usages"]
    assert [len(entry["metadata"].get("ownerReferences", [])) for entry in certificates] == [1, 1, 0]


@pytest.mark.parametrize(
    ("namespaces", "admitted"), [("[]", ["rl"]), ("[jobs]", ["rl", "jobs"]), ("['*']", ["rl", "jobs", "strangers"])]
)
def test_a_queue_admits_its_own_namespace_and_those_it_names(namespaces: str, admitted: list[str]) -> None:
    made = queue(f"{{backend: {{simple: {{}}}}, access: {{namespaces: {namespaces}}}}}")
    assert [name for name in ("rl", "jobs", "strangers") if made.admits(name)] == admitted


@pytest.mark.parametrize("name", SPECS)
def test_only_containers_that_need_a_capability_run_as_root(name: str) -> None:
    pods = [
        child["spec"]["template"]["spec"]
        for child in children(SPECS[name]).values()
        if "template" in child.get("spec", {})
    ]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        for context in [found["securityContext"] for found in pod["containers"] if "securityContext" in found]:
            root = {"runAsUser": 0, "runAsNonRoot": False} if "add" in context["capabilities"] else {}
            assert {key: context[key] for key in context if key.startswith("runAs")} == root


def test_scaling_the_storage_restarts_nothing() -> None:
    two, three = (children(f"{{backend: {{mooncake: {{}}}}, storage: {{replicas: {n}}}}}") for n in (2, 3))
    changed = [key for key in two if two[key] != three[key]]
    assert sorted(changed) == [("ConfigMap", "quickstart-config"), ("StatefulSet", "quickstart-storage")]
    storage = ("StatefulSet", "quickstart-storage")
    assert two[storage]["spec"]["template"] == three[storage]["spec"]["template"]


def test_storage_gets_the_rdma_device_alone_and_with_another_class_a_new_template() -> None:
    def made(claim: str) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        found = children(f"{{backend: {{mooncake: {{}}}}, rdma: {{claim: {claim}}}}}")
        pod = found["StatefulSet", "quickstart-storage"]["spec"]["template"]["spec"]
        (claimed,) = pod["resourceClaims"]
        assert pod["containers"][0]["resources"]["claims"] == [{"name": claimed["name"]}]
        assert pod["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        template = found["ResourceClaimTemplate", claimed["resourceClaimTemplateName"]]
        return claimed, template["spec"]["spec"]["devices"], {name for kind, name in found if "Claim" in kind}

    alone, devices, names = made("{deviceClassName: a.example}")
    assert devices == {"requests": [{"name": "rdma", "exactly": {"deviceClassName": "a.example"}}]}
    assert names == {alone["resourceClaimTemplateName"]}
    beside_a_gpu, same, both = made("{deviceClassName: a.example, gpuDeviceClassName: gpu.example}")
    assert (beside_a_gpu, same) == (alone, devices), "storage needs no GPU"
    assert names < both
    other, _, others = made("{deviceClassName: b.example}")
    assert other["name"] == alone["name"]
    assert not others & both


def test_a_template_as_the_apiserver_completes_it_is_not_written_again() -> None:
    spec = queue(SPECS["mooncake-rdma-claim"])
    templates = [child for child in desired_children(spec, IMAGES) if child["kind"] == "ResourceClaimTemplate"]
    assert len(templates) == 2
    for template in map(stamped, templates):
        completed = copy.deepcopy(template)
        for request in completed["spec"]["spec"]["devices"]["requests"]:
            request["exactly"] |= {"allocationMode": "ExactCount", "count": 1}
        assert not differs(template, completed)
        completed["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "other.example"
        assert differs(template, completed)


@pytest.mark.parametrize("rdma", ['policy: "off", ', ""])
def test_without_rdma_there_is_no_claim(rdma: str) -> None:
    protocol = "rdma" if rdma else "tcp"
    claim = "claim: {deviceClassName: a.example, gpuDeviceClassName: gpu.example}"
    found = children(f"{{backend: {{mooncake: {{protocol: {protocol}}}}}, rdma: {{{rdma}{claim}}}}}")
    assert not [kind for kind, _ in found if kind == "ResourceClaimTemplate"]
    assert "resourceClaims" not in found["StatefulSet", "quickstart-storage"]["spec"]["template"]["spec"]


def test_a_change_of_settings_restarts_the_process_that_reads_them() -> None:
    def marks(spec: str) -> dict[str, str]:
        return {
            key[1]: child["spec"]["template"]["metadata"]["annotations"].get(CONFIG_ANNOTATION, "")
            for key, child in children(spec).items()
            if "template" in child.get("spec", {})
        }

    before = marks("{backend: {simple: {}}}")
    after = marks("{backend: {simple: {}}, controller: {pollingMode: true}}")
    assert [name for name in before if before[name] != after[name]] == ["quickstart-controller"]


@pytest.mark.parametrize("name", ["a" * 253, "with.dots", "9digits", "a" * 43, "x", "1" * 60 + "." + "b" * 60])
def test_a_name_of_any_length_gives_children_that_the_apiserver_accepts(name: str) -> None:
    for part in ("controller", "storage", "mooncake-master", "config", "rdma-gpu-01234567"):
        made = child_name(name, part)
        assert len(made) <= 52
        assert made.strip("-") == made
        assert made[0].isalpha()
        assert "." not in made
    assert all(len(value) <= 63 for value in selector(name, "storage").values())


def test_long_names_that_begin_alike_stay_apart() -> None:
    assert child_name("a" * 100 + "b", "storage") != child_name("a" * 100 + "c", "storage")


def test_on_a_cluster_of_ipv6_everything_listens_there_and_hosts_are_in_brackets() -> None:
    images = replace(IMAGES, ipv6=True)

    def commands(spec: str) -> dict[str, list[str]]:
        children = desired_children(queue(spec), images)
        pods = [template["spec"] for child in children if (template := child.get("spec", {}).get("template"))]
        return {pod["containers"][0]["name"]: pod["containers"][0]["command"] for pod in pods}

    single = "{backend: {mooncake: {protocol: tcp}}}"
    assert {"--rpc_address=::", "--metrics_host=::"} <= set(commands(single)["mooncake-master"])
    assert not [word for word in commands(single)["mooncake-master"] if "metadata" in word or "interface" in word]
    settings = controller_settings(queue(single), ipv6=True)["controller"]["backend"]["settings"]
    assert settings["metadataServer"] == "P2PHANDSHAKE", "the metadata server of a master listens on IPv4 alone"
    several = commands("{backend: {mooncake: {highAvailability: {etcd: {development: {}}}}}}")
    assert "--rpc_address=[$(POD_IP)]" in several["mooncake-masters"]
    assert "--listen-client-urls=http://[::]:2379" in several["etcd"]
    found = str(desired_children(queue("{backend: {yuanrong: {}}}"), images))
    assert "[$(HOST_IP)]:31501" in found
    members = "{backend: {mooncake: {highAvailability: {etcd: {endpoints: ['[fd00::1]:2379']}}}}}"
    assert queue(members).etcd_members == ["[fd00::1]:2379"]
