"""The product's images, built from images/NAME/Dockerfile without a container engine, and put on the nodes.

The base is a Debian system made by debootstrap, handed to the Dockerfiles as BASE_IMAGE. Archives lie in the cache
under a hash of all they are made from, so that an unchanged image is neither built nor loaded again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.binaries import cache_lock
from tests.cluster.commands import run
from tests.cluster.console import say, step
from tests.cluster.errors import ClusterError
from tests.cluster.host import IMAGE_PROGRAMS, require_privileges, require_programs
from tests.cluster.node import Node
from tests.cluster.oci import read_digests
from tests.cluster.paths import REPOSITORY, cache_folder
from tests.cluster.wheels import fetch_wheels

SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
TAG = "dev"
COMPRESSION = ("--compression-format=zstd", "--compression-level=1")  # in half the time of gzip
KEPT_ARCHIVES = 2


def image_names() -> list[str]:
    """The images that can be built: folders of images/ with a Dockerfile."""
    return sorted(file.parent.name for file in (REPOSITORY / "images").glob("*/Dockerfile"))


def image_reference(name: str) -> str:
    """The name under which pods use image `name`, such as localhost/transferqueue-server:dev."""
    return f"localhost/transferqueue-{name}:{TAG}"


def find_archive(image: str) -> Path:
    """The OCI archive of `image`: a folder name of images/ (built), an archive's path, or an image in buildah."""
    if image in image_names():
        return build_image(image)
    if Path(image).is_file():
        return Path(image)
    archive = cache_folder() / "images" / f"other-{re.sub(r'[^A-Za-z0-9.]+', '-', image)}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        _push(image, image, archive)
    except ClusterError as error:
        names = ", ".join(image_names())
        raise ClusterError(
            f"no image {image!r}: it is no folder of images/ ({names}), no file, and not in buildah's storage.\n{error}"
        ) from error
    return archive


def build_image(name: str) -> Path:
    """Build images/`name` unless its content is unchanged, and return its OCI archive.

    Raises ClusterError with the failing instruction's output.
    """
    dockerfile = REPOSITORY / "images" / name / "Dockerfile"
    if not dockerfile.exists():
        raise ClusterError(f"no images/{name}/Dockerfile. There are: {', '.join(image_names())}")
    require_privileges()
    require_programs(IMAGE_PROGRAMS)
    sources = list(_copied_sources(dockerfile))
    below = build_image("trainer") if "ARG TRAINER_IMAGE" in dockerfile.read_text() else None
    key = _content_key(dockerfile, sources, below.name if below else "")
    archive = cache_folder() / "images" / f"{name}-{key}.tar"
    if archive.exists():
        os.utime(archive)
        return archive
    if below:
        base = {"TRAINER_IMAGE": _buildah("pull", "--quiet", f"oci-archive:{below}").strip()}
    else:
        base = {"BASE_IMAGE": base_image()}
    locks = [Path(source).stem for source in sources if source.startswith("requirements/")]
    wheels = fetch_wheels(locks)
    with cache_lock("images"), tempfile.TemporaryDirectory(prefix="transferqueue-image-") as folder:
        context = Path(folder)
        for source in sources:
            _copy(REPOSITORY / source, context / source)
        arguments = {**base, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
        options = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        options += ["--volume", f"{wheels}:/wheels:ro", "--file", str(dockerfile), "--tag", image_reference(name)]
        with step(f"building image {name}"):
            _buildah("bud", "--isolation", "chroot", "--layers", "--quiet", *options, str(context))
        with step(f"packing image {name}"):
            _push(image_reference(name), image_reference(name), archive)
    remove_old_archives(name, archive)
    return archive


def remove_old_archives(name: str, archive: Path) -> None:
    """Of the archives of image `name` that were noted in their folder, keep the latest, `archive` among them."""
    note = archive.parent / ".made"
    made = [*(note.read_text().split() if note.exists() else []), archive.name]
    own = [
        each for each in dict.fromkeys(reversed(made)) if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{16}}\.tar", each)
    ]
    old = own[KEPT_ARCHIVES:]
    for each in old:
        (archive.parent / each).unlink(missing_ok=True)
    note.write_text("".join(f"{each}\n" for each in made if each not in old))


