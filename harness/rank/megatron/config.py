"""A job as Megatron-Core's own dataclasses.

The train config has a table for each, with the keys of the installed class::

    [transformer]   TransformerConfig           [ddp]         DistributedDataParallelConfig
    [optimizer]     OptimizerConfig             [gpt]         arguments of GPTModel
    [lr_scheduler]  OptimizerParamScheduler     [training]    sizes (``TrainingSizes``)

Applied in this order (later wins): defaults of the class, the train config, what converge
implies, the experiment's ``set``. Then Megatron-Core's own checks run.
"""

from __future__ import annotations

import enum
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from converge_harness.rank.job_checks import (
    loader_problems,
    repeat_problems,
    unknown_fixes,
)
from converge_harness.rank.settings import (
    DATA_TYPE_KEYS,
    KeyProblem,
    SettingError,
    apply_setting,
    flatten,
    value_of,
)
from converge_harness.run_folder.job import Degrees, RankJob

INTERLEAVED = "Interleaved1F1B"
SCHEDULES = ("1F1B", INTERLEAVED)
"""Megatron-Core's pipeline schedules, by the names that experiments use."""
CHUNKS = 2
"""Model chunks on a pipeline rank of the interleaved schedule, unless the train config has
``transformer.virtual_pipeline_model_parallel_size``."""
_CHUNKS_KEY = "transformer.virtual_pipeline_model_parallel_size"
_ACTIVATION = "transformer.activation_func"
_ACTIVATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch.nn.functional, name) for name in ("gelu", "silu", "relu")
}
"""What ``transformer.activation_func`` can name: a TOML file has no functions."""
_FUNCTIONS = ("init_method", "output_layer_init_method", "embedding_init_method")
"""Fields of ``TransformerConfig`` that are functions, and have no names."""
_DROPOUT = ("transformer.hidden_dropout", "transformer.attention_dropout")
_NEED_A_GPU = (
    *("transformer.bias_activation_fusion", "transformer.bias_dropout_fusion"),
    *("ddp.average_in_collective", "ddp.nccl_ub"),
)
"""Switches of kernels and collectives that a CPU with gloo does not have."""
_NOT_READ = (
    *("transformer.enable_cuda_graph", "transformer.external_cuda_graph"),
    *("transformer.moe_grouped_gemm", "transformer.moe_use_legacy_grouped_gemm"),
    *("transformer.moe_enable_deepep", "transformer.moe_shared_expert_overlap"),
    *("transformer.overlap_moe_expert_parallel_comm", "transformer.persist_layer_norm"),
    *("transformer.layernorm_zero_centered_gamma", "transformer.memory_efficient_layer_norm"),
    *("transformer.cpu_offloading", "optimizer.optimizer_cpu_offload"),
    *("transformer.masked_softmax_fusion", "transformer.gradient_accumulation_fusion"),
    "transformer.apply_rope_fusion",
)
"""Switches that are refused on GPUs, too: converge's rank code does not read what they do, or they
need Apex or Transformer Engine, which the toolchain lacks."""

_UNREAD = (
    *("transformer.cuda_graph_", "transformer.moe_deepep_", "transformer.moe_hybridep_"),
    "optimizer.muon_",
)
"""Beginnings of keys of what is refused (CUDA graphs, the dispatcher ``flex``, other optimizers).
Their defaults differ between releases, and nothing reads them."""
_DISPATCHERS = ("allgather", "alltoall")
"""Megatron-Core's dispatchers of tokens that a CPU has; ``flex`` calls DeepEP or HybridEP."""
NO_SHARD = "no_shard"
_STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "optim": (),
    "optim_grads": ("ddp.overlap_grad_reduce",),
    "optim_grads_params": ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather"),
}
"""What Megatron-FSDP may shard (``ddp.data_parallel_sharding_strategy``: ZeRO-1, 2 and 3), and what
it then switches on by itself, in a copy of its config."""
_BALANCINGS = ("none", "aux_loss", "seq_aux_loss")
"""What may keep experts equally busy. Others work on counts of several steps or passes."""


