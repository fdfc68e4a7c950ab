"""OCI image archives: write a small one, read the digest of any."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NAME_ANNOTATION = "org.opencontainers.image.ref.name"


def write_archive(archive: Path, name: str, files: Mapping[str, Path], entrypoint: list[str]) -> None:
    """Write an image `name` of one layer with `files` (path in the image -> file here, executable)."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path, source in sorted(files.items()):
            _add(tar, path.lstrip("/"), source.read_bytes(), mode=0o755)
    plain = layer.getvalue()
    packed = gzip.compress(plain, compresslevel=1, mtime=0)
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": entrypoint},
        "rootfs": {"type": "layers", "diff_ids": [_digest(plain)]},
    }
    blobs: dict[str, bytes] = {}

    def blob(media: str, data: bytes) -> dict[str, Any]:
        blobs[_digest(data)] = data
        return {"mediaType": media, "digest": _digest(data), "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": blob(CONFIG, json.dumps(config).encode()),
        "layers": [blob(LAYER, packed)],
    }
    entry = blob(MANIFEST, json.dumps(manifest).encode())
    entry["annotations"] = {NAME_ANNOTATION: name.rpartition(":")[2], "io.containerd.image.name": name}
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        for digest, data in blobs.items():
            _add(tar, f"blobs/sha256/{digest.partition(':')[2]}", data)


def read_digests(archive: Path) -> dict[str, str]:
    """Digest of each image in an OCI archive by the name that containerd gives it."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile("index.json")
        assert member is not None, "index.json of an OCI archive is a regular file"
        index = json.load(member)
    found = {}
    for entry in index["manifests"]:
        annotations = entry.get("annotations", {})
        found[annotations.get("io.containerd.image.name") or annotations[NAME_ANNOTATION]] = entry["digest"]
    return found


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _add(tar: tarfile.TarFile, path: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path)  # owner root, time zero: the same input gives the same digest
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))
