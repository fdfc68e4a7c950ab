"""The page that a controller serves: HTML, scripts and style sheets, all read from here.

The page asks ``/api/dataflow`` for the present once a second and ``/api/history`` and ``/api/timeline`` for the past,
all JSON, and draws them. It needs nothing from elsewhere, so that it works in a cluster without a way out, under a
policy that forbids everything else. ``vendor`` holds libraries as they were published, each with its licence.
"""

from __future__ import annotations

from importlib.resources import files

__all__ = ["CONTENT_POLICY", "read_pages"]

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of every answer."""

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/view.js": ("view.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/timeline.js": ("timeline.js", "text/javascript; charset=utf-8"),
    "/vendor/uplot.js": ("vendor/uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/vendor/uplot.css": ("vendor/uplot/uPlot.min.css", "text/css; charset=utf-8"),
    "/view.css": ("view.css", "text/css; charset=utf-8"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}


def read_pages() -> dict[str, tuple[str, bytes]]:
    """Path -> (content type, content)."""
    folder = files(__name__)
    return {path: (kind, folder.joinpath(name).read_bytes()) for path, (name, kind) in _FILES.items()}