@dataclass
class TrainingSizes:
    """``[training]``: the sizes by which every trainer of converge calls them."""

    local_batch_size: int = 1
    """Samples of a microbatch: Megatron-LM's micro batch size."""
    global_batch_size: int = -1
    """-1: local batch x dp."""
    seq_len: int = 128
    steps: int = 1
    reset_attention_mask: bool = False
    """Whether tokens attend to their own document only, as with Megatron-LM's option of that
    name."""
    dtype: str = "float32"
    """``bfloat16`` is the technique bf16; a run in another precision, as a reference, says so."""
    mixed_precision_param: str = "float32"
    """The same: Megatron-Core computes in the type of its parameters, and updates float32."""


@dataclass
class Gpt:
    """``[gpt]``: arguments of ``GPTModel`` that are in none of its configs."""

    vocab_size: int = 512
    position_embedding_type: str = "rope"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rope_scaling: bool = False
    """Whether low frequencies are divided, as in Llama 3.1."""
    rope_scaling_factor: float = 8.0
    share_embeddings_and_output_weights: bool = False
    parallel_output: bool = True
    """False: each tensor-parallel rank gathers the logits of the whole vocabulary."""


@dataclass
class Schedule:
    """``[lr_scheduler]``: arguments of ``OptimizerParamScheduler``; a step is an optimizer step."""

    init_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None
    """None: the steps of the job."""
    lr_decay_style: str = "cosine"


@dataclass
class MegatronTables:
    """All tables of a job."""

    transformer: TransformerConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    gpt: Gpt
    lr_scheduler: Schedule
    training: TrainingSizes


@dataclass(frozen=True, slots=True)
class MegatronConfig:
    """The config of a job."""

    tables: MegatronTables
    flat: Mapping[str, Any]
    """Every value that something reads or the job itself set, by dotted key, as JSON."""
    declared: tuple[str, ...]
    """Keys of ``flat`` that the job itself set: where the configs of two jobs may differ."""
    degrees: Degrees
    microbatches: int
    """Of a step, on each data-parallel rank."""
    data_folder: Path
    """Folder of the corpus."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters that the model computes with."""
        found: torch.dtype = self.tables.transformer.params_dtype
        return found


def build_config(job: RankJob) -> MegatronConfig:
    """Raises SettingError when Megatron-Core does not take what the job says."""
    tables = MegatronTables(
        _unchecked(TransformerConfig),
        _unchecked(DistributedDataParallelConfig),
        _unchecked(OptimizerConfig),
        Gpt(),
        Schedule(),
        TrainingSizes(),
    )
    degrees = Degrees() if job.makes_seed_checkpoint else job.parallelism
    problems = [
        # This dialect repairs no upstream bug, so there is no fix that a job could leave out.
        *unknown_fixes(job, known=()),
        *repeat_problems(job),
        *loader_problems(job, ("converge",)),
        *_apply(tables, flatten(job.train_config.settings)),
    ]
    chunks = tables.transformer.virtual_pipeline_model_parallel_size
    implied = {**_implied(job, degrees, chunks), "training.steps": job.steps}
    for key, value in implied.items():
        table, _, name = key.partition(".")
        setattr(getattr(tables, table), name, value)
    problems += _apply(tables, job.overrides.items())
    problems += _name_function(tables)
    _refuse(problems)
    microbatches = _microbatches(tables.training, degrees)
    _refuse([*_sizes_problems(tables, job, degrees, microbatches), *_value_problems(tables, job)])
    if job.data_folder is None:
        raise SettingError(KeyProblem("converge.data", "is missing, so there is nothing to read"))
    sharded = tables.ddp.use_megatron_fsdp
    strategy = tables.ddp.data_parallel_sharding_strategy
    overlapped = dict.fromkeys(_STRATEGIES[strategy] if sharded else (), True)
    declared = {**implied, **job.overrides, **overlapped}
    flat = {
        key: value
        for key, value in {**flat_config(tables), **overlapped}.items()
        if key in declared or not key.startswith(_UNREAD)
    }
    _validate(tables)
    return MegatronConfig(tables, flat, tuple(declared), degrees, microbatches, job.data_folder)


