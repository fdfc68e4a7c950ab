"""What leaves the cluster in a support bundle: objects and texts without secrets. Pure.

Objects are cleaned by what is known to be harmless, everything else goes: values of environment variables, annotations
and ConfigMaps that are not the product's own, commands of foreign containers, all Secrets. What was taken out is then
taken out of logs and every other text too, together with whatever looks like a credential.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from tq_operator.kubectl.parts import Part
from tq_operator.plan.names import is_controller
from tq_operator.plan.queue import Manifest
from transfer_queue.config.defaults import GROUP

__all__ = ["REDACTED", "Redactor", "references"]

REDACTED = "REDACTED"
_SHORTEST = 6
"""Shorter values are left out of objects, but not looked for in texts, which would become unreadable."""
_OWN_CONTAINERS = {*(part.value for part in Part), "operator"}
_OWN_FILES = {"attach.yaml", "policy.yaml", "storage.yaml"}
_OWN_VARIABLES = re.compile(r"(TQ|MC)_[A-Z0-9_]+|POD_NAME|POD_IP|LOCAL_IP|HOST_IP|PYTHONDONTWRITEBYTECODE")
_PLAIN_ANNOTATIONS = (f"{GROUP}/", "deployment.kubernetes.io/", "meta.helm.sh/", "pv.kubernetes.io/")
_FOREIGN_KEPT = ("name", "image", "imagePullPolicy", "ports", "resources", "volumeMounts")
_SENSITIVE = re.compile(
    r"passw(or)?d|secret|token(?!s)|credential|api[_-]?key|access[_-]?key|private[_-]?key|authorization", re.I
)
_REFERENCE = re.compile(r"(name|file|ref|path|mode|seconds)$", re.I)
"""Names that end so say where a secret is, not what it is."""
_HARMLESS = {"true", "false", "null", "none", "yes", "no"}
_PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), REDACTED),
    (re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{8,}", re.I), rf"\1\2{REDACTED}"),
    (re.compile(r"\beyJ[\w-]{5,}\.[\w-]+(\.[\w-]*)?"), REDACTED),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@", re.I), rf"\1{REDACTED}@"),
    (re.compile(r"\b(gh[pousr]_|github_pat_|hf_|sk-|xox[abprs]-|AKIA|ASIA|glpat-)[\w-]{8,}"), REDACTED),
)
_ASSIGNED = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]+)(?P<between>["']?[ \t]*[=:][ \t]*["']?)(?P<value>[^\s"',;&}\]]+)"""
)