def load_image(archive: Path, nodes: Sequence[Node]) -> list[str]:
    """Import an OCI archive on the `nodes` that lack it and return the names of its images."""
    digests = read_digests(archive)
    with ThreadPoolExecutor() as pool:
        # Through list(), so that a failure on a node is raised here.
        list(pool.map(lambda node: _load_on(node, archive, digests), nodes))
    return list(digests)


def _load_on(node: Node, archive: Path, digests: Mapping[str, str]) -> None:
    names = ", ".join(digests)
    present = node.images()
    if all(present.get(name) == digest for name, digest in digests.items()):
        say(f"{names} is on {node.name} already")
        return
    with step(f"loading {names} on {node.name}"):
        node.load(archive)


def base_image() -> str:
    """Name of the base image in buildah's storage, made by debootstrap once."""
    key = hashlib.sha256(repr((SUITE, BASE_PACKAGES)).encode()).hexdigest()[:12]
    name = f"localhost/transferqueue-base:{key}"
    folder = cache_folder() / "base" / key
    with cache_lock("images"):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "rootfs.tar").exists():
            with step(f"making the base image (Debian {SUITE})"):
                _debootstrap(folder / "rootfs.tar")
        if not _buildah("images", "--quiet", "--filter", f"reference={name}").strip():
            with step("importing the base image"):
                (folder / "Dockerfile").write_text('FROM scratch\nADD rootfs.tar /\nCMD ["sh"]\n')
                _buildah("bud", "--quiet", "--isolation", "chroot", "--tag", name, str(folder))
    return name


def _debootstrap(tarball: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="transferqueue-base-") as folder:
        root = Path(folder) / "root"
        run(
            ["debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", SUITE, root],
            fix="It downloads Debian packages: check that this machine reaches a Debian mirror.",
        )
        partial = tarball.with_suffix(".partial")
        ballast = ("var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*", "usr/share/locale/*")
        left_out = [f"--exclude=./{pattern}" for pattern in ballast]
        run(["tar", "--directory", root, *left_out, "--create", "--file", partial, "."])
        partial.rename(tarball)


def _copied_sources(dockerfile: Path) -> Iterator[str]:
    """Paths that the Dockerfile takes from the repository, in order, each once."""
    seen = set()
    for line in dockerfile.read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--from"):
            for source in words[1:-1]:
                if source not in seen:
                    seen.add(source)
                    yield source


def _content_key(dockerfile: Path, sources: Sequence[str], below: str) -> str:
    made_by = repr((SUITE, BASE_PACKAGES, COMPRESSION)).encode()
    digest = hashlib.sha256(made_by + below.encode() + dockerfile.read_bytes())
    for source in sources:
        path = REPOSITORY / source
        if not path.exists():
            raise ClusterError(f"{dockerfile} copies {source}, which is not in the repository.")
        for file in sorted(_files(path)):
            digest.update(file.relative_to(REPOSITORY).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.name != "__pycache__":
        for child in path.iterdir():
            yield from _files(child)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)


def _push(name: str, reference: str, archive: Path) -> None:
    """Write an image of buildah's storage as an archive, under the name `reference`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    _buildah("push", "--quiet", *COMPRESSION, name, f"oci-archive:{partial}:{reference}")
    partial.rename(archive)


def _buildah(*arguments: str) -> str:
    """Run buildah with layers as overlays where the kernel can, else as copies."""
    environment = {} if "STORAGE_DRIVER" in os.environ else {"STORAGE_DRIVER": _storage_driver()}
    return run(["buildah", *arguments], environment=environment)


def _storage_driver() -> str:
    return "overlay" if "\toverlay\n" in Path("/proc/filesystems").read_text() else "vfs"