def _implied(job: RankJob, degrees: Degrees, chunks: int | None) -> dict[str, Any]:
    """The settings that converge decides for every job."""
    dtype = torch.float32 if job.makes_seed_checkpoint else _dtype(job)
    low = dtype is torch.bfloat16
    interleaved = job.pipeline_schedule == INTERLEAVED and degrees.pp > 1
    return {
        "transformer.expert_model_parallel_size": degrees.ep,
        "transformer.tensor_model_parallel_size": degrees.tp,
        "transformer.pipeline_model_parallel_size": degrees.pp,
        _CHUNKS_KEY: (chunks or CHUNKS) if interleaved else None,
        # Its default names Transformer Engine, whatever layers a model is built of.
        "transformer.transformer_impl": "local",
        "transformer.pipeline_dtype": dtype,
        "transformer.params_dtype": dtype,
        "transformer.bf16": low,
        # Draws whole tensors: initial weights do not depend on the tensor-parallel degree.
        "transformer.use_cpu_initialization": True,
        "optimizer.params_dtype": dtype,
        "optimizer.bf16": low,
        "optimizer.use_distributed_optimizer": degrees.dp_shard > 1,
        "ddp.use_distributed_optimizer": degrees.dp_shard > 1,
        "ddp.num_distributed_optimizer_instances": (
            degrees.dp_replicate if degrees.dp_shard > 1 else 1
        ),
        **dict.fromkeys(DATA_TYPE_KEYS, _plain(dtype)),
        **(_OF_ONE_RANK if job.makes_seed_checkpoint else {}),
    }


_OF_ONE_RANK = {
    "transformer.sequence_parallel": False,
    "transformer.expert_tensor_parallel_size": None,
    "ddp.use_megatron_fsdp": False,
    "ddp.data_parallel_sharding_strategy": NO_SHARD,
}
_OWN_TYPE = "megatron_fsdp_main_grads_dtype"
"""What Megatron-FSDP has since 0.17, and reads instead of ``grad_reduce_in_fp32``."""
_BUFFERS = re.compile(r"ddp\.megatron_fsdp_\w+_dtype\Z")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _dtype(job: RankJob) -> torch.dtype:
    """Raises SettingError for a type that converge does not train, and for two types."""
    if "bf16" in job.techniques:
        return torch.bfloat16
    said = {**dict(flatten(job.train_config.settings)), **job.overrides}
    pairs = [(key, said[key]) for key in DATA_TYPE_KEYS if key in said]
    for key, name in pairs:
        if not isinstance(name, str) or name not in _DTYPES:
            raise SettingError(KeyProblem(key, f"{name!r} is not trained", tuple(_DTYPES)))
    named = [name for _, name in pairs] or ["float32"]
    if len(set(named)) > 1:
        message = (
            f"{named[1]!r}, and parameters are {named[0]}: Megatron-Core computes in their type"
        )
        raise SettingError(KeyProblem(DATA_TYPE_KEYS[1], message))
    return _DTYPES[named[0]]


Config = TypeVar("Config")


