"""The TransferQueue resource: what is accepted, what the defaults are, and what each refusal says."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from transfer_queue.config import resource
from transfer_queue.config.document import read_yaml
from transfer_queue.config.quantity import Quantity
from transfer_queue.errors import ConfigError

HEAD = "apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: quickstart}\n"
UNITS = "use a number with Ki, Mi, Gi, Ti, Pi, k, M, G, T or P, such as 64Gi"


def load(spec: str) -> resource.TransferQueue:
    return resource.parse(read_yaml(f"{HEAD}spec: {spec}\n", "TransferQueue").value)


def test_the_smallest_mooncake_queue_has_the_documented_defaults() -> None:
    spec = load("{backend: {mooncake: {}}}").spec
    mooncake = spec.backend.mooncake
    assert mooncake is not None
    assert spec.backend.kind == "mooncake"
    assert (mooncake.master.rpc_port, mooncake.master.http_metadata_port, mooncake.master.metrics_port) == (
        50051,
        8080,
        9003,
    )
    assert (mooncake.master.rpc_interface, mooncake.device_name, mooncake.protocol) == ("eth0", "auto", "rdma")
    assert (mooncake.global_segment_size, mooncake.local_buffer_size) == (64 * 2**30, 10 * 2**30)
    assert mooncake.zero_copy.enable
    assert (mooncake.zero_copy.tensor_buffer_size, mooncake.zero_copy.controller_bytes_buffer_size) == (
        2 * 2**30,
        10 * 2**30,
    )
    assert (spec.controller.port, spec.controller.sampler.name, spec.storage.port) == (
        50060,
        "SequentialSampler",
        50070,
    )
    assert (spec.layout, spec.security.allow_pickle, spec.rdma.policy) == ("jagged", False, "auto")


def test_simple_defaults_to_16_units_of_1024_rows() -> None:
    simple = load("{backend: {simple: {}}}").spec.backend.simple
    assert simple is not None
    assert (simple.num_units, simple.unit_size) == (16, 1024)


def test_null_means_absent_as_it_does_in_the_apiserver() -> None:
    spec = load("{backend: {simple: {}, mooncake: null}, storage: {capacity: null}}").spec
    assert (spec.backend.kind, spec.storage.capacity) == ("simple", 2**30)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64Gi", 64 * 2**30),
        ("500Mi", 500 * 2**20),
        ("1G", 10**9),
        ("1.5Ki", 1536),
        ("0.5M", 500_000),
        (4096, 4096),
        ("7", 7),
    ],
)
def test_a_quantity_is_a_number_of_bytes_that_remembers_its_text(text: str | int, size: int) -> None:
    quantity = Quantity(text)
    assert quantity == size
    assert str(quantity) == str(text)
    assert str(pickle.loads(pickle.dumps(quantity))) == str(copy.deepcopy(quantity)) == str(text)


SIMPLE = "backend: {simple: {}}"
APART = "port and metricsPort must differ, by no less than shards: each shard takes the next of both"
TOO_HIGH = "each shard takes the next port and metricsPort, which end at 65535; choose lower ones"
TOO_FEW = (
    "controller.sampleCapacity, or numUnits times unitSize of backend simple, must be at least controller.shards: rows "
    "are shared out to them"
)
REFUSALS = [
    (
        "{backend: {simple: {}}, access: {namespaces: [Bad_NS]}}",
        'spec.access.namespaces[0]: Invalid value: "Bad_NS": should match',
    ),
    (
        "{backend: {simple: {}}, storage: {capacity: 12Q}}",
        f'spec.storage.capacity: "12Q" is not a quantity above zero; {UNITS}',
    ),
    (
        "{backend: {simple: {}}, storage: {capacity: 0Gi}}",
        f'spec.storage.capacity: "0Gi" is not a quantity above zero; {UNITS}',
    ),
    (
        "{backend: {simple: {}}, storage: {capacity: 4Ki}}",
        'spec.storage.capacity: "4Ki" is too small for a storage unit; use at least 1Mi',
    ),
    (
        "{backend: {mooncake: {globalSegmentSize: 1000}}}",
        'spec.backend.mooncake.globalSegmentSize: "1000" is too small for a storage unit; use at least 1Mi',
    ),
    (
        "{backend: {simple: {}}, storage: {resources: {limits: {cpu: -1}}}}",
        "spec.storage.resources.limits.cpu: should be greater than or equal to 0",
    ),
    (
        f"{{backend: {{simple: {{}}}}, storage: {{capacity: {'9' * 20}Ki}}}}",
        f'spec.storage.capacity: "{"9" * 20}Ki" is not a quantity above zero; {UNITS}',
    ),
    (
        "{backend: {simple: {}}, storage: {capacity: -1}}",
        f'spec.storage.capacity: "-1" is not a quantity above zero; {UNITS}',
    ),
    ("{backend: {simple: {}, mooncake: {}}}", "spec.backend: set exactly one of simple, mooncake, yuanrong, ray"),
    (
        "{backend: {simple: {ssdOffload: {}}}, controller: {durability: process}}",
        "spec: backend.simple.ssdOffload needs controller.durability none: blocks on the disk end with their unit",
    ),
    (
        "{backend: {yuanrong: {worker: head}}}",
        'spec.backend.yuanrong.worker: "head" is not a HOST:PORT, an IPv6 HOST in brackets',
    ),
    (
        "{backend: {mooncake: {highAvailability: {etcd: {}}}}}",
        "spec.backend.mooncake.highAvailability.etcd: set exactly one of endpoints, development",
    ),
    (
        "{backend: {mooncake: {highAvailability: {etcd: {endpoints: ['https://etcd:2379']}}}}}",
        'spec.backend.mooncake.highAvailability.etcd.endpoints[0]: "https://etcd:2379" is not a HOST:PORT, '
        "an IPv6 HOST in brackets",
    ),
    (
        "{backend: {simple: {}}, checkpoint: {schedule: 61 * * * *, destination: /x}}",
        'spec.checkpoint.schedule: "61 * * * *" is not an interval such as 90s, 5m, 1h or 1d, or a cron expression '
        "such as */10 * * * *, in UTC",
    ),
    (
        "{backend: {simple: {}}, checkpoint: {schedule: 5m}}",
        "spec.checkpoint: schedule and destination go together; without them only restoreFrom uses credentialsFrom",
    ),
    (
        "{backend: {simple: {}}, restoreFrom: run7}",
        'spec.restoreFrom: "run7" is not a URL such as s3://bucket/run7, or an absolute path',
    ),
    (
        "{backend: {ray: {}}, restoreFrom: /x}",
        "spec: checkpoint and restoreFrom need another backend than ray, whose rows only a process of the Ray job "
        "reads: call save_checkpoint and load_checkpoint there",
    ),
    ("{backend: {}}", "spec.backend: set exactly one of simple, mooncake, yuanrong, ray"),
    ("{}", "spec.backend: Required value"),
    (
        f"{{{SIMPLE}, storage: {{capacty: 1Gi}}}}",
        'unknown field "spec.storage.capacty"; did you mean capacity? allowed: affinity, '
        "annotations, capacity, drainSeconds, env, extraContainers, image, metricsPort, nodeSelector, port, replicas, "
        "resources, tolerations, topologySpread",
    ),
    (f"{{{SIMPLE}, storage: {{replicas: two}}}}", 'spec.storage.replicas: "two" must be of type integer'),
    (f"{{{SIMPLE}, storage: {{replicas: true}}}}", "spec.storage.replicas: true must be of type integer"),
    (f"{{{SIMPLE}, storage: {{image: 5}}}}", "spec.storage.image: 5 must be of type string"),
    (f"{{{SIMPLE}, storage: 5}}", "spec.storage: 5 must be of type object"),
    (f"{{{SIMPLE}, storage: {{tolerations: [1]}}}}", "spec.storage.tolerations[0]: 1 must be of type object"),
    (
        f"{{{SIMPLE}, controller: {{port: 70000}}}}",
        "spec.controller.port: 70000 is out of range; use a whole number from 1 to 65535",
    ),
    (f"{{{SIMPLE}, controller: {{replicas: 3}}}}", "spec.controller.replicas: 3 is out of range; use 1"),
    (f"{{{SIMPLE}, controller: {{metricsPort: 50060}}}}", f"spec.controller: {APART}"),
    (f"{{{SIMPLE}, controller: {{shards: 3, port: 6000, metricsPort: 6002}}}}", f"spec.controller: {APART}"),
    (f"{{{SIMPLE}, controller: {{shards: 3, port: 6002, metricsPort: 6000}}}}", f"spec.controller: {APART}"),
    (f"{{{SIMPLE}, controller: {{shards: 3, port: 65534}}}}", f"spec.controller: {TOO_HIGH}"),
    (f"{{{SIMPLE}, controller: {{shards: 3, metricsPort: 65534}}}}", f"spec.controller: {TOO_HIGH}"),
    (
        f"{{{SIMPLE}, controller: {{shards: 65}}}}",
        "spec.controller.shards: 65 is out of range; use a whole number from 1 to 64",
    ),
    (f"{{{SIMPLE}, controller: {{shards: 3, sampleCapacity: 2}}}}", f"spec: {TOO_FEW}"),
    ("{backend: {simple: {numUnits: 1, unitSize: 2}}, controller: {shards: 3}}", f"spec: {TOO_FEW}"),
    (
        "{backend: {mooncake: {master: {rpcPort: 8080}}}}",
        "spec.backend.mooncake.master: rpcPort, httpMetadataPort and metricsPort must differ",
    ),
    (
        "{backend: {mooncake: {protocol: udp}}}",
        'spec.backend.mooncake.protocol: Unsupported value: "udp": supported values: "tcp", "rdma"',
    ),
    (
        "{backend: {mooncake: {master: {rpcInterface: eth0/1}}}}",
        'spec.backend.mooncake.master.rpcInterface: "eth0/1" is not the name of a network interface, such as eth0',
    ),
    (
        "{backend: {mooncake: {master: {rpcInterface: abcdefghijklmnop}}}}",
        "spec.backend.mooncake.master.rpcInterface: Too long: may not be more than 15 bytes",
    ),
    (
        f"{{{SIMPLE}, rdma: {{policy: off}}}}",
        'spec.rdma.policy: Unsupported value: false: supported values: "off", "auto", "required"; '
        "quote it: YAML reads a bare off as false",
    ),
    (
        f"{{{SIMPLE}, rdma: {{policy: required}}}}",
        "spec.rdma: policy required needs resourceName, the extended resource of the RDMA device plugin, or claim",
    ),
    (
        f"{{{SIMPLE}, rdma: {{resourceName: rdma/shared, claim: {{deviceClassName: rdma.example.com}}}}}}",
        "spec.rdma: resourceName and claim exclude each other; set the one by which the cluster gives RDMA devices",
    ),
    (f"{{{SIMPLE}, rdma: {{claim: {{}}}}}}", "spec.rdma.claim.deviceClassName: Required value"),
    (
        f"{{{SIMPLE}, rdma: {{claim: {{deviceClassName: rdma/shared}}}}}}",
        'spec.rdma.claim.deviceClassName: "rdma/shared" is not the name of a DeviceClass, such as rdma.example.com',
    ),
    (
        f"{{{SIMPLE}, security: {{tls: {{mode: off}}}}}}",
        'spec.security.tls.mode: Unsupported value: false: supported values: "off", "operator", "secret", "issuer"; '
        "quote it: YAML reads a bare off as false",
    ),
    (
        f"{{{SIMPLE}, security: {{tls: {{mode: secret, serverSecret: a}}}}}}",
        "spec.security.tls: serverSecret and clientSecret are set with mode secret, both of them, and only then",
    ),
    (
        f"{{{SIMPLE}, security: {{tls: {{clientSecret: a}}}}}}",
        "spec.security.tls: serverSecret and clientSecret are set with mode secret, both of them, and only then",
    ),
    (f"{{{SIMPLE}, security: {{tokensSecret: A_B}}}}", 'spec.security.tokensSecret: "A_B" is not the name of a Secret'),
    (
        f"{{{SIMPLE}, security: {{tokensSecret: a, tls: {{mode: 'off'}}}}}}",
        'spec.security: policy and tokensSecret need TLS: remove tls.mode "off"',
    ),
    (
        f"{{{SIMPLE}, security: {{policy: [{{name: a, token: a, roles: [admin]}}]}}}}",
        "spec.security: a token in the policy needs tokensSecret, which has the tokens",
    ),
    (
        f"{{{SIMPLE}, security: {{policy: [{{name: a, certificate: a, namespace: a, roles: [admin]}}]}}}}",
        "spec.security.policy[0]: set exactly one of token, certificate, namespace",
    ),
    (
        f"{{{SIMPLE}, security: {{policy: [{{name: a, namespace: a, roles: []}}]}}}}",
        "spec.security.policy[0]: name at least one of the roles producer, consumer, admin",
    ),
    (
        f"{{{SIMPLE}, security: {{policy: [{{name: a, namespace: a, roles: [storage]}}]}}}}",
        'spec.security.policy[0].roles[0]: Unsupported value: "storage": supported values: "producer", "consumer", '
        '"admin"',
    ),
    (
        f"{{{SIMPLE}, security: {{policy: [{{name: a, namespce: a, roles: [admin]}}]}}}}",
        'unknown field "spec.security.policy[0].namespce"; did you mean namespace? allowed: certificate, name, '
        "namespace, partitions, roles, token",
    ),
    (
        "{backend: {yuanrong: {}}, security: {policy: [{name: a, namespace: a, roles: [admin]}]}}",
        "spec: security.policy needs backend simple: clients of other backends move rows past the storage units",
    ),
    (
        "{backend: {ray: {}}, security: {tls: {mode: operator}}}",
        "spec: backend ray has no TLS: its storage units are actors of the job; encrypt the network of the Ray cluster",
    ),
    (
        f"{{{SIMPLE}, controller: {{resources: {{limits: {{memory: 2Q}}}}}}}}",
        'spec.controller.resources.limits.memory: Invalid value: "2Q": should match',
    ),
    (
        f"{{{SIMPLE}, controller: {{sampler: {{name: Grpo}}}}}}",
        'spec.controller.sampler.name: Unsupported value: "Grpo": supported values: "SequentialSampler", '
        '"GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler", "TokenBudgetSampler", '
        '"PrioritySampler", "ReplaySampler"',
    ),
]


@pytest.mark.parametrize(("spec", "message"), REFUSALS)
def test_a_wrong_field_is_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(spec)
    (line,) = str(refused.value).splitlines()
    assert line == message or (message.endswith("should match") and line.startswith(message))


def test_the_ports_and_rows_of_several_shards_may_be_just_enough() -> None:
    load(f"{{{SIMPLE}, controller: {{shards: 3, port: 65530, metricsPort: 65533, sampleCapacity: 3}}}}")
    load("{backend: {simple: {numUnits: 1, unitSize: 3}}, controller: {shards: 3}}")


@pytest.mark.parametrize(
    "spec",
    [
        '{backend: {simple: {}}, storage: {capacity: "1Gi\\n"}}',
        '{backend: {mooncake: {master: {rpcInterface: "eth0\\n"}}}}',
        '{backend: {yuanrong: {worker: "head:1\\n"}}}',
        '{backend: {simple: {}}, storage: {resources: {limits: {cpu: "1\\n"}}}}',
    ],
)
def test_a_line_end_is_part_of_no_value_and_of_no_refusal(spec: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(spec)
    assert len(str(refused.value).splitlines()) == 1


def test_an_empty_field_is_as_if_it_were_not_there_if_there_is_such_a_field() -> None:
    assert load("{backend: {simple: {}}, storage: }").spec.storage.replicas == 2
    with pytest.raises(ConfigError, match=r'unknown field "spec\.storge"; did you mean storage\?'):
        load("{backend: {simple: {}}, storge: }")


def test_a_claim_is_enough_for_the_policy_required() -> None:
    claim = "{deviceClassName: rdma.example.com, gpuDeviceClassName: gpu.example.com}"
    rdma = load(f"{{{SIMPLE}, rdma: {{policy: required, claim: {claim}}}}}").spec.rdma
    assert rdma.claim is not None
    assert (rdma.claim.device_class_name, rdma.claim.gpu_device_class_name) == ("rdma.example.com", "gpu.example.com")


def test_every_problem_has_its_own_line() -> None:
    with pytest.raises(ConfigError) as refused:
        load("{backend: {simple: {}, ray: {}}, storge: {}, storage: {capacity: 12Q, port: 0}}")
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == [
        "spec.backend",
        "spec.storage.port",
        "spec.storage.capacity",
        'unknown field "spec.storge"; did you mean storage? allowed',
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [\n", "text: is not YAML"),
        (f"{HEAD}spec: {{backend: {{simple: {{}}}}, backend: {{ray: {{}}}}}}\n", 'key "backend" already set (line 4)'),
        ("\n", "text: holds 0 YAML documents; give exactly one TransferQueue"),
        (f"{HEAD}---\n{HEAD}", "text: holds 2 YAML documents; give exactly one TransferQueue"),
        ("- 1\n", "a TransferQueue must be a mapping"),
        (
            f"{HEAD}spec: {{backend: {{simple: {{}}}}}}\n".replace("quickstart", "Quick"),
            'metadata.name: "Quick" is not a name',
        ),
        (
            f"{HEAD}spec: {{backend: {{simple: {{}}}}}}\n".replace("kind: TransferQueue", "kind: Queue"),
            'kind: Unsupported value: "Queue": supported values: "TransferQueue"',
        ),
    ],
)
def test_a_text_that_is_no_queue_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resource.load(text)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        resource.load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        resource.load(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read: not UTF-8 text"):
        resource.load(tmp_path / "binary.yaml")


def test_a_wrong_field_of_a_file_is_named_with_the_file_and_its_line(tmp_path: Path) -> None:
    file = tmp_path / "q.yaml"
    file.write_text(f"---\n{HEAD}spec:\n  backend:\n    simple:\n  storage:\n    capacity: 0\n    replicas: 1\n")
    with pytest.raises(ConfigError) as refused:
        resource.load(file)
    assert str(refused.value) == (
        f"{file}: spec.backend.simple: has no value; for its defaults write simple: {{}} (line 7)"
    )
    file.write_text(
        file.read_text()
        .replace("simple:", "simple: {}")
        .replace("    replicas", "    tolerations:\n    - 1\n    ports")
    )
    with pytest.raises(ConfigError) as refused:
        resource.load(file)
    item, capacity, unknown = str(refused.value).splitlines()
    assert capacity == f'{file}: spec.storage.capacity: "0" is not a quantity above zero; {UNITS} (line 9)'
    assert item == f"{file}: spec.storage.tolerations[0]: 1 must be of type object (line 11)"
    assert ('unknown field "spec.storage.ports"' in unknown, unknown[-9:]) == (True, "(line 12)")


def test_a_group_sampler_needs_the_size_of_its_groups() -> None:
    sampler = "{backend: {simple: {}}, controller: {sampler: {name: GRPOGroupNSampler%s}}}"
    with pytest.raises(ConfigError, match=r"controller\.sampler: .*needs args: \{n_samples_per_prompt: N\}"):
        load(sampler % "")
    assert load(sampler % ", args: {n_samples_per_prompt: 4}").spec.controller.sampler.args == {
        "n_samples_per_prompt": 4
    }


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{backend: simple}", "spec.backend: .*; write backend: {simple: {}}"),
        ("{backend: {simple: {}}, controller: {sampler: S}}", "controller.sampler: .*; write sampler: {name: S}"),
        ("\n\tbackend: {simple: {}}", "line 5 has a tab: indent with spaces"),
    ],
)
def test_a_name_for_a_mapping_and_a_tab_are_told_with_what_to_write(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(spec)


def test_tls_is_on_where_somebody_has_to_be_known_and_else_as_the_installation_says() -> None:
    said = {
        "{}": "DEFAULT",
        "{tls: {mode: 'off'}}": "off",
        "{tokensSecret: a}": "operator",
        "{policy: []}": "operator",
        "{tls: {mode: secret, serverSecret: a, clientSecret: b}, policy: []}": "secret",
        "{tls: {mode: issuer, issuerRef: {name: a}}}": "issuer",
    }
    for default in ("off", "operator"):
        for security, mode in said.items():
            spec = load(f"{{{SIMPLE}, security: {security}}}").spec
            assert spec.tls_mode(default) == mode.replace("DEFAULT", default)
        assert load("{backend: {ray: {}}}").spec.tls_mode(default) == "off"


def test_a_queue_survives_the_trip_through_its_own_yaml_form() -> None:
    queue = load("{backend: {mooncake: {protocol: tcp}}, storage: {replicas: 3, resources: {limits: {cpu: 2}}}}")
    assert resource.parse(queue.model_dump(mode="json", by_alias=True)) == queue


def test_an_object_of_the_apiserver_is_accepted_with_its_own_metadata_and_status() -> None:
    document = load("{backend: {simple: {}}}").model_dump(mode="json", by_alias=True)
    document["metadata"] |= {"uid": "u", "managedFields": [{"manager": "kubectl"}], "generation": 3}
    document["status"] = {"conditions": []}
    assert resource.parse(document).metadata.name == "quickstart"


def test_the_resource_types_load_without_torch() -> None:
    code = "import sys, transfer_queue.config.resource; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("storage: {replicas: 1}\nspec: {backend: {simple: {}}}", r'"storage"; it belongs under spec; .* \(line 4\)'),
        ("spec: {backend: {simple: {}}, replicas: 3}", r'"spec\.replicas"; it belongs under spec\.controller or spec'),
        ("spec: {backend: {simple: {}}, controller: {layout: dense}}", r'"spec\.controller\.layout"; it belongs under'),
    ],
)
def test_a_field_in_a_wrong_place_is_told_with_its_place(spec: str, text: str) -> None:
    head = "apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: a}\n"
    with pytest.raises(ConfigError, match=f"unknown field {text}"):
        resource.load(head + spec)
