import json
from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.model import (
    Fault,
    FaultKind,
    Job,
    Kind,
    Parallelism,
    Precision,
    Recovery,
    Repeat,
    RepeatKind,
    RestartOwner,
    Role,
    Segment,
    SetSpec,
    SyntheticData,
    Technique,
    Toolchain,
    TrainConfig,
)
from converge_harness.run_folder.layout import metrics_files, seed_checkpoint_of
from converge_harness.trainers import (
    Resources,
    argv,
    environment,
    is_complete,
    job_payload,
    pipeline_stages,
    printable_command,
    trainer_of,
    trainer_of_kind,
)
from converge_harness.trainers.torchtitan import TORCHTITAN

GOLDEN = Path(__file__).parent / "golden"
TOOLCHAIN = Toolchain(
    "torchtitan-0.3.0", Path("/tool chains/t03/bin/python"), "titan_0_3", {"torch": "2.13.0"}
)
FOLDER = Path("/store/runs/fsdp2_tp2-0123456789ab")


def spec(**changes):
    values = {
        "name": "fsdp2_tp2",
        "parallelism": Parallelism(dp_shard=2, tp=2),
        "train_config": TrainConfig(
            path="train_configs/llama3_debug.toml",
            settings={"training": {"seq_len": 256}},
            module="llama3",
            config="llama3_debugmodel",
            model={"dim": 64},
            data=SyntheticData(),
        ),
        "toolchain": TOOLCHAIN.name,
        "techniques": (Technique.COMPILE,),
        "overrides": {"training.local_batch_size": 2},
        "inject": "/bugs/scale.py:break_it",
        "control": "fsdp2",
        "trainer": TORCHTITAN,
    }
    return SetSpec(**{**values, **changes})


def job(**changes):
    values = {
        "name": "fsdp2_tp2",
        "role": Role.TEST,
        "spec": spec(),
        "toolchain": TOOLCHAIN,
        "seed": 42,
        "steps": 20,
        "local_batch_size": 2,
        "global_batch_size": 4,
        "seq_len": 256,
        "precision": Precision.FP32,
        "identity": "0123456789abcdef" * 4,
        "needs": "f" * 64,
    }
    return Job(**{**values, **changes})