def _unchecked(kind: type[Config]) -> Config:
    """An instance with the class's defaults, of which it may refuse some: ``__post_init__`` waits.

    (A TransformerConfig without layers and heads cannot be made.)
    """
    made = kind.__new__(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.default_factory is not MISSING:
            value = field.default_factory()
        else:
            value = None if field.default is MISSING else field.default
        setattr(made, field.name, value)
    return made


def _apply(tables: MegatronTables, settings: Iterable[tuple[str, Any]]) -> Iterator[KeyProblem]:
    for key, value in settings:
        try:
            _set(tables, key, value)
        except SettingError as error:
            yield from error.problems


def _set(tables: MegatronTables, key: str, value: Any) -> None:
    """Files name the types of Megatron-FSDP's buffers; no other types are taken."""
    if not _BUFFERS.match(key) or str(value) not in _DTYPES:
        apply_setting(tables, key, value)
        return
    value_of(tables, key)
    setattr(tables.ddp, key.removeprefix("ddp."), _DTYPES[value])


def _name_function(tables: MegatronTables) -> Iterator[KeyProblem]:
    for name in _FUNCTIONS:
        if isinstance(getattr(tables.transformer, name), str | int | float):
            yield KeyProblem(f"transformer.{name}", "is a function, which a file cannot name")
    named = tables.transformer.activation_func
    if callable(named):
        return
    if isinstance(named, str) and named in _ACTIVATIONS:
        tables.transformer.activation_func = _ACTIVATIONS[named]
    else:
        yield KeyProblem(_ACTIVATION, f"no function {named!r}", tuple(map(repr, _ACTIVATIONS)))


def _microbatches(sizes: TrainingSizes, degrees: Degrees) -> int:
    dp = degrees.dp_replicate * degrees.dp_shard
    if sizes.global_batch_size < 0:
        sizes.global_batch_size = sizes.local_batch_size * dp
    return sizes.global_batch_size // (sizes.local_batch_size * dp)


def _sizes_problems(
    tables: MegatronTables, job: RankJob, degrees: Degrees, microbatches: int
) -> Iterator[KeyProblem]:
    """Divisions that Megatron-Core checks while it builds a model, in some rank, or not at all."""
    transformer, gpt = tables.transformer, tables.gpt
    chunks = transformer.virtual_pipeline_model_parallel_size or 1
    divisions = (
        ("gpt.vocab_size", gpt.vocab_size, "tp", degrees.tp),
        ("transformer.num_layers", transformer.num_layers, "pp x chunks", degrees.pp * chunks),
        *(
            (("training.seq_len", tables.training.seq_len, "tp", degrees.tp),)
            if transformer.sequence_parallel
            else ()
        ),
    )
    for key, size, name, divisor in divisions:
        if size < 1:
            yield KeyProblem(key, f"{size} is too few: at least 1")
        elif size % divisor:
            yield KeyProblem(key, f"{size} is not a multiple of {name} {divisor}")
    yield from _expert_problems(transformer, degrees)
    yield from _sharding_problems(tables, degrees, job.device)
    if job.makes_seed_checkpoint or degrees.pp == 1:
        return
    if job.pipeline_schedule not in SCHEDULES:
        message = f"Megatron-Core has no schedule {job.pipeline_schedule!r}"
        yield KeyProblem("pipeline_schedule", message, SCHEDULES)
    if chunks > 1 and microbatches % degrees.pp:
        message = f"{microbatches} microbatches are not a multiple of pp {degrees.pp}, as "
        yield KeyProblem("training.local_batch_size", f"{message}{INTERLEAVED} needs")


def _expert_problems(transformer: TransformerConfig, degrees: Degrees) -> Iterator[KeyProblem]:
    """What a model with experts needs of its layout, and a layout with experts of its model."""
    experts = transformer.num_moe_experts
    if experts is None:
        if degrees.ep > 1:
            message = f"{degrees.ep} needs a model with experts: set transformer.num_moe_experts"
            yield KeyProblem("parallelism.ep", message)
        return
    if experts % degrees.ep:
        message = f"{experts} is not a multiple of ep {degrees.ep}"
        yield KeyProblem("transformer.num_moe_experts", message)
    parts = transformer.expert_tensor_parallel_size or degrees.tp
    ranks = degrees.dp_replicate * degrees.dp_shard * degrees.tp
    if ranks % (degrees.ep * parts):
        message = (
            f"{degrees.ep}, times {parts} ranks for the tensors of an expert, does not divide the "
            f"{ranks} ranks of a pipeline stage"
        )
        yield KeyProblem("parallelism.ep", message)
    if degrees.tp > 1 and not transformer.sequence_parallel:
        message = "is needed by experts under tensor parallelism: set it to true"
        yield KeyProblem("transformer.sequence_parallel", message)
    for key, known in (
        ("moe_token_dispatcher_type", _DISPATCHERS),
        ("moe_router_load_balancing_type", _BALANCINGS),
    ):
        value = getattr(transformer, key)
        if value not in known:
            why = "needs DeepEP, which no toolchain has" if value == "flex" else "is not tested"
            yield KeyProblem(f"transformer.{key}", f"{value!r} {why}", tuple(map(repr, known)))


def _sharding_problems(
    tables: MegatronTables, degrees: Degrees, device: str
) -> Iterator[KeyProblem]:
    """What Megatron-FSDP needs of a layout, and of its own settings."""
    ddp = tables.ddp
    key, strategy = "ddp.data_parallel_sharding_strategy", ddp.data_parallel_sharding_strategy
    if not ddp.use_megatron_fsdp:
        if strategy != NO_SHARD:
            message = f"{strategy!r} is of Megatron-FSDP: set ddp.use_megatron_fsdp, too"
            yield KeyProblem(key, message)
        return
    switch = "ddp.use_megatron_fsdp"
    if degrees.dp_shard == 1:
        yield KeyProblem(switch, "needs ranks to shard over: set parallelism.dp_shard")
    if degrees.pp > 1:
        message = f"has no mesh with {degrees.pp} pipeline stages: set parallelism.pp to 1"
        yield KeyProblem(switch, message)
    if not importlib.util.find_spec("einops"):
        message = "needs einops, which this toolchain was built without: build it again"
        yield KeyProblem(switch, message)
    if strategy not in _STRATEGIES:
        message = f"{strategy!r} is not one of Megatron-FSDP's that shard something"
        yield KeyProblem(key, message, tuple(map(repr, _STRATEGIES)))
    low = tables.transformer.params_dtype is not torch.float32
    own = getattr(ddp, _OWN_TYPE, torch.float32)
    if low and ddp.grad_reduce_in_fp32 and own is not torch.float32:
        message = f'is ignored by Megatron-FSDP: set ddp.{_OWN_TYPE} = "float32", or this to false'
        yield KeyProblem("ddp.grad_reduce_in_fp32", message)
    divides = ddp.gradient_reduce_div_fusion and not tables.transformer.calculate_per_token_loss
    if divides and device == "cpu":
        message = "needs NCCL, which divides while it reduces: set it to false"
        yield KeyProblem("ddp.gradient_reduce_div_fusion", message)


def _value_problems(tables: MegatronTables, job: RankJob) -> Iterator[KeyProblem]:
    """Values that Megatron-Core takes, and that cannot be compared or run here."""
    for key in _DROPOUT:
        rate = _value(tables, key)
        if rate:
            yield KeyProblem(
                key,
                f"{rate} draws other random numbers in every layout, so no two can be compared: "
                "set it to 0.0",
            )
    for key in filter(partial(_value, tables), _NOT_READ):
        message = "is not supported by converge's rank code for Megatron-Core: leave it out"
        yield KeyProblem(key, message)
    if job.device == "cpu":
        for key in filter(partial(_value, tables), _NEED_A_GPU):
            yield KeyProblem(key, "needs a GPU, and this machine trains on its CPU: leave it out")
    in_parts = tables.transformer.sequence_parallel
    if job.device != "cpu" and in_parts and not _has_marked_norms(tables):
        message = (
            "needs norms that mark their weights: on a GPU Megatron-Core has only LayerNorm of "
            "Apex for it (on a CPU converge stands in: hide the GPUs, with CUDA_VISIBLE_DEVICES=)"
        )
        yield KeyProblem("transformer.sequence_parallel", message)
    if job.weights is not None and tables.transformer.qk_layernorm:
        message = "has weights in the order of a head's rows, which weights does not map"
        yield KeyProblem("transformer.qk_layernorm", message)
    if job.weights is not None and tables.transformer.num_moe_experts is not None:
        message = "has experts, which weights does not map yet: train without them"
        yield KeyProblem("transformer.num_moe_experts", message)
    kind = tables.optimizer.optimizer
    if kind != "adam":
        yield KeyProblem("optimizer.optimizer", f"{kind!r} is not tested", ("'adam'",))


def _has_marked_norms(tables: MegatronTables) -> bool:
    """Whether Megatron-Core's local layers have norms that it takes under sequence parallelism."""
    is_layer_norm = tables.transformer.normalization == "LayerNorm"
    return is_layer_norm and importlib.util.find_spec("apex") is not None


def _value(tables: MegatronTables, key: str) -> Any:
    table, _, name = key.partition(".")
    return getattr(getattr(tables, table), name, None)


def _validate(tables: MegatronTables) -> None:
    """Run the checks that the classes make of themselves, which also fill in what they derive."""
    for table in (tables.transformer, tables.ddp, tables.optimizer):
        try:
            getattr(table, "__post_init__", lambda: None)()
        except (ValueError, AssertionError, NotImplementedError, ZeroDivisionError) as error:
            name = type(table).__name__
            problem = KeyProblem("", f"Megatron-Core's {name} refuses the config: {error}")
            raise SettingError(problem) from error


def _refuse(problems: Iterable[KeyProblem]) -> None:
    found = tuple(problems)
    if found:
        raise SettingError(*found)


def flat_config(tables: MegatronTables) -> dict[str, Any]:
    """The config by dotted keys, as JSON values."""
    flat: dict[str, Any] = {}
    for table in fields(tables):
        values = getattr(tables, table.name)
        flat |= {
            f"{table.name}.{each.name}": _plain(getattr(values, each.name))
            for each in fields(values)
            if not each.name.startswith("_")
        }
    return flat


def _plain(value: Any) -> Any:
    """As a JSON value: types and functions by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return getattr(value, "__name__", type(value).__name__)
