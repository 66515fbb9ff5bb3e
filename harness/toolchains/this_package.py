"""This very converge, for other environments: ranks import the code that plans and judges them."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

from converge_harness import DISTRIBUTION, __version__
from converge_harness.errors import ToolchainError

_NOT_OF_THE_WHEEL = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
"""What installers add to an installed package's metadata."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def _packages() -> Path:
    return Path(__file__).parents[2]


def checkout() -> Path | None:
    """The checkout that this package is imported from (by its link in ``src/``), if it is one."""
    folder = _packages().parent
    return folder if (folder / "pyproject.toml").is_file() else None


def code_version() -> str:
    """Which converge this is: a checkout by its path, since that is edited, else a digest."""
    if folder := checkout():
        return f"-e {folder.resolve()}"
    described = "".join(f"{file} {file.hash}\n" for file in sorted(_files(_installed())))
    return f"{__version__} {hashlib.sha256(described.encode()).hexdigest()[:16]}"


def is_imported_by_path() -> bool:
    """Whether ``PYTHONPATH`` makes ranks import this package, whatever their environment has."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return any(folder and Path(folder).resolve() == _packages().resolve() for folder in folders)


def requirement(folder: Path) -> tuple[str, ...]:
    """What an installer is given to install this converge; a wheel of it is made in ``folder``."""
    if path := checkout():
        return ("-e", str(path))
    return (str(make_wheel(_installed(), folder)),)


def make_wheel(distribution: Distribution, folder: Path) -> Path:
    """A wheel of an installed package, from its files: no index has to have it.

    The same files make the same wheel.
    """
    path = folder / f"{DISTRIBUTION.replace('-', '_')}-{distribution.version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sorted(_files(distribution)):
            content = Path(str(file.locate())).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{file},sha256={digest.decode()},{len(content)}")
            wheel.writestr(zipfile.ZipInfo(str(file), _EPOCH), content)
            if file.name == "METADATA":
                metadata = file.parent
        record.append(f"{metadata}/RECORD,,")
        wheel.writestr(zipfile.ZipInfo(f"{metadata}/RECORD", _EPOCH), "\n".join(record) + "\n")
    return path


def _installed() -> Distribution:
    for distribution in distributions(name=DISTRIBUTION, path=[str(_packages())]):
        if any(file.name == "METADATA" for file in _files(distribution)):
            return distribution
    raise ToolchainError(
        f"converge in {_packages()} was not installed by pip or uv, so it cannot be installed in a "
        "toolchain; install it by one of them"
    )


def _files(distribution: Distribution) -> list[PackagePath]:
    """What the wheel had that a package was installed from."""
    return [
        file
        for file in distribution.files or ()
        if ".." not in file.parts and file.suffix != ".pyc" and file.name not in _NOT_OF_THE_WHEEL
    ]
