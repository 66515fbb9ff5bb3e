"""Which dialect can drive a torchtitan, found in its code: nothing of it is imported.

A fork may call itself ``0.0.1.dev``, so its version says little. Each dialect hooks
certain classes, functions and attributes of the trainer; here they are looked for in the source.
What a module imports from elsewhere counts as there, and so does anything in a file with
``from … import *``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from converge_harness.errors import ToolchainError

TITAN_02, TITAN_03, TITAN_MAIN = "titan_0_2", "titan_0_3", "titan_main"
_OF_EVERY_TRAINER = (
    *("batch_generator", "checkpointer", "close", "dataloader", "device", "loss_fn"),
    *("lr_schedulers", "metrics_processor", "model_parts", "ntokens_seen", "optimizers"),
    *("parallel_dims", "pp_has_last_stage", "pp_schedule", "should_continue_training", "step"),
    *("train", "train_step"),
)


def _trainer(*more: str) -> tuple[str, ...]:
    return ("Trainer", *(f"Trainer.{name}" for name in sorted((*_OF_EVERY_TRAINER, *more))))


def _keys(table: str, *keys: str) -> tuple[str, ...]:
    """A table of the config, and keys of it that a rank writes."""
    return (table, *(f"{table}.{key}" for key in keys))


_SINCE_03: Mapping[str, tuple[str, ...]] = {
    "trainer": _trainer("config", "model_config", "post_dataloading_process"),
    "components.loss": ("ChunkedLossWrapper",),
    "components.quantization": ("Float8LinearConverter",),
    "distributed.activation_checkpoint": ("FullAC", "SelectiveAC"),
    "distributed.utils": ("clip_grad_norm_",),
    "models": ("_supported_models",),
    "models.common.attention": ("FlexAttention", "FusedQKVLinear"),
    "observability": ("structured_logger",),
    "tools.logging": ("init_logger", "logger"),
}
_SIZES_IN_SAMPLES = (
    *_keys("TrainingConfig", "global_batch_size", "local_batch_size", "seq_len"),
    *_keys("ParallelismConfig", "pipeline_parallel_microbatch_size", "spmd_backend"),
)
HOOKED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    TITAN_MAIN: {
        **_SINCE_03,
        "components.data": ("GrainDataLoader", "ConcatThenSplitPackingConfig"),
        "components.data.loader": ("BaseDataLoader",),
        "config.configs": (
            *_keys(
                "TrainingConfig",
                "max_context_length",
                "num_tokens_per_microbatch_per_dp_rank",
                "num_tokens_per_train_step",
            ),
            *_keys("ParallelismConfig", "num_pp_microbatches", "spmd_backend"),
        ),
        "hf_datasets.text_datasets": ("TextProcessor",),
    },
    TITAN_03: {
        **_SINCE_03,
        "components.dataloader": ("BaseDataLoader",),
        "config.configs": _SIZES_IN_SAMPLES,
        "hf_datasets.text_datasets": ("HuggingFaceTextDataLoader",),
    },
    TITAN_02: {
        "train": _trainer("job_config", "maybe_enable_amp", "model_args"),
        "components.dataloader": ("BaseDataLoader",),
        "config": ("JobConfig",),
        "distributed.utils": ("clip_grad_norm_",),
        "models": ("_supported_models",),
        "protocols.train_spec": ("get_train_spec",),
        "tools.logging": ("init_logger",),
    },
}
"""By dialect and module of torchtitan, the names that our rank code hooks."""
_ALSO: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # Two days of August 2026, between pull requests 4088 (Grain) and 4121 (sizes in tokens).
    TITAN_MAIN: {**HOOKED[TITAN_MAIN], "config.configs": _SIZES_IN_SAMPLES},
}
"""By dialect, what it uses instead on commits between two changes."""
_RELEASES = {TITAN_MAIN: "main", TITAN_03: "0.3", TITAN_02: "0.2"}
_WRITTEN_FOR = "0.2.x, 0.3.x and main as of b5bcd76c6 (21 August 2026)"
_SHOWN = 3


_NONE: frozenset[tuple[str, str]] = frozenset()


class Missing(NamedTuple):
    """Something that our rank code hooks and a torchtitan lacks."""

    name: str
    file: Path
    """Where it was looked for."""
    names: int = 1
    """How many names this one stands for: a missing file counts all of its names."""

    def __str__(self) -> str:
        return f"{self.name} (looked in {self.file})" if self.file.is_file() else f"{self.file}"


def dialect_of(package: Path, version: str) -> str:
    """The dialect of the torchtitan in a folder.

    Raises ToolchainError, with what is missing and where it was looked for, if it speaks none.
    """
    for remembered in (_tree, _class, _members):
        remembered.cache_clear()  # somebody may have edited the fork since
    lacking = {dialect: tuple(missing(package, dialect)) for dialect in HOOKED}
    for dialect, names in lacking.items():
        if not names or (dialect in _ALSO and not any(_missing(package, _ALSO[dialect]))):
            return dialect
    nearest = min(lacking, key=lambda dialect: sum(each.names for each in lacking[dialect]))
    names = lacking[nearest]
    shown = ", ".join(map(str, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ToolchainError(
        f"torchtitan {version} in {package} cannot be driven by converge, whose rank code is "
        f"written for {_WRITTEN_FOR}: compared with {_RELEASES[nearest]} it lacks {shown}{more}; "
        "rebase the fork on one of them, or keep these names"
    )


def missing(package: Path, dialect: str) -> Iterator[Missing]:
    """What a dialect hooks and the torchtitan in a folder lacks."""
    return _missing(package, HOOKED[dialect])


def _missing(package: Path, hooked: Mapping[str, tuple[str, ...]]) -> Iterator[Missing]:
    for module, names in hooked.items():
        file = _file(package, module)
        if not file.is_file():
            yield Missing(f"torchtitan.{module}", file, len(names))
            continue
        there = _names(file)
        for name in names:
            owner, _, member = name.partition(".")
            if owner not in there and not _is_submodule(file, owner):
                if not member:  # its members are missing with it
                    yield Missing(name, file)
            elif member and not _has_member(package, module, owner, member):
                yield Missing(name, file)


def _is_submodule(file: Path, name: str) -> bool:
    here = file.parent / name
    return file.name == "__init__.py" and (here.is_dir() or here.with_suffix(".py").is_file())


def _file(package: Path, module: str) -> Path:
    path = package.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        reason = getattr(error, "msg", None) or getattr(error, "strerror", None) or error
        raise ToolchainError(f"{file} is not valid Python: {reason}") from None


class _Everything(frozenset[str]):
    """The names of a module that imports ``*``."""

    def __contains__(self, name: object) -> bool:
        return True


def _names(file: Path) -> frozenset[str]:
    """Names that a module defines or imports at its top, also inside of ``if`` and ``try``."""
    found: set[str] = set()
    left: list[ast.AST] = [*_tree(file).body]
    while left:
        node = left.pop()
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                if any(alias.name == "*" for alias in aliases):
                    return _Everything()
                found |= {(each.asname or each.name).partition(".")[0] for each in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case _:
                left += ast.iter_child_nodes(node)
    return frozenset(found)


def _has_member(
    package: Path, module: str, owner: str, member: str, seen: frozenset[tuple[str, str]] = _NONE
) -> bool:
    """Whether a class has a member: its own, or one of a base that torchtitan defines.

    What is imported from another package is taken to have it. ``seen`` are classes and modules on
    the way to this one.
    """
    if (module, owner) in seen:
        return False
    seen |= {(module, owner)}
    found = _class(_file(package, module), owner)
    if found is None:
        source = _imported_from(_file(package, module), package, owner)
        return source is None or _has_member(package, *source, member, seen)
    if member in _members(found):
        return True
    bases = (base.id for base in found.bases if isinstance(base, ast.Name))
    return any(
        _has_member(package, *source, member, seen)
        for base in bases
        if (source := _source_of(package, module, base)) is not None
    )


def _source_of(package: Path, module: str, name: str) -> tuple[str, str] | None:
    """The module of torchtitan that defines a class, as another module calls it, and its name."""
    file = _file(package, module)
    return (module, name) if _class(file, name) else _imported_from(file, package, name)


@cache
def _class(file: Path, name: str) -> ast.ClassDef | None:
    nodes = ast.walk(_tree(file))
    return next((n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name), None)


def _imported_from(file: Path, package: Path, name: str) -> tuple[str, str] | None:
    """The module of torchtitan that a name is imported from, and its name there."""
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) != name:
                continue
            module = _absolute(file, package, node)
            if module is not None and _file(package, module).is_file():
                return module, alias.name
    return None


def _absolute(file: Path, package: Path, node: ast.ImportFrom) -> str | None:
    """The module within torchtitan that is imported from; None for one of another package."""
    if not node.level:
        return (node.module or "").removeprefix("torchtitan.") if _is_ours(node.module) else None
    folder = file.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    inside = folder.relative_to(package).parts if folder.is_relative_to(package) else ()
    return ".".join((*inside, *filter(None, [node.module]))) or None


def _is_ours(module: str | None) -> bool:
    return (module or "").startswith("torchtitan.")


@cache
def _members(found: ast.ClassDef) -> frozenset[str]:
    """Names that a class body defines, and attributes that its methods set on ``self``.

    An annotation alone sets nothing.
    """
    names: set[str] = set()
    for node in found.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
                names |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == "self"
                }
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {each.id for each in targets if isinstance(each, ast.Name)}
    return frozenset(names)
