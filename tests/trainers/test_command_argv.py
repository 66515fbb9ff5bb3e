"""Any program under every launcher: argv and ``job.json`` against golden files, environment."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.model import (
    Fault,
    FaultKind,
    Job,
    Parallelism,
    Precision,
    Recovery,
    RestartOwner,
    Role,
    Segment,
    SetSpec,
    SyntheticData,
    Toolchain,
    TrainConfig,
)
from converge_harness.rank.start import loopback
from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.run_folder.job import read_job
from converge_harness.trainers import (
    Call,
    Rendezvous,
    Resources,
    agent_argv,
    argv,
    curves_of,
    environment,
    first_call,
    is_complete,
    job_payload,
    needs_port,
    printable_command,
    trainer_of,
    work_folder,
)
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command, RankLauncher
from converge_harness.trainers.command.trainer import AGENT_MODULE
from converge_harness.trainers.torchtitan import TORCHTITAN

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/store/runs/zero2-0123456789ab")
DATA = Path("/store/data/d1")
TOOLCHAIN = Toolchain("mine", Path("/env s/mine/bin/python"), "command", {"torch": "2.13.0"})
COMMAND = Command(
    argv=(
        "train.py",
        *("--stage", "{config.zero.stage}", "--betas={config.betas}", "--fast={config.fast}"),
        *("--degrees", "{dp}", "{dp_replicate}", "{dp_shard}", "{tp}", "{cp}", "{pp}", "{ep}"),
        *("--ranks={ranks}", "--steps={steps}", "--seed={seed}", "--length={seq_len}"),
        *("--batch", "{local_batch_size}", "{global_batch_size}", "{gradient_accumulation_steps}"),
        *("--data", "{data}", "--output={output}/x", "--name", "{name}", '{{"a": {steps}}}'),
    ),
    folder=Path("/home/me/my project"),
    environment={"MY_FLAG": "{config.fast}", "PYTHON_OF": "{python}"},
    sources=(Path("/home/me/my project/train.py"),),
)
CURVES = replace(
    COMMAND, probed=False, curves="{output}/{seed}/loss.csv", columns={"loss": "train/loss"}
)
MEETING = Rendezvous(port=41234)


def job(command=COMMAND, **changes):
    spec = SetSpec(
        "zero2",
        Parallelism(dp_shard=2),
        TrainConfig(
            path="[trainer.config]",
            settings={"zero": {"stage": 0}, "betas": [0.9, 0.95], "fast": False},
            data=SyntheticData(),
        ),
        "mine",
        overrides={"zero.stage": 2, "fast": True},
        control="ddp2",
        trainer=trained_by(command),
    )
    values = {
        "name": "zero2",
        "role": Role.TEST,
        "spec": spec,
        "toolchain": TOOLCHAIN,
        "seed": 42,
        "steps": 20,
        "local_batch_size": 2,
        "global_batch_size": 8,
        "seq_len": 128,
        "precision": Precision.FP32,
        "identity": "0123456789abcdef" * 4,
    }
    return Job(**{**values, **changes})


def under(launcher, **changes):
    return job(replace(COMMAND, launcher=launcher), **changes)


@pytest.mark.parametrize("launcher", sorted({*RankLauncher} - {RankLauncher.SRUN}))
def test_argv_is_the_golden_one_of_its_launcher(launcher):
    made = argv(under(launcher), FOLDER, meeting=MEETING, data=DATA)
    assert list(made) == (GOLDEN / f"command.{launcher}.argv.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], ()), (["--fused"], ("--fused",)), (["--window", 4, "a b"], ("--window", "4", "a b"))],
)
def test_a_list_of_the_train_config_is_as_many_arguments(flags, expected):
    command = replace(COMMAND, argv=("train.py", "{*config.flags}", "--last"))
    made = job(command)
    made = replace(made, spec=replace(made.spec, overrides={"flags": flags}))
    assert argv(made, FOLDER)[-len(expected) - 2 :] == ("train.py", *expected, "--last")
    payload = job_payload(made, FOLDER, data=DATA, seed_checkpoint=None, device="cpu")
    assert payload["command"]["argv"] == ["train.py", *expected, "--last"]


def test_only_slurm_starts_ranks_by_srun():
    with pytest.raises(ValueError, match="under Slurm only"):
        argv(under(RankLauncher.SRUN), FOLDER, meeting=MEETING, data=DATA)


@pytest.mark.parametrize(("name", "command"), [("probed", COMMAND), ("curves", CURVES)])
def test_job_json_is_the_golden_one(name, command):
    made = job_payload(job(command), FOLDER, data=DATA, seed_checkpoint=None, device="cpu")
    assert made == json.loads((GOLDEN / f"command.{name}.job.json").read_text())


def test_torchtitans_jobs_have_no_command():
    titan = replace(job(), spec=replace(job().spec, trainer=TORCHTITAN))
    made = job_payload(titan, FOLDER, data=DATA, seed_checkpoint=None, device="cpu")
    assert "command" not in made
    assert work_folder(titan, FOLDER) == FOLDER


def test_only_a_probed_program_is_started_by_an_agent_of_ours():
    probed = agent_argv(job(), FOLDER, logs=FOLDER / "logs", data=DATA)
    curves = agent_argv(job(CURVES), FOLDER, logs=FOLDER / "logs", data=DATA)
    assert probed[2] == AGENT_MODULE
    # torchrun, by a file: the environment need not have this package.
    assert curves[1] == str(Path(loopback.__file__))
    assert probed[3:] == curves[2:]
    typed = argv(job(CURVES), FOLDER, data=DATA)
    assert typed[1:3] == ("-m", "torch.distributed.run")
    assert curves[2:] == typed[3:]


def test_agents_of_a_call_meet_in_its_own_file_under_its_own_name():
    meeting = Rendezvous(endpoint="/private/abc", name="abc")
    made = agent_argv(job(), FOLDER, logs=FOLDER / "logs", meeting=meeting, data=DATA)
    assert "--rdzv-endpoint=/private/abc" in made
    assert "--rdzv-conf=store_type=file" in made
    assert "--rdzv-id=abc" in made


def test_deepspeed_is_told_the_gpus_of_the_job_by_their_ids():
    made = argv(under(RankLauncher.DEEPSPEED), FOLDER, devices=(2, 3))
    assert "--include=localhost:2,3" in made
    assert not any(each.startswith("--num_gpus") for each in made)


def test_a_port_is_chosen_where_no_launcher_does_it():
    with_port = {*RankLauncher} - {RankLauncher.TORCHRUN, RankLauncher.COMPOSER}
    assert {each for each in RankLauncher if needs_port(under(each))} == with_port


def test_environment_has_the_job_and_the_variables_of_the_file():
    base = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "9", "HF_HUB_OFFLINE": "0"}
    made = environment(base, Resources(), FOLDER, job(), data=DATA)
    assert made["CONVERGE_JOB"] == f"{FOLDER}/job.json"
    assert made["MY_FLAG"] == "true"
    assert made["PYTHON_OF"] == str(TOOLCHAIN.python)
    assert made["PATH"] == f"{TOOLCHAIN.python.parent}:/usr/bin"
    assert made["OMP_NUM_THREADS"] == "1"
    assert made["HF_HUB_OFFLINE"] == "0"  # what it reads is the program's own business
    assert not {"MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE"} & set(made)


def test_the_files_own_variables_win_over_what_is_pinned():
    own = replace(COMMAND, environment={"OMP_NUM_THREADS": "4"})
    assert environment({}, Resources(), FOLDER, job(own))["OMP_NUM_THREADS"] == "4"


def test_the_probe_of_a_program_that_is_to_leave_curves_only_stays_off():
    assert "CONVERGE_JOB" not in environment(
        {"CONVERGE_JOB": "/x"}, Resources(), FOLDER, job(CURVES)
    )


@pytest.mark.parametrize("launcher", RankLauncher)
def test_no_launcher_around_the_harness_leaks_in(launcher):
    around = {
        "CONVERGE_JOB": "/another/job.json",
        "MASTER_ADDR": "elsewhere",
        "MASTER_PORT": "1",
        "RANK": "3",
        "NODE_RANK": "1",
        "LOCAL_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": "3",
        "PMI_RANK": "3",
    }
    made = environment(around, Resources(), FOLDER, under(launcher), meeting=MEETING)
    assert not {name for name in around if made.get(name) == around[name]}


@pytest.mark.parametrize("launcher", [RankLauncher.MPIRUN, RankLauncher.NONE])
def test_ranks_that_no_launcher_brings_together_are_told_where_to_meet(launcher):
    made = environment({}, Resources(), FOLDER, under(launcher), meeting=MEETING)
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("127.0.0.1", "41234")


@pytest.mark.parametrize("launcher", [each for each in RankLauncher if each != "torchrun"])
def test_every_python_of_a_program_without_our_agent_keeps_its_stores_to_loopback(launcher):
    folder = str(Path(loopback.__file__).parent / "on_loopback")
    around = {"PYTHONPATH": "/around"}
    made = environment(around, Resources(), FOLDER, under(launcher), meeting=MEETING)
    assert made["PYTHONPATH"] == f"{folder}:/around"
    own = replace(COMMAND, environment={"PYTHONPATH": "/own"}, launcher=launcher)
    assert environment(around, Resources(), FOLDER, job(own))["PYTHONPATH"] == f"{folder}:/own"
    none = environment({}, Resources(), FOLDER, under(launcher), meeting=MEETING)
    assert none["PYTHONPATH"] == folder
    of_nodes = environment(around, Resources(loopback=None), FOLDER, under(launcher))
    assert of_nodes["PYTHONPATH"] == "/around"


def test_deepspeeds_launcher_counts_the_ranks_on_a_cpu():
    made = environment({}, Resources(), FOLDER, under(RankLauncher.DEEPSPEED))
    assert (made["LOCAL_SIZE"], made["DS_ACCELERATOR"]) == ("2", "cpu")
    on_gpus = environment({}, Resources("cuda", (0, 1)), FOLDER, under(RankLauncher.DEEPSPEED))
    assert "DS_ACCELERATOR" not in on_gpus


def test_printed_command_is_one_line_that_a_shell_reads_back():
    printed = printable_command(job(), FOLDER, data=DATA)
    folder, call = printed.split(" && ")
    assert folder == "cd '/home/me/my project'"
    words = shlex.split(call)
    assert words[:2] == ["env", f"CONVERGE_JOB={FOLDER}/job.json"]
    assert tuple(words[4:]) == argv(job(), FOLDER, data=DATA)
    bare = job(replace(CURVES, environment={}))
    _, call = printable_command(bare, FOLDER, data=DATA).split(" && ")
    assert tuple(shlex.split(call)) == argv(bare, FOLDER, data=DATA)


def test_a_run_that_left_no_curve_is_not_complete(tmp_path):
    assert not is_complete(job(CURVES), tmp_path)
    curve = curves_of(job(CURVES), tmp_path)
    assert curve == tmp_path / "output" / "42" / "loss.csv"
    curve.parent.mkdir(parents=True)
    curve.touch()
    assert is_complete(job(CURVES), tmp_path)


def test_every_start_of_a_program_has_an_output_and_a_curve_of_its_own(tmp_path):
    parts = (Segment(8, Parallelism(), 2), Segment(20, Parallelism(), 2))
    resized = job(CURVES)
    resized = replace(resized, spec=replace(resized.spec, segments=parts))
    second = curves_of(resized, tmp_path, Call(number=2, segment=1))
    assert curves_of(resized, tmp_path) == tmp_path / "output/start-01/42/loss.csv"
    assert second == tmp_path / "output/start-02/42/loss.csv"
    called = argv(resized, tmp_path, call=Call(number=2, segment=1), data=DATA)
    assert f"--output={tmp_path}/output/start-02/x" in called


def test_a_probed_run_is_complete_with_the_probes_own_file(tmp_path):
    assert not is_complete(job(), tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert is_complete(job(), tmp_path)


# ------------------------------------------------------------------ runs in several passes

RESUMED = Command(
    argv=(
        *("train.py", "--dir={checkpoint_dir}", "--every={checkpoint_every}"),
        *("--from={resume_from}", "--stop={stop_at}", "--batch={local_batch_size}"),
        *(
            "--accumulate={gradient_accumulation_steps}",
            "--also={config.training.local_batch_size}",
        ),
    ),
    folder=Path("/home/me"),
    environment={"STOP": "{stop_at}"},
    checkpoints=CheckpointForm("step-{step}.pt", None),
)
SEGMENTS = (Segment(8, Parallelism(dp_shard=2), 2), Segment(20, Parallelism(), 4))
KILLED = Recovery((Fault(FaultKind.KILL, 6),), checkpoint_every=4, max_restarts=2)


def resumed(**kind):
    spec = job(RESUMED).spec
    settings = {"training": {"local_batch_size": 2}}
    config = replace(spec.train_config, settings=settings)
    return job(spec=replace(spec, train_config=config, overrides={}, **kind))


def options_of(made):
    return dict(each.removeprefix("--").split("=", 1) for each in made if each.startswith("--"))


def test_a_segment_is_called_with_its_own_ranks_sizes_and_end():
    elastic = resumed(segments=SEGMENTS)
    first = options_of(argv(elastic, FOLDER))
    last = options_of(argv(elastic, FOLDER, call=Call(2, segment=1, resumes_from=8)))
    asked = ("nproc-per-node", "every", "from", "stop", "batch", "accumulate", "also")
    folder = f"{FOLDER}/checkpoint"
    assert first["dir"] == last["dir"] == folder
    assert [first[each] for each in asked] == ["2", "20", "", "8", "2", "2", "2"]
    assert [last[each] for each in asked] == ["1", "20", f"{folder}/step-8.pt", "20", "4", "2", "4"]


def test_other_launchers_are_told_the_ranks_of_a_segment_too():
    elastic = resumed(segments=SEGMENTS)
    last = Call(2, segment=1, resumes_from=8)
    for launcher, word in (
        (RankLauncher.COMPOSER, "--nproc=1"),
        (RankLauncher.DEEPSPEED, "--include=localhost:2"),  # of the GPUs 2 and 3 of the job
        (RankLauncher.MPIRUN, "1"),
    ):
        by = replace(elastic.spec.trainer.settings, launcher=launcher)
        made = replace(elastic, spec=replace(elastic.spec, trainer=trained_by(by)))
        words = argv(made, FOLDER, call=last, devices=(2, 3))
        assert word in words, words
        assert options_of(words)["from"] == f"{FOLDER}/checkpoint/step-8.pt"
        if launcher is RankLauncher.DEEPSPEED:
            for call, ranks in ((None, "2"), (last, "1")):
                variables = environment({}, Resources(), FOLDER, made, call=call)
                assert variables["LOCAL_SIZE"] == ranks


def test_the_environment_says_which_segment_a_call_trains():
    elastic = resumed(segments=SEGMENTS)
    for call, index, until in ((None, "0", "8"), (Call(2, segment=1), "1", "20")):
        made = environment({"CONVERGE_SEGMENT": "7"}, Resources(), FOLDER, elastic, call=call)
        assert (made["CONVERGE_SEGMENT"], made["STOP"]) == (index, until)
    assert "CONVERGE_SEGMENT" not in environment({}, Resources(), FOLDER, job(RESUMED))


def test_a_broken_run_is_called_again_from_its_newest_checkpoint():
    broken = resumed(recovery=KILLED)
    first = options_of(argv(broken, FOLDER))
    again = options_of(argv(broken, FOLDER, call=Call(2, resumes_from=4)))
    assert (first["every"], first["from"], first["stop"]) == ("4", "", "20")
    assert again["from"] == f"{FOLDER}/checkpoint/step-4.pt"
    assert first["max-restarts"] == "0"
    in_place = resumed(recovery=replace(KILLED, restarts=RestartOwner.TORCHRUN))
    made = argv(in_place, FOLDER, call=first_call(in_place))
    assert options_of(made)["max-restarts"] == "2"


def test_every_node_of_a_broken_run_starts_its_part_of_the_ranks():
    nodes = resumed(
        parallelism=Parallelism(dp_replicate=4),
        recovery=replace(
            KILLED, faults=(Fault(FaultKind.AGENT_LOSS, 6),), checkpoint_every=4, nodes=(1, 2)
        ),
    )
    made = options_of(argv(nodes, FOLDER, meeting=Rendezvous(1, 2, "/private/abc", "abc")))
    assert (made["nnodes"], made["nproc-per-node"]) == ("1:2", "2")
    assert made["rdzv-endpoint"] == "/private/abc"
    printed = printable_command(nodes, FOLDER)
    assert "--nnodes=1:2 --nproc-per-node=2 --rdzv-backend=c10d" in printed
    assert "--rdzv-endpoint=HEAD_NODE:29500" in printed


def test_ranks_that_make_their_own_store_under_torchrun_keep_it_to_loopback():
    """torchrun's agent makes it otherwise, but not where it may restart its ranks."""
    folder = str(Path(loopback.__file__).parent / "on_loopback")
    made = environment({}, Resources(), FOLDER, resumed(recovery=KILLED))
    assert made["PYTHONPATH"] == folder
    assert "PYTHONPATH" not in environment({}, Resources(), FOLDER, resumed(segments=SEGMENTS))


def test_segments_are_printed_one_after_another():
    _, first, last = printable_command(resumed(segments=SEGMENTS), FOLDER).split(" && ")
    assert "CONVERGE_SEGMENT=0 STOP=8" in first
    assert "CONVERGE_SEGMENT=1 STOP=20" in last
    assert f"--from={FOLDER}/checkpoint/step-8.pt" in last


def test_ranks_learn_from_the_job_what_checkpoints_look_like(tmp_path):
    made = job_payload(
        resumed(segments=SEGMENTS), tmp_path, data=None, seed_checkpoint=None, device="cpu"
    )
    (tmp_path / "job.json").write_text(json.dumps({"schema": 1, **made}))
    assert read_job(tmp_path / "job.json", 1).checkpoints == RESUMED.checkpoints
    ordinary = job_payload(job(RESUMED), FOLDER, data=None, seed_checkpoint=None, device="cpu")
    assert "checkpoints" not in ordinary["command"]
    spec = trainer_of(resumed(segments=SEGMENTS).spec).spec_of(made)
    assert spec.settings.checkpoints == RESUMED.checkpoints
