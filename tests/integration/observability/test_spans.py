"""Spans of a client's calls, collected by the SDK's own exporters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
import torch
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack
from tests.integration.test_client_process import run_python
from transfer_queue.client.options import ClientOptions
from transfer_queue.config.attach import AttachConfig, ControllerAddresses
from transfer_queue.errors import ConfigError, KeyNotFoundError

PREFIX = "transfer_queue."


@pytest.fixture(scope="module")
def provider() -> TracerProvider:
    """The program's own provider, which can be set once in a process."""
    made = TracerProvider()
    trace.set_tracer_provider(made)
    return made


@pytest.fixture
def spans(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    provider.add_span_processor(processor)
    yield exporter
    processor.shutdown()


@pytest.fixture
def traced(stack: Stack, spans: InMemorySpanExporter) -> Iterator[tq.TransferQueueClient]:
    config = AttachConfig(controller=ControllerAddresses(addresses=[stack.address]), traces=True)
    client = tq.TransferQueueClient("traced", config)
    yield client
    client.close()


def told(span: ReadableSpan) -> tuple[str, dict[str, object]]:
    attributes = {name.removeprefix(PREFIX): value for name, value in (span.attributes or {}).items()}
    return span.name.removeprefix(PREFIX), attributes


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.ones(count, 1000)}, [count])


def test_puts_gets_and_fetches_say_partition_rows_bytes_and_backend(
    traced: tq.TransferQueueClient, spans: InMemorySpanExporter, partition: str
) -> None:
    traced.run(traced.kv.put, ["a", "b"], partition, rows(2), None, None)
    traced.run(traced.kv.get, ["b"], partition, None)
    traced.put(rows(3), partition_id=partition)
    meta = traced.get_meta(["x"], 4, partition, task_name="train")
    traced.get_data(meta)
    found = [told(span) for span in spans.get_finished_spans()]
    sizes = [attributes.pop("bytes", None) for _, attributes in found]
    common = {"partition": partition, "backend": "simple"}
    assert found == [
        ("put", {**common, "rows": 2}),
        ("get", {**common, "rows": 1}),
        ("put", {**common, "rows": 3}),
        ("fetch", {**common, "rows": 4, "task": "train"}),
        ("get", {**common, "rows": 4}),
    ]
    for size, at_least in zip(sizes, (8000, 4000, 12000, None, 16000), strict=True):
        assert (size is None) == (at_least is None)
        assert size is None or at_least is None or (isinstance(size, int) and size >= at_least)


async def test_spans_belong_to_what_the_caller_does_also_in_its_event_loop(
    traced: tq.TransferQueueClient, spans: InMemorySpanExporter, partition: str
) -> None:
    with trace.get_tracer("job").start_as_current_span("step") as step:
        await traced.async_run(traced.kv.put, ["a"], partition, rows(1), None, None)
    put, outer = spans.get_finished_spans()
    assert (told(put)[0], outer.name) == ("put", "step")
    assert put.parent is not None
    assert put.parent.span_id == step.get_span_context().span_id


def test_what_fails_is_a_span_with_the_error(
    traced: tq.TransferQueueClient, spans: InMemorySpanExporter, partition: str
) -> None:
    with pytest.raises(KeyNotFoundError):
        traced.run(traced.kv.get, ["nobody"], partition, None)
    with pytest.raises(TypeError):
        traced.get_data("no metadata")  # type: ignore[arg-type]
    for span, error in zip(spans.get_finished_spans(), ("KeyNotFoundError", "InvalidTypeError"), strict=True):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.status.description or "").startswith(error)
        assert [event.name for event in span.events] == ["exception"]


PROGRAM = """
import sys, torch, transfer_queue as tq
tq.kv_put("a", "{partition}", {{"x": torch.ones(10)}})
assert tq.kv_batch_get("a", "{partition}")["x"].numel() == 10
assert ("opentelemetry" in sys.modules) is {wanted}
tq.close()
"""


class Collector(HTTPServer):
    """What an OpenTelemetry collector is to an exporter."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        super().__init__(("127.0.0.1", 0), self._handler())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        return Handler


def test_standard_variables_alone_send_spans_to_a_collector(
    stack: Stack, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        done = run_python(PROGRAM.format(partition=partition, wanted=True), stack)
        collector.shutdown()
    assert done.returncode == 0, done.stderr
    check_spans(collector.received)


def check_spans(received: list[ExportTraceServiceRequest]) -> None:
    """The collector got the spans of `PROGRAM`."""
    resources = [found for request in received for found in request.resource_spans]
    names = [span.name for found in resources for scope in found.scope_spans for span in scope.spans]
    assert names == ["transfer_queue.put", "transfer_queue.get"]
    service = {entry.key: entry.value.string_value for entry in resources[0].resource.attributes}
    assert service["service.name"] == "transfer_queue"


class GrpcCollector(TraceServiceServicer):
    """The same over gRPC."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []

    def Export(  # noqa: N802 - the name of the call
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        self.received.append(request)
        return ExportTraceServiceResponse()


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_spans_go_over_grpc_where_the_standard_variable_says_so(
    stack: Stack, partition: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    collector = GrpcCollector()
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    monkeypatch.setenv(variable, "grpc")
    server.start()
    done = run_python(PROGRAM.format(partition=partition, wanted=True), stack)
    server.stop(None).wait()
    assert done.returncode == 0, done.stderr
    check_spans(collector.received)


def test_another_protocol_is_refused_with_those_that_there_are(
    stack: Stack, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    done = run_python(PROGRAM.format(partition=partition, wanted=True), stack)
    assert "'http/json' is not known here; use http/protobuf or grpc" in done.stderr


def test_without_being_asked_for_nothing_of_it_is_imported(stack: Stack, partition: str) -> None:
    done = run_python(PROGRAM.format(partition=partition, wanted=False), stack)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variables", "setting", "wanted"),
    [
        ({}, None, "no"),
        ({}, True, "yes"),
        ({"TQ_TRACES": "0"}, True, "no"),
        ({"TQ_TRACES": "1"}, None, "yes"),
        ({"OTEL_TRACES_EXPORTER": "console"}, None, "if installed"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, None, "if installed"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None, "no"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None, "no"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False, "no"),
    ],
)
def test_who_asks_for_spans(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], setting: bool | None, wanted: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = AttachConfig(controller=ControllerAddresses(addresses=["h:1"]), traces=setting)
    assert ClientOptions.of(config).traces == wanted


def test_a_switch_that_is_none_is_refused(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_TRACES", "perhaps")
    with pytest.raises(ConfigError, match="TQ_TRACES"):
        tq.TransferQueueClient("traced", stack.address)


MISSING = """
import sys
sys.modules["opentelemetry"] = None
import transfer_queue as tq
try:
    tq.kv_list()
except tq.errors.ConfigError as error:
    print(error)
"""


def test_where_opentelemetry_is_missing_the_error_says_what_to_install(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_TRACES", "1")
    done = run_python(MISSING, stack)
    assert "pip install 'TransferQueue[otel]'" in done.stdout, done.stderr
