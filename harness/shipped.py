"""Files that come with converge beside its code: pinned versions, experiments, docs of causes.

In a checkout they lie at its root. A wheel has them in the package, in ``shipped/`` (``force-
include`` in pyproject.toml). Everything in ``experiments/`` can be written into a folder of one's
own as an example, with the files that it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.run_folder.shapes import texts_in

CONSTRAINTS = "constraints.txt"
EXPERIMENTS = "experiments"
_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """A file or folder that comes with converge, by its path in a checkout."""
    installed = _PACKAGE / "shipped" / name
    return installed if installed.exists() else _PACKAGE.parent / name


def examples() -> Mapping[str, str]:
    """Every example's name, and the first sentence of its file."""
    folder = shipped(EXPERIMENTS)
    found = {
        str(path.relative_to(folder).with_suffix("")): _first_sentence(path.read_text())
        for path in folder.rglob("*.toml")
    }
    return dict(sorted(found.items()))


def write_example(name: str, out: Path, *, force: bool = False) -> tuple[Path, ...]:
    """Write an example to ``out``, and beside it the files that it names; return their paths.

    A file that is there with the same content stays.

    Raises:
        ConfigError: there is no such example, or another file is in the way (unless ``force``).
    """
    if name not in examples():
        hints = (suggest(name, list(examples())), "--example list tells what each is")
        raise ConfigError(
            Problem(f"--example {name}", "is not an example", "; ".join(filter(None, hints)))
        )
    source = shipped(EXPERIMENTS) / f"{name}.toml"
    wanted = {out: source.read_bytes()}
    for named, path in _named_files(source):
        wanted[out.parent / named] = path.read_bytes()
    in_the_way = [
        Problem(str(path), "is there already, with other content", "name another --out, or --force")
        for path, content in wanted.items()
        if path.exists() and (path.is_dir() or (not force and path.read_bytes() != content))
    ]
    if in_the_way:
        raise ConfigError(in_the_way)
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tuple(wanted)


def _first_sentence(text: str) -> str:
    """Of the comment that a file begins with."""
    comment = " ".join(
        line[2:] for line in takewhile(lambda line: line[:2] == "# ", text.splitlines())
    )
    return re.split(r"(?<=[^\s.])[.?](?:\s|$)", comment)[0]


def _named_files(experiment: Path) -> Iterator[tuple[str, Path]]:
    """Files that an experiment, or a train config of it, names; modules are beside it.

    They are found beside the experiment or, as from the root of a checkout, beside
    ``experiments/``.
    """
    # Imported here: `converge --help` lists the examples with the standard library alone.
    import tomli

    places = (experiment.parent, shipped(EXPERIMENTS).parent)
    seen: set[str] = set()
    texts = [experiment]
    while texts:
        for text in texts_in(tomli.loads(texts.pop().read_text())):
            name = text.partition(":")[0]
            if name.isidentifier():
                name = f"{name}.py"
            if name in seen or not name.endswith((".py", ".toml", ".jsonl")):
                continue
            seen.add(name)
            path = next((place / name for place in places if (place / name).is_file()), None)
            if path is not None:
                yield name, path
                if path.suffix == ".toml":
                    texts.append(path)
