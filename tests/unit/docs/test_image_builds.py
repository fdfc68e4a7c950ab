"""The `docker build` commands of the docs against the Dockerfiles that they name; tests/cluster builds these."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILES = sorted(ROOT.glob("images/*/Dockerfile"))
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
_COMMAND = re.compile(r"docker build (?:[^`\n\\]|\\\n)+")


class Instruction(NamedTuple):
    name: str
    words: list[str]
    text: str


def parse(file: Path) -> list[Instruction]:
    """The instructions of a Dockerfile: comments left out, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert not lines[-1].endswith("\\"), "the last line is continued, but ends the file"
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [Instruction(name, text.split(), text) for name, _, text in (line.partition(" ") for line in joined)]


def arguments(file: Path) -> set[str]:
    """What `--build-arg` may set."""
    return {found.text.partition("=")[0] for found in parse(file) if found.name == "ARG"}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_a_dockerfile_parses_and_refers_to_what_there_is(file: Path) -> None:
    stages: set[str] = set()
    declared: set[str] = set()
    for position, (name, words, text) in enumerate(parse(file)):
        assert name in INSTRUCTIONS, text
        if name == "ARG":
            declared.add(text.partition("=")[0])
        if name == "FROM":
            assert set(re.findall(r"\$\{(\w+)\}", words[0])) <= declared, text
            assert len(words) == 1 or (len(words) == 3 and words[1] == "AS"), text
            stages.update(words[2:])
        if name == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages, text
        elif name == "COPY":
            missing = [source for source in words[:-1] if not (ROOT / source).exists()]
            assert len(words) > 1
            assert not missing
        if name == "RUN":
            done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        assert position or name == "ARG"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_an_image_without_arguments_is_built_on_a_public_base_or_on_ours(file: Path) -> None:
    first = parse(file)[0]
    assert first.text.partition("=")[2] in ("python:3.11-slim-bookworm", "localhost/transferqueue-trainer:dev")


def builds(script: str) -> list[list[str]]:
    """The `docker build` commands that a shell script runs, with a docker that only writes down what it is told."""
    recorder = "docker() { printf '%s\\n' \"${*@Q}\"; }\n"
    done = subprocess.run(["bash", "-euc", recorder + script], capture_output=True, text=True, check=True, cwd=ROOT)
    return [words for words in map(shlex.split, done.stdout.splitlines()) if words[0] == "build"]


def check(words: list[str]) -> str:
    """The name of the image that ``docker build`` with ``words`` makes."""
    left = iter(words[1:])
    options: list[tuple[str, str]] = []
    folders = []
    for word in left:
        if word.startswith("-"):
            options.append((word, next(left)))
        else:
            folders.append(word)
    assert folders == ["."], "the Dockerfiles copy from the root of the repository"
    assert {name for name, _ in options} <= {"-f", "-t", "--build-arg"}
    (file,) = (ROOT / value for name, value in options if name == "-f")
    assert file in DOCKERFILES
    assert {value.partition("=")[0] for name, value in options if name == "--build-arg"} <= arguments(file)
    return file.parent.name


def test_the_quick_start_builds_every_image_with_arguments_that_it_takes() -> None:
    page = (ROOT / "docs" / "quickstart-cluster.md").read_text()
    (block,) = (block for block in re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S) if "docker build" in block)
    commands = builds(block)
    assert [check(words) for words in commands] == ["operator", "server", "mooncake", "trainer", "ray"]
    tags = {word for words in commands for option, word in itertools.pairwise(words) if option == "-t"}
    assert len(tags) == len(commands)
    given = {word.partition("=")[2] for words in commands for word in words if word.startswith("TRAINER_IMAGE=")}
    assert given <= tags, "the image with Ray is built on the trainer that was built before"
    assert given


@pytest.mark.parametrize("file", [*sorted(ROOT.glob("docs/**/*.md")), *DOCKERFILES], ids=str)
def test_every_other_docker_build_takes_arguments_of_its_dockerfile(file: Path) -> None:
    found = [command for command in _COMMAND.findall(file.read_text()) if "$image" not in command]
    for command in found:
        check(shlex.split(command.replace("\\\n", " "))[1:])
    assert found or file not in DOCKERFILES, "a Dockerfile says how to build it"


def test_base_image_is_an_argument_of_the_four_images_that_the_page_says() -> None:
    assert {file.parent.name for file in DOCKERFILES if "BASE_IMAGE" in arguments(file)} == {
        "operator", "server", "mooncake", "trainer",
    }  # fmt: skip
