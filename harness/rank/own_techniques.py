"""The experiment file's own techniques, in every rank: apply them, and see whether they are there.

A function is called where the name of its parameter says: with the config before the trainer is
built, with the model before it is parallelised, with each part of the model after that, or with
the trainer before training. A seed checkpoint is made without any of them: weights are shared.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from converge_harness.rank.inject import load_module
from converge_harness.rank.marks import changed_modules, config_marks, object_marks
from converge_harness.run_folder.in_force import OwnTechniqueInForceDocument
from converge_harness.run_folder.job import RankJob, RankOwnTechnique

CONFIG, MODEL, PARALLEL_MODEL, TRAINER = "config", "model", "parallel_model", "trainer"


class TechniqueError(Exception):
    """A function of a ``[technique.NAME]`` cannot be called, raises, or returns the wrong thing."""


class OwnTechniques:
    """Those of a job on this rank, and what became of each."""

    def __init__(self, job: RankJob) -> None:
        """Import their files. Raises TechniqueError for one that cannot be."""
        self._techniques = () if job.makes_seed_checkpoint else job.own_techniques
        self._modules: dict[str, ModuleType] = {}
        self._changed: dict[str, bool] = {}
        """By name, whether the function changed anything; absent until it is called."""
        self._classes: dict[str, set[str]] = {}
        """By name, classes of modules that the function changed."""
        self._new_keys: frozenset[str] = frozenset()
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}
        for own in self._techniques:
            if own.folder and own.folder not in sys.path:
                sys.path.append(own.folder)
            for key in ("apply", "in_force"):
                target = getattr(own, key)
                if target is not None:
                    self._functions[own.name, key] = self._load(own, key, target)

    def apply_to_config(
        self, config: Any, flat: Callable[[Any], Mapping[str, Any]], new_keys: Iterable[str] = ()
    ) -> tuple[Any, tuple[str, ...]]:
        """The config that the trainer is to be built from, and the keys that techniques changed.

        ``flat`` makes dotted keys of a config. ``new_keys`` are keys of the job's overrides to
        which these gave another value than the train config does.
        """
        self._new_keys = frozenset(new_keys)
        before = dict(flat(config)) if self._at(CONFIG) else {}
        for own in self._at(CONFIG):
            marks = config_marks(config)
            returned = self._call(own, config)
            if returned is not None and not isinstance(returned, type(config)):
                raise TechniqueError(
                    f"{_place(own, 'apply')} returns {_kind(returned)}; return a "
                    f"{type(config).__qualname__}, or nothing after changing the one given"
                )
            config = config if returned is None else returned
            self._changed[own.name] = config_marks(config) != marks
        if not before:
            return config, ()
        after, absent = dict(flat(config)), object()
        keys = (*after, *(key for key in before if key not in after))
        return config, tuple(k for k in keys if before.get(k, absent) != after.get(k, absent))

    def watch_model(self, spec: Any) -> Any:
        """A model's spec whose functions also apply techniques, before and after they parallelise.

        A pipeline is cut from the whole model, and its parts are parallelised one by one.
        """
        if not (self._at(MODEL) or self._at(PARALLEL_MODEL)):
            return spec
        parallelize, pipeline = spec.parallelize_fn, spec.pipelining_fn
        whole = True

        @functools.wraps(parallelize)
        def parallelized(model: Any, *args: Any, **kwargs: Any) -> Any:
            if whole:
                model = self._apply_to_model(MODEL, model)
            return self._apply_to_model(PARALLEL_MODEL, parallelize(model, *args, **kwargs))

        if pipeline is None:
            return dataclasses.replace(spec, parallelize_fn=parallelized)

        @functools.wraps(pipeline)
        def pipelined(model: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal whole
            whole = False
            return pipeline(self._apply_to_model(MODEL, model), *args, **kwargs)

        return dataclasses.replace(spec, parallelize_fn=parallelized, pipelining_fn=pipelined)

    def apply_to_trainer(self, trainer: Any) -> None:
        """Call the functions that take the trainer."""
        for own in self._at(TRAINER):
            marks = object_marks(trainer)
            returned = self._call(own, trainer)
            if returned is not None:
                raise TechniqueError(
                    f"{_place(own, 'apply')} returns {_kind(returned)}; a trainer cannot be "
                    "replaced: change the one given, and return nothing"
                )
            after = object_marks(trainer)
            self._changed[own.name] = after != marks
            for part in trainer.model_parts:
                self._note_classes(own, changed_modules(part, marks, after))

    def see(self, trainer: Any) -> list[OwnTechniqueInForceDocument]:
        """What became of each on this rank, after the first step."""
        return [self._seen(own, trainer) for own in self._techniques]

    def _seen(self, own: RankOwnTechnique, trainer: Any) -> OwnTechniqueInForceDocument:
        function = self._functions.get((own.name, "in_force"))
        count = None
        if function is not None:
            returned = self._guarded(own, "in_force", function, trainer)
            try:
                count = operator.index(returned)
            except TypeError:
                raise TechniqueError(
                    f"{_place(own, 'in_force')} returns {_kind(returned)}; return a count, or "
                    "True or False"
                ) from None
        by_keys = not self._new_keys.isdisjoint(own.set)
        return {
            "name": own.name,
            "called": own.apply is None or own.name in self._changed,
            "changed": by_keys or self._changed.get(own.name, False),
            "count": count,
            "modules": sorted(self._classes.get(own.name, ())),
        }

    def _apply_to_model(self, place: str, model: Any) -> Any:
        for own in self._at(place):
            marks = object_marks(model)
            returned = self._call(own, model)
            if returned is not None and not hasattr(returned, "named_parameters"):
                raise TechniqueError(
                    f"{_place(own, 'apply')} returns {_kind(returned)}; return a module, or "
                    "nothing after changing the one given"
                )
            replaced = returned is not None and returned is not model
            model = model if returned is None else returned
            after = object_marks(model)
            # Of several parts, one that changes is enough.
            changed = replaced or after != marks
            self._changed[own.name] = self._changed.get(own.name, False) or changed
            self._note_classes(own, changed_modules(model, marks, after))
        return model

    def _note_classes(self, own: RankOwnTechnique, classes: set[str]) -> None:
        self._classes[own.name] = self._classes.get(own.name, set()) | classes

    def _at(self, place: str) -> list[RankOwnTechnique]:
        return [own for own in self._techniques if own.apply is not None and own.place == place]

    def _call(self, own: RankOwnTechnique, argument: Any) -> Any:
        return self._guarded(own, "apply", self._functions[own.name, "apply"], argument)

    def _guarded(
        self, own: RankOwnTechnique, key: str, function: Callable[..., Any], argument: Any
    ) -> Any:
        try:
            return function(argument)
        except (Exception, SystemExit) as error:
            raise TechniqueError(
                f"{_place(own, key)} raises {type(error).__name__}: {error} ({_where(error)})"
            ) from error

    def _load(self, own: RankOwnTechnique, key: str, target: str) -> Callable[..., Any]:
        file, _, name = target.rpartition(":")
        try:
            # Once per file, so that its functions share what the module keeps.
            module = self._modules.get(file) or load_module(Path(file))
        except (Exception, SystemExit) as error:
            raise TechniqueError(
                f"{_place(own, key)}: the file cannot be imported: {type(error).__name__}: {error}"
            ) from error
        self._modules[file] = module
        function = getattr(module, name, None)
        if not callable(function):
            raise TechniqueError(f"{_place(own, key)}: the file has no function {name!r}")
        return function  # type: ignore[no-any-return]


def together(
    everyone: Iterable[Sequence[OwnTechniqueInForceDocument]],
) -> list[OwnTechniqueInForceDocument]:
    """What all ranks see of the techniques: one that has it in force is enough."""
    found: dict[str, OwnTechniqueInForceDocument] = {}
    for seen in everyone:
        for each in seen:
            so_far = found.setdefault(each["name"], {**each, "count": None})
            so_far["called"] = so_far["called"] or each["called"]
            so_far["changed"] = so_far["changed"] or each["changed"]
            so_far["modules"] = sorted({*so_far["modules"], *each["modules"]})
            if each["count"] is not None:
                so_far["count"] = (so_far["count"] or 0) + each["count"]
    return list(found.values())


def _place(own: RankOwnTechnique, key: str) -> str:
    target = str(getattr(own, key))
    return f"technique.{own.name}.{key} = {target.rpartition('/')[2]!r}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__qualname__}"


def _where(error: BaseException) -> str:
    """``file:line`` where it was raised, in the innermost code."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place"