JOBS = {
    "fsdp2_tp2": job(),
    "seed": job(name="seed", role=Role.SEED, needs=None),
    "fsdp2.ulp.2": job(
        name="fsdp2.ulp.2",
        role=Role.REPEAT,
        repeat=Repeat(RepeatKind.ULP, 2),
        sample_steps=(0, 1, 2),
    ),
    "fsdp8_tp2_pp2": job(
        name="fsdp8_tp2_pp2",
        spec=spec(parallelism=Parallelism(dp_shard=8, tp=2, pp=2), pipeline_schedule="1F1B"),
    ),
    "elastic": job(
        name="elastic",
        spec=spec(
            kind=Kind.ELASTIC,
            parallelism=Parallelism(dp_shard=2),
            segments=(
                Segment(10, Parallelism(dp_shard=2), 2),
                Segment(20, Parallelism(pp=2), 4, "1F1B"),
            ),
        ),
    ),
    "fault": job(
        name="fault",
        spec=spec(
            kind=Kind.FAULT,
            parallelism=Parallelism(dp_shard=2),
            recovery=Recovery(
                (Fault(FaultKind.KILL, 6, rank=1), Fault(FaultKind.CKPT_TORN, 8)),
                checkpoint_every=4,
                restarts=RestartOwner.TORCHRUN,
                nodes=(1, 2),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_argv_is_the_golden_one(name):
    expected = (GOLDEN / f"{name}.argv.txt").read_text().splitlines()
    assert list(argv(JOBS[name], FOLDER)) == expected


@pytest.mark.parametrize("name", JOBS)
def test_job_json_is_the_golden_one(name):
    needed = None if JOBS[name].needs is None else Path("/store/runs/seed/checkpoint/step-0")
    payload = job_payload(
        JOBS[name], FOLDER, data=Path("/store/data/d1"), seed_checkpoint=needed, device="cpu"
    )
    assert payload == json.loads((GOLDEN / f"{name}.job.json").read_text())


def test_job_without_data_or_seed_checkpoint():
    payload = job_payload(job(), FOLDER, data=None, seed_checkpoint=None, device="cuda")
    assert (payload["data"], payload["seed_checkpoint"], payload["device"]) == (None, None, "cuda")


def test_relative_store_becomes_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert argv(job(), Path("runs/x"))[-1] == f"{tmp_path}/runs/x/job.json"


def test_printed_command_is_one_line_that_a_shell_reads_back():
    import shlex

    printed = printable_command(job(), FOLDER)
    assert "\n" not in printed
    assert printed.startswith("'/tool chains/t03/bin/python' -m torch.distributed.run ")
    assert tuple(shlex.split(printed)) == argv(job(), FOLDER)


def test_a_run_in_segments_is_printed_as_all_its_calls():
    first, second = printable_command(JOBS["elastic"], FOLDER).split(" && ")
    assert "--nproc-per-node=2 " in first
    assert first.endswith("job.json --segment 0")
    assert second.endswith("job.json --segment 1")


def test_only_runs_that_torchrun_may_restart_keep_the_store_to_its_agents():
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert environment({}, Resources(), FOLDER, JOBS["fault"])[variable] == "1"
    assert variable not in environment({}, Resources(), FOLDER, JOBS["elastic"])


def test_seed_checkpoint_of_a_run_in_segments_has_none():
    seed = replace(JOBS["elastic"], role=Role.SEED)
    payload = job_payload(seed, FOLDER, data=None, seed_checkpoint=None, device="cpu")
    assert payload["segments"] == []
    assert "--segment" not in argv(seed, FOLDER)


def test_environment_pins_what_shapes_numbers():
    made = environment({"OMP_NUM_THREADS": "64", "HOME": "/home/me"}, Resources(), FOLDER)
    assert made["OMP_NUM_THREADS"] == "1"
    assert made["TORCHINDUCTOR_AUTOGRAD_CACHE"] == "0"
    assert made["TORCHINDUCTOR_CACHE_DIR"] == f"{FOLDER}/inductor"
    assert made["GLOO_SOCKET_IFNAME"] == "lo"
    assert made["HOME"] == "/home/me"


def test_folders_of_a_toolchain_come_first_on_the_path_and_in_printed_commands():
    own = replace(TOOLCHAIN, paths=(Path("/a base"), Path("/own")), code={"torchtitan/a.py": "00"})
    made = job(toolchain=own)
    assert environment({}, Resources(), FOLDER, made)["PYTHONPATH"] == "/a base:/own"
    kept = environment({"PYTHONPATH": "/mine"}, Resources(), FOLDER, made)
    assert kept["PYTHONPATH"] == "/a base:/own:/mine"
    assert printable_command(made, FOLDER).startswith("PYTHONPATH='/a base:/own' ")
    assert "PYTHONPATH" not in environment({}, Resources(), FOLDER, job())
    payload = job_payload(made, FOLDER, data=None, seed_checkpoint=None, device="cpu")
    assert payload["code"] == {"torchtitan/a.py": "00"}


def test_only_jobs_that_read_torchtitans_own_dataset_may_use_the_network():
    offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"}
    stock = job(spec=spec(train_config=replace(spec().train_config, data=None)))
    assert offline <= set(environment({}, Resources(), FOLDER, job()))
    assert offline <= set(environment({}, Resources()))
    assert not offline & set(environment({}, Resources(), FOLDER, stock))


def test_gpus_that_a_scheduler_hands_out_are_left_to_it():
    assert "CUDA_VISIBLE_DEVICES" not in environment({}, Resources("cuda", None), FOLDER)


def test_environment_drops_a_launcher_around_the_harness():
    around = {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "elsewhere",
        "TORCHELASTIC_RUN_ID": "7",
        "PYTHON_EXEC": "/somewhere/python",
        "PET_NNODES": "2",
        "OMPI_COMM_WORLD_RANK": "3",
        "CONVERGE_JOB": "/another/job.json",
    }
    assert not set(environment(around, Resources())) & set(around)


@pytest.mark.parametrize(("devices", "expected"), [((), ""), ((2, 3), "2,3")])
def test_a_job_sees_its_own_gpus_and_no_others(devices, expected):
    inherited = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    made = environment(inherited, Resources(devices=devices), FOLDER)
    assert made["CUDA_VISIBLE_DEVICES"] == expected
    assert ("CUDA_DEVICE_ORDER" in made) is bool(devices)


def test_ranks_that_share_gpus_take_little_memory_for_nccl_unless_told_otherwise():
    around = {"NCCL_MAX_NCHANNELS": "8", "CONVERGE_GPU_OF_RANK": "7"}
    made = environment(around, Resources("cuda", (0, 1, 0), shared=True), FOLDER)
    assert made["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert made["CONVERGE_GPU_OF_RANK"] == "0,1,0"
    assert (made["NCCL_MAX_NCHANNELS"], made["NCCL_NVLS_ENABLE"]) == ("8", "0")
    alone = environment(around, Resources("cuda", (0, 1)), FOLDER)
    assert not {"NCCL_NVLS_ENABLE", "CONVERGE_GPU_OF_RANK"} & set(alone)


def test_two_jobs_share_no_compile_cache():
    first = environment({}, Resources(), Path("/store/runs/a"))
    second = environment({}, Resources(), Path("/store/runs/b"))
    assert first["TORCHINDUCTOR_CACHE_DIR"] != second["TORCHINDUCTOR_CACHE_DIR"]


def test_training_is_complete_with_the_final_metrics_file(tmp_path):
    part, final = metrics_files(tmp_path)
    part.touch()
    assert not is_complete(job(), tmp_path)
    part.rename(final)
    assert is_complete(job(), tmp_path)


def test_run_in_passes_is_complete_when_the_newest_reached_the_last_step(tmp_path):
    def ended(number, steps):
        folder = tmp_path / "passes" / f"{number:03d}"
        folder.mkdir(parents=True)
        line = json.dumps({"kind": "end", "steps": steps})
        (folder / "metrics.jsonl").write_text(f'{{"kind": "header"}}\n{line}\n')

    assert not is_complete(JOBS["elastic"], tmp_path)
    ended(1, 10)
    assert not is_complete(JOBS["elastic"], tmp_path)
    ended(2, 20)
    assert is_complete(JOBS["elastic"], tmp_path)
    (tmp_path / "passes" / "003").mkdir()
    assert not is_complete(JOBS["elastic"], tmp_path)


def test_seed_job_is_complete_with_its_checkpoints_metadata(tmp_path):
    seed = replace(job(), role=Role.SEED)
    seed_checkpoint_of(tmp_path).mkdir(parents=True)
    assert not is_complete(seed, tmp_path)
    (seed_checkpoint_of(tmp_path) / ".metadata").touch()
    assert is_complete(seed, tmp_path)


@pytest.mark.parametrize(
    ("schedule", "keys", "stages"),
    [
        ("1F1B", {}, 2),
        ("Interleaved1F1B", {}, 4),
        # 6 layers and one for each end, 3 in a stage
        ("Interleaved1F1B", {"layers_per_stage": 3}, 3),
        ("Interleaved1F1B", {"layers_per_stage": 3, "first_stage_less_layers": 3}, 4),
    ],
)
def test_stages_are_counted_as_torchtitan_cuts_the_model(schedule, keys, stages):
    overrides = {f"parallelism.pipeline_parallel_{key}": value for key, value in keys.items()}
    cut = spec(
        parallelism=Parallelism(dp_shard=2, pp=2),
        pipeline_schedule=schedule,
        train_config=TrainConfig("x.toml", {}, model={"n_layers": 6}),
        overrides=overrides,
    )
    assert pipeline_stages(job(spec=cut)) == stages
    less = keys.get("first_stage_less_layers", 1)
    assert trainer_of(cut).layers_to_cut(job(spec=cut)) == 6 + less + 1
    # Another trainer, whatever the schedule is called: one on each rank.
    other = replace(cut, trainer=trainer_of_kind("command").default_spec())
    assert pipeline_stages(job(spec=other)) == 2
    assert trainer_of(other).layers_to_cut(job(spec=other)) is None
