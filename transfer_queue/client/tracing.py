"""OpenTelemetry spans of puts, gets and fetches. Imported only by clients that are to make some."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_queue.client.operation import Operation
from transfer_queue.client.options import ClientOptions
from transfer_queue.client.reading import LoadedBatch, LoadedBatches
from transfer_queue.client.shards import QueueEngine
from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["open_tracer", "traced"]

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")


def open_tracer(options: ClientOptions) -> Tracer | None:
    """The tracer of the program's own provider or, where it has set none, of one that exports as OTEL_ variables say.

    None where only OTEL_ variables ask for spans, which may be meant for others, and OpenTelemetry is not installed.
    Raises ConfigError.
    """
    try:
        from opentelemetry import trace

        given = trace.get_tracer_provider()
        return (_own_provider() if isinstance(given, trace.ProxyTracerProvider) else given).get_tracer("transfer_queue")
    except ImportError as error:
        if options.traces == "if installed":
            log.info("no spans, though OTEL_ variables ask for them: %s; pip install 'TransferQueue[otel]'", error)
            return None
        raise ConfigError(
            f"spans are asked for (TQ_TRACES, or traces of the settings), but {error}: "
            "pip install 'TransferQueue[otel]', or set TQ_TRACES=0"
        ) from None


@functools.cache
def _own_provider() -> TracerProvider:
    """One for all clients of this process. What it holds at the end of the process is sent then."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "transfer_queue"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider


def _exporter() -> SpanExporter:
    kind = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if kind != "otlp":
        raise ConfigError(
            f"environment variable OTEL_TRACES_EXPORTER: {kind!r} is not known here; use otlp, console or none, or set "
            "a TracerProvider in the program before its first call of transfer_queue"
        )
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

        return GrpcSpanExporter()
    if protocol not in (None, "", "http/protobuf"):
        raise ConfigError(
            f"environment variable OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not known here; use http/protobuf or "
            "grpc, or set a TracerProvider in the program before its first call of transfer_queue"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def traced(tracer: Tracer, engine: QueueEngine, name: str, build: Callable[[], Operation[R, T]]) -> Operation[R, T]:
    """Return the operation that ``build`` makes, in a span from before that to the end of its decoding."""
    from opentelemetry.trace import SpanKind

    span = tracer.start_span(f"transfer_queue.{name}", kind=SpanKind.CLIENT)
    with _ended_by_errors(span):
        operation = build()
        if operation.span is None:
            return operation  # a span that does not end is not exported
        for attribute, value in operation.span().items():
            span.set_attribute(f"transfer_queue.{attribute}", value)

    async def work() -> R:
        with _ended_by_errors(span):
            return await operation.work

    def finish(result: R) -> T:
        with _ended_by_errors(span):
            loaded = result if isinstance(result, LoadedBatch | LoadedBatches) else None
            rows, nbytes = (loaded.rows, loaded.nbytes) if loaded else (0, operation.nbytes)
            value = operation.finish(result)
            span.set_attribute("transfer_queue.backend", engine.backend_kind)
            span.set_attribute("transfer_queue.rows", rows or _size(value))
            if name != "fetch":
                span.set_attribute("transfer_queue.bytes", nbytes)
        span.end()
        return value

    def drop(result: R) -> None:
        span.end()
        if operation.drop is not None:
            operation.drop(result)

    return Operation(work(), finish, operation.nbytes, drop)


@contextmanager
def _ended_by_errors(span: Span) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        from opentelemetry.trace import Status, StatusCode

        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end()
        raise


def _size(value: Any) -> int:
    """Rows of metadata; a TensorDict without any has no ``size`` that would say so."""
    size = getattr(value, "size", 0)
    return size if isinstance(size, int) else 0
