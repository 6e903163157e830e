"""Logs, traces and metrics of one process.

Logs are JSON lines on stderr that carry the ids of the current span. Traces and metrics follow OpenTelemetry's
semantic conventions for messaging: context travels in the headers `traceparent` and `tracestate`. Without `setup`
everything here is a no-op of the OpenTelemetry API; nothing happens at import.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TextIO

import structlog
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Link, Span, SpanKind, Tracer

from infra import instruments
from infra.settings import Settings

FILE_INTERVAL_MS = 5000
FLUSH_SECONDS = 5.0

KINDS = {"send": SpanKind.PRODUCER, "process": SpanKind.CONSUMER}

_providers: list[TracerProvider | MeterProvider] = []
_files: list[TextIO] = []


def setup(service: str, instance: str, settings: Settings) -> None:
    """Configure logging, tracing and metrics of this process; called again it only renews the logging.

    Spans and metrics go to the collector named by the standard `OTEL_EXPORTER_OTLP_*` variables, to JSON lines files
    in `telemetry.directory`, to both, or nowhere.
    """
    context = {"service": service, "instance": instance, "run": settings.run.name}
    setup_logging(settings.telemetry.log_level, context)
    if _providers:
        return
    resource = Resource.create(
        {"service.name": f"tailrace-{service}", "service.instance.id": instance, "tailrace.run": settings.run.name}
    )
    directory = settings.telemetry.directory
    collected = any(
        name.startswith("OTEL_EXPORTER_OTLP") and name.endswith("ENDPOINT") and os.environ[name] for name in os.environ
    )
    # Spans that go nowhere bear ids, for logs and for whoever is called, and nothing else: they cost a tenth.
    sampler = None if collected or directory is not None else ParentBased(ALWAYS_OFF)
    tracers = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    readers: list[Any] = []
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        spans, points = ((directory / f"{instance}.{kind}.jsonl").open("a") for kind in ("spans", "metrics"))
        _files.extend((spans, points))
        tracers.add_span_processor(
            BatchSpanProcessor(ConsoleSpanExporter(out=spans, formatter=lambda span: span.to_json(indent=None) + "\n"))
        )
        exporter = ConsoleMetricExporter(out=points, formatter=lambda data: data.to_json(indent=None) + "\n")
        readers.append(PeriodicExportingMetricReader(exporter, export_interval_millis=FILE_INTERVAL_MS))
    if collected:
        span_exporter, metric_exporter = _otlp_exporters()
        tracers.add_span_processor(BatchSpanProcessor(span_exporter))
        readers.append(PeriodicExportingMetricReader(metric_exporter))
    meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
    trace.set_tracer_provider(tracers)
    metrics.set_meter_provider(meters)
    _providers.extend((tracers, meters))


def shutdown() -> None:
    """Flush and close the exporters; gives up after a few seconds when the collector does not answer."""

    def close() -> None:
        for provider in _providers:
            provider.shutdown()
        for file in _files:
            file.close()

    thread = threading.Thread(target=close, name="telemetry-shutdown", daemon=True)
    thread.start()
    thread.join(FLUSH_SECONDS)


def _otlp_exporters() -> tuple[Any, Any]:
    if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc").startswith("http"):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(), OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

    return GrpcSpanExporter(), GrpcMetricExporter()


# --- logs -------------------------------------------------------------------------------------------------------------


def setup_logging(level: str, context: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Write log lines of `level` and above with `context` to a stream, by default stderr.

    JSON, except on a terminal. The log lines of libraries are among them.
    """
    stream = stream or sys.stderr

    def add_context(_logger: Any, _method: str, event: Any) -> Any:
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            event["trace_id"], event["span_id"] = f"{span.trace_id:032x}", f"{span.span_id:016x}"
        return {**event, **context}

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_context,
    ]
    final: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if stream.isatty():
        final.append(structlog.dev.ConsoleRenderer())
    else:
        final += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


# --- traces -----------------------------------------------------------------------------------------------------------


def inject(headers: dict[str, str]) -> None:
    """Write the current trace context into a message's headers."""
    propagate.inject(headers)


@contextmanager
def producer_span(template: str, count: int = 1) -> Iterator[Span]:
    """Span and metrics of publishing `count` messages to a subject template at once.

    The caller injects the context into the headers of each inside.
    """
    with _measured(template, "send", None, [], count) as span:
        yield span


@contextmanager
def consumer_span(
    template: str, headers: Mapping[str, str], *, links: Sequence[Mapping[str, str]] = ()
) -> Iterator[Span]:
    """Span and metrics of consuming from a subject template.

    `headers` of the message make its producer the parent; `links` are the headers of a batch's messages, each linked.
    """
    contexts = (trace.get_current_span(propagate.extract(link)).get_span_context() for link in links)
    parent = propagate.extract(headers) if headers else None
    valid = [Link(context) for context in contexts if context.is_valid]
    with _measured(template, "process", parent, valid, len(links)) as span:
        yield span


# Before `setup` it is a proxy that turns into a real one: caching it is safe, and making one is slow.
@cache
def _tracer() -> Tracer:
    return trace.get_tracer(instruments.SCOPE)


@contextmanager
def _measured(template: str, operation: str, parent: Context | None, links: list[Link], count: int) -> Iterator[Span]:
    started = time.perf_counter()
    error: str | None = None
    attributes: dict[str, str | int] = {**instruments.messaging_attributes(template, operation)}
    if count > 1 or links:
        attributes["messaging.batch.message_count"] = count
    try:
        with _tracer().start_as_current_span(
            f"{operation} {template}", context=parent, kind=KINDS[operation], attributes=attributes, links=links
        ) as span:
            try:
                yield span
            except BaseException as problem:
                error = type(problem).__name__
                span.set_attribute("error.type", error)
                raise
    finally:
        instruments.operation(template, operation, time.perf_counter() - started, error, count)
