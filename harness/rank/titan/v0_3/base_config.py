"""The config that a job starts from: what its ``[converge]`` names.

``module`` means what torchtitan's ``--module`` means (``torchtitan/config/manager.py``): the name
of a model or experiment of torchtitan, or any module that can be imported; ``config`` a function
in its ``config_registry``, or in itself.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torchtitan
from torchtitan.trainer import Trainer

from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.run_folder.job import BaseConfig, RankJob

_MODULE, _CONFIG, _ARGUMENTS = "converge.module", "converge.config", "converge.arguments"
_SHORT = ("torchtitan.models", "torchtitan.experiments", "torchtitan.experiments.rl.examples")
"""Where torchtitan looks for a short name."""
_DISTRIBUTIONS = {"fla": "flash-linear-attention", "torchft": "torchft-nightly"}
"""Of packages that torchtitan's models import, those that are installed by another name."""
_SIZED_LATER = ("torchtitan.experiments.transformers_modeling_backend.model",)
"""Models that read their sizes from a file while the trainer is built."""
_OF_A_GPU = ("cuda", "nvidia", "gpu")


@dataclass(frozen=True, slots=True)
class CalledConfig:
    """A config function's answer."""

    trainer: Any
    """A ``torchtitan.trainer.Trainer.Config``, which is the caller's to change."""
    module: str
    """The full name of the module that has the function."""


def base_config(job: RankJob) -> CalledConfig:
    """Call the config function.

    Raises SettingError for a module that cannot be imported, a function that is not there, cannot
    be called or does not return what torchtitan trains.
    """
    wanted = job.train_config
    if not wanted.module or not wanted.config:
        key = _CONFIG if wanted.module else _MODULE
        raise SettingError(KeyProblem(key, "is missing: torchtitan 0.3 has no job files"))
    module = _import_module(wanted, on_cpu=job.device == "cpu")
    function = getattr(module, wanted.config, None)
    if not callable(function):
        raise SettingError(
            KeyProblem(
                _CONFIG,
                f"{wanted.config!r} is no config of {wanted.module}",
                tuple(_config_functions(module)),
            )
        )
    config = _call(function, wanted)
    if not isinstance(config, Trainer.Config):
        found = f"{type(config).__module__}.{type(config).__qualname__}"
        raise SettingError(
            KeyProblem(
                _CONFIG,
                f"{wanted.config} of {module.__name__} returns {found}, which is no "
                "torchtitan.trainer.Trainer.Config",
            )
        )
    if config.model_spec is None:
        raise SettingError(KeyProblem(_CONFIG, f"{wanted.config} returns no model_spec"))
    model = config.model_spec.model
    if type(model).__module__ not in _SIZED_LATER and getattr(model, "vocab_size", None) is None:
        raise SettingError(
            KeyProblem(
                _CONFIG,
                f"the model of {wanted.config} has no vocab_size: converge judges language models, "
                "whose loss it computes again from the logits",
            )
        )
    return CalledConfig(config, module.__name__)


def _import_module(wanted: BaseConfig, *, on_cpu: bool) -> ModuleType:
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    name = wanted.module or ""
    short = _supported_models | _supported_experiments
    if name in short:
        # Only those that are there: to look inside a package would import it, with all it needs.
        package = Path(torchtitan.__file__).parents[1]
        all_of_it = [f"{prefix}.{name}.config_registry" for prefix in _SHORT]
        candidates = [
            each
            for each in all_of_it
            if package.joinpath(*each.split(".")).with_suffix(".py").exists()
        ]
    else:
        candidates = [f"{name}.config_registry", name]
    folder = wanted.import_from
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    for candidate in candidates:
        found = _import_one(candidate, name, on_cpu=on_cpu)
        if found is not None:
            _require_from(folder, found)
            return found
    if name in short:
        what = "is not in this torchtitan, which only lists its name"
    else:
        what = "is no model of torchtitan and no module that can be imported"
    near = difflib.get_close_matches(name, sorted(short), n=len(short), cutoff=0.0)
    raise SettingError(KeyProblem(_MODULE, f"{name!r} {what}", tuple(near)))


def _import_one(candidate: str, name: str, *, on_cpu: bool) -> ModuleType | None:
    """None where there is no such module; torchtitan takes any ImportError for that."""
    try:
        return importlib.import_module(candidate)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if candidate == missing or candidate.startswith(f"{missing}."):
            return None
        package = missing.partition(".")[0]
        if package == name.partition(".")[0]:
            help_ = "which is not there"
        else:
            distribution = _DISTRIBUTIONS.get(package, package)
            help_ = (
                "which this toolchain does not have: "
                f"uv pip install --python {sys.executable} {distribution}"
            )
        place = _place_in_their_code(error)
        raise SettingError(
            KeyProblem(_MODULE, f"{name!r} needs {missing!r} ({place}), {help_}")
        ) from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        help_ = (
            "; a run on a CPU has no GPU: ask for one in a function, not while it is imported"
            if on_cpu and any(word in said.lower() for word in _OF_A_GPU)
            else ""
        )
        raise SettingError(
            KeyProblem(
                _MODULE,
                f"{name!r} cannot be imported: {_place_in_their_code(error)}: {said}{help_}",
            )
        ) from error


def _require_from(folder: Path | None, module: ModuleType) -> None:
    """Refuse a module that is not the one whose digest counts to the identity."""
    if folder is None:
        return
    file = Path(module.__file__ or "").resolve()
    if not file.is_relative_to(folder.resolve()):
        raise SettingError(
            KeyProblem(
                _MODULE,
                f"{module.__name__} is in {folder}, and an installed one of that name is imported "
                f"from {file}: rename one of them",
            )
        )


def _config_functions(module: ModuleType) -> Iterable[str]:
    return (
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    )


def _call(function: Any, wanted: BaseConfig) -> Any:
    arguments = dict(wanted.arguments)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables of C have none
        signature = None
    if signature is not None:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise SettingError(
                KeyProblem(_ARGUMENTS, f"{error}: the function is {wanted.config}{signature}")
            ) from error
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise SettingError(
            KeyProblem(
                _CONFIG,
                f"{wanted.config} of {wanted.module} raises at "
                f"{_place_in_their_code(error)}: {said}",
            )
        ) from error


def _place_in_their_code(error: BaseException) -> str:
    """``file:line`` of the last frame that is not of a library below the module."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [each for each in frames if "site-packages" not in each.filename]
    theirs = own or [each for each in frames if "torchtitan" in each.filename] or frames
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else "at its import"