class Redactor:
    """Remembers what it took out of objects; ``text`` is for afterwards."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def learn(self, value: str) -> None:
        """Take ``value`` out of texts: as it is, line by line, within JSON and in base64."""
        for form in {value, value.strip(), *value.splitlines(), json.dumps(value)[1:-1]}:
            if len(form.strip()) >= _SHORTEST:
                self._values.add(form.strip())
                self._values.add(base64.b64encode(form.encode()).decode())

    def manifest(self, found: Manifest) -> Manifest:
        """A Kubernetes object as it may be shown."""
        cleaned: Manifest = self._walk(found)
        kind = found.get("kind")
        if kind == "ConfigMap":
            cleaned["data"] = {name: self._file(name, text) for name, text in (found.get("data") or {}).items()}
        for key in ("binaryData", "stringData", *(["data"] if kind == "Secret" else [])):
            if key in found:
                cleaned[key] = {name: self._removed(value) for name, value in (found[key] or {}).items()}
        return cleaned

    def text(self, text: str) -> str:
        """``text`` without anything that was taken out before, and without what looks like a credential."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, REDACTED)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return _ASSIGNED.sub(_unassigned, text)

    def strings(self, value: Any) -> Any:
        """Plain data with ``text`` applied to every string in it, as it is before YAML quotes and folds it."""
        if isinstance(value, Mapping):
            return {name: self.strings(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.strings(inner) for inner in value]
        return self.text(value) if isinstance(value, str) else value

    def _file(self, name: str, text: str) -> str:
        try:
            return (
                yaml.safe_dump(self._walk(yaml.safe_load(text)), sort_keys=False)
                if name in _OWN_FILES or (name.endswith(".yaml") and is_controller(name.removesuffix(".yaml")))
                else self._removed(text)
            )
        except yaml.YAMLError:
            return self._removed(text)

    def _walk(self, value: Any, key: str = "") -> Any:
        if key == "annotations" and isinstance(value, Mapping):
            return {name: self._annotation(name, text) for name, text in value.items()}
        if key == "env" and isinstance(value, list):
            return [self._variable(entry) for entry in value]
        if key in {"containers", "initContainers", "ephemeralContainers", "extraContainers"} and isinstance(
            value, list
        ):
            return [self._container(entry, key) for entry in value]
        if isinstance(value, Mapping):
            return {name: self._walk(inner, name) for name, inner in value.items() if name != "managedFields"}
        if isinstance(value, list):
            return [self._walk(inner) for inner in value]
        return self._removed(value) if isinstance(value, str) and _is_sensitive(key, value) else value

    def _annotation(self, name: str, value: str) -> str:
        return value if name.startswith(_PLAIN_ANNOTATIONS) and not _SENSITIVE.search(name) else self._removed(value)

    def _variable(self, entry: Any) -> Any:
        if not isinstance(entry, Mapping) or "value" not in entry:
            return entry
        name = str(entry.get("name", ""))
        plain = _OWN_VARIABLES.fullmatch(name) and not _is_sensitive(name, str(entry["value"]))
        return entry if plain else {**entry, "value": self._removed(entry["value"])}

    def _container(self, entry: Any, key: str) -> Any:
        if not isinstance(entry, Mapping):
            return entry
        name = str(entry.get("name"))
        if key == "containers" and (name in _OWN_CONTAINERS or is_controller(name)):
            return self._walk(entry)
        words = [str(word) for word in (*(entry.get("command") or ()), *(entry.get("args") or ()))]
        for word in words[1:] if entry.get("command") else words:  # the first one is a program
            option, equals, value = word.partition("=")
            if equals or not option.startswith("-"):
                self.learn(value or option)
        for variable in entry.get("env") or ():
            self._variable(variable)
        return {kept: entry[kept] for kept in _FOREIGN_KEPT if kept in entry}

    def _removed(self, value: Any) -> str:
        self.learn(str(value))
        return REDACTED


def references(pod: Manifest) -> Iterable[tuple[str, str]]:
    """(kind, name) of the Secrets and ConfigMaps whose content a pod sees."""
    spec = pod.get("spec", {})
    for container in [*spec.get("containers", []), *spec.get("initContainers", [])]:
        for entry in container.get("env") or ():
            for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                if name := (entry.get("valueFrom") or {}).get(key, {}).get("name"):
                    yield kind, name
        for entry in container.get("envFrom") or ():
            for key, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                if name := entry.get(key, {}).get("name"):
                    yield kind, name
    for volume in spec.get("volumes", []):
        sources = [volume, *(volume.get("projected") or {}).get("sources", [])]
        for source in sources:
            if name := (source.get("secret") or {}).get("secretName") or (source.get("secret") or {}).get("name"):
                yield "Secret", name
            if name := (source.get("configMap") or {}).get("name"):
                yield "ConfigMap", name
    for entry in spec.get("imagePullSecrets", []):
        yield "Secret", entry["name"]


def _is_sensitive(name: str, value: str) -> bool:
    return bool(_SENSITIVE.search(name)) and not _REFERENCE.search(name) and value.lower() not in _HARMLESS


def _unassigned(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if value == REDACTED or not _is_sensitive(name, value):
        return found[0]
    return f"{name}{found['between']}{REDACTED}"
