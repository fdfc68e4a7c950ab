"""The page that a controller serves: one HTML file, a script and a style sheet, all read from here.

The page asks ``/api/dataflow`` for JSON once a second and draws it. It needs nothing from elsewhere, so that it works
in a cluster without a way out, under a policy that forbids everything else.
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
    "/view.css": ("view.css", "text/css; charset=utf-8"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}


def read_pages() -> dict[str, tuple[str, bytes]]:
    """Path -> (content type, content)."""
    folder = files(__name__)
    return {path: (kind, folder.joinpath(name).read_bytes()) for path, (name, kind) in _FILES.items()}
