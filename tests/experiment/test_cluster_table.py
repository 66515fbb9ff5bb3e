"""``launcher``, ``[cluster]`` and a user's own cluster file."""

from pathlib import Path

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import Cluster, Kubernetes, Launcher, Recovery, RestartOwner

HEAD = """
schema = 1
launcher = "slurm"
[trainer]
train_config = "base.toml"
tokens_per_gpu_second = 5800
[control]
parallelism.dp_shard = 2
[[test]]
name = "t"
parallelism = { dp_shard = 2, tp = 2 }
[cluster]
"""
EVERYTHING = """
ranks_per_node = 8
partition = "h100,h200"
account = "lab-a"
qos = "long"
time = "1-12:30:00"
gpus_per_node = true
gres = "gpu:h100:8"
cpus_per_rank = 12
memory_per_node = "900G"
constraint = "[rack1|rack2]&ib"
sbatch = ["--exclusive", "--mail-type=END", "--mem-per-cpu=4G", "--comment=two words"]
srun = ["--container-image=/images/titan.sqsh", "--mpi=none"]
container = ["apptainer", "exec", "--nv", "/my images/titan.sif"]
modules = ["gcc/12.3", "cuda@12.8"]
prologue = ["ulimit -n 65536", "export A=\\"$B\\" # tab:\\t"]
environment = { NCCL_SOCKET_IFNAME = "ib0", QUOTED = "it's $5" }
device = "cuda"
hardware = "H100"
max_jobs = 4
requeue = true
checkpoint_every = 5
poll_s = 2.5
"""


@pytest.fixture
def user_file(folder):
    """Write a user's own cluster file."""

    def write(text: str):
        path = folder / "mine.toml"
        path.write_text(text)
        return path

    return write


def with_user(folder, path, table: str = ""):
    (folder / "x.toml").write_text(HEAD + table)
    return load_experiment(folder / "x.toml", cluster=path)


def test_every_key_is_read(load):
    experiment = load(HEAD + EVERYTHING)
    assert experiment.launcher is Launcher.SLURM
    assert experiment.tokens_per_gpu_second == 5800
    assert experiment.cluster == Cluster(
        ranks_per_node=8,
        partition="h100,h200",
        account="lab-a",
        qos="long",
        time="1-12:30:00",
        gpus_per_node=True,
        gres="gpu:h100:8",
        cpus_per_rank=12,
        memory_per_node="900G",
        constraint="[rack1|rack2]&ib",
        sbatch=("--exclusive", "--mail-type=END", "--mem-per-cpu=4G", "--comment=two words"),
        srun=("--container-image=/images/titan.sqsh", "--mpi=none"),
        container=("apptainer", "exec", "--nv", "/my images/titan.sif"),
        modules=("gcc/12.3", "cuda@12.8"),
        prologue=("ulimit -n 65536", 'export A="$B" # tab:\t'),
        environment={"NCCL_SOCKET_IFNAME": "ib0", "QUOTED": "it's $5"},
        device="cuda",
        hardware="H100",
        max_jobs=4,
        requeue=True,
        checkpoint_every=5,
        poll_s=2.5,
    )


@pytest.mark.parametrize(
    ("table", "asked"),
    [("", True), ('gres = "gpu:8"', False), ('device = "cpu"', False), ("gpus_per_node = 0", None)],
)
def test_a_gpu_per_rank_is_asked_for_unless_the_table_says_otherwise(load, table, asked):
    text = HEAD + "ranks_per_node = 8\n" + table
    if asked is None:
        with pytest.raises(ConfigError, match="gpus_per_node: must be true or false, not 0"):
            load(text)
    else:
        assert load(text).cluster.gpus_per_node is asked


def test_keys_of_the_experiment_replace_those_of_the_user_one_by_one(folder, user_file):
    mine = user_file(
        'schema = 1\nranks_per_node = 8\npartition = "a"\nsbatch = ["--exclusive"]\n'
        'environment = { A = "1", B = "2" }\n'
    )
    table = 'partition = "b"\nenvironment = { A = "3" }\n'
    cluster = with_user(folder, mine, table).cluster
    assert (cluster.ranks_per_node, cluster.partition) == (8, "b")
    assert cluster.sbatch == ("--exclusive",)
    assert cluster.environment == {"A": "3"}


def test_a_whole_cluster_replaces_both(folder):
    whole = Cluster(ranks_per_node=3, hardware="then")
    assert with_user(folder, whole, "ranks_per_node = 8\n").cluster is whole


def test_a_local_run_looks_at_no_file_but_its_own(folder, user_file):
    mine = user_file("this is no toml")
    (folder / "x.toml").write_text(HEAD)
    local = load_experiment(folder / "x.toml", launcher=Launcher.LOCAL, cluster=mine)
    assert (local.launcher, local.cluster) == (Launcher.LOCAL, None)


def test_a_local_run_is_told_what_is_wrong_with_its_table_all_the_same(problems):
    text = HEAD.replace('"slurm"', '"local"') + "ranks_per_nodes = 8\n"
    assert problems(text)[0].startswith(
        ": cluster.ranks_per_nodes: unknown key (did you mean 'ranks_per_node'?"
    )


def test_slurm_without_ranks_per_node_is_shown_a_minimal_table(problems):
    (found,) = problems(HEAD)
    assert found.startswith(": cluster.ranks_per_node: is missing")
    assert "    [cluster]\n    ranks_per_node = 8" in found


def test_problems_of_both_files_come_at_once_each_with_its_place(folder, user_file):
    mine = user_file('schema = 2\npartitio = "a"\n[cluster]\ntime = "4h"\n')
    with pytest.raises(ConfigError) as caught:
        with_user(folder, mine, "max_jobs = 0\n")
    found = "\n".join(map(str, caught.value.problems))
    assert "x.toml: cluster.max_jobs: must be greater than or equal to 1, not 0" in found
    assert "mine.toml: schema: this converge reads schema 1 only" in found
    assert "mine.toml: partitio: unknown key (did you mean 'partition'?" in found
    assert "mine.toml: cluster: is not a table here (its keys belong at the top" in found


def test_a_user_file_that_is_not_there_is_named(folder):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: there is no such file"):
        with_user(folder, folder / "nowhere.toml", "ranks_per_node = 8\n")


@pytest.mark.parametrize(
    "line",
    [
        'time = "4h"',
        'time = "-1"',
        'time = "1#2"',
        'time = "\\u0669\\u0660"',
        "time = 90",
        'memory_per_node = "64GB"',
        'memory_per_node = "\\u0666G"',
        'partition = "a b"',
        'partition = "a\\n#SBATCH --uid=0"',
        'account = "a\'b"',
        'qos = "a#b"',
        'qos = ""',
        'gres = "gpu:8\\u2028"',
        'constraint = "a\\\\b"',
        "cpus_per_rank = 0",
        "ranks_per_node = true",
        'modules = ["-f"]',
        'modules = ["a; rm"]',
        'prologue = ["a\\nb"]',
        'prologue = "ulimit"',
        'container = ["--nv"]',
        'container = ["a\\u0000"]',
        'environment = { "A-B" = "1" }',
        'environment = { "A=B" = "1" }',
        'environment = { "A=1; rm" = "1" }',
        'srun = ["--a\\u0000"]',
        "environment = { A = 1 }",
        'environment = { A = "1\\n2" }',
        'environment = { MASTER_PORT = "1" }',
        'environment = { SLURM_NODEID = "1" }',
        'environment = { converge_run_folder = "1" }',
        'device = "gpu"',
        'hardware = "\\t"',
        "max_jobs = -1",
        "checkpoint_every = 0",
        "poll_s = 0",
        "poll_s = nan",
        'requeue = "yes"',
        'launcher = "slurm"',
    ],
)
def test_a_value_that_is_wrong_is_refused_with_its_key(problems, line):
    key = line.split(" ")[0]
    text = HEAD + (line if key == "ranks_per_node" else f"ranks_per_node = 8\n{line}") + "\n"
    (found,) = problems(text)
    assert found.startswith(f": cluster.{key}")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("-o x", "must be a long option"),
        ("exclusive", "must be a long option"),
        ("--output=x", "--output cannot be set here: the batch script of a job sets it"),
        ("--out=x", "--output cannot be set here"),
        ("--mem 4G", "--mem cannot be set here: use memory_per_node"),
        ("--nodes=2", "--nodes cannot be set here: a set's degrees and ranks_per_node decide it"),
        ("--ntasks-per-node=8", "--ntasks-per-node cannot be set here"),
        ("--no-requeue", "--no-requeue cannot be set here: use requeue"),
        ("--arr=1-3", "--array cannot be set here"),
        ("--array=1-3", "--array cannot be set here: every set is a separate job"),
        ("--depend=afterok:1", "--dependency cannot be set here"),
        ("--exclusive --time=1", "must be one option"),
        ("--exclusive -t 1", "must be one option"),
        ("--comment=a#b", "must not have a #"),
        ("--comment=a\\nb", "holds control characters"),
    ],
)
def test_an_option_of_sbatch_that_contradicts_the_script_is_refused(problems, option, words):
    (found,) = problems(HEAD + f'ranks_per_node = 8\nsbatch = ["--exclusive", "{option}"]\n')
    assert found.startswith(": cluster.sbatch[1]: ")
    assert words in found


@pytest.mark.parametrize("argument", ["--ntasks=4", "--kill-on=1", "bash", "--output=x", "-n4"])
def test_an_argument_of_srun_that_contradicts_the_script_is_refused(problems, argument):
    (found,) = problems(HEAD + f'ranks_per_node = 8\nsrun = ["{argument}"]\n')
    assert found.startswith(": cluster.srun[0]: ")


def test_checkpoints_for_requeues_are_those_of_every_set_without_its_own(load):
    experiment = load(
        HEAD.replace("[cluster]", ANCHOR + KINDS + "[cluster]")
        + "ranks_per_node = 8\ncheckpoint_every = 5\n"
    )
    requeued = Recovery(
        faults=(), checkpoint_every=5, restarts=RestartOwner.CLUSTER, max_restarts=0
    )
    specs = [experiment.controls[0], experiment.anchor, *experiment.tests]
    by_kind = {spec.name.partition("_")[0]: spec.recovery for spec in specs}
    assert by_kind.pop("resized") is None
    assert by_kind.pop("killed").restarts is RestartOwner.TORCHRUN
    assert by_kind == {"control": requeued, "anchor": requeued, "t": requeued, "st": requeued}


ANCHOR = """
[anchor]
parallelism.dp_shard = 1
"""
KINDS = """
[[test]]
kind = "elastic"
name = "resized"
segments = [{ until = 4, dp_shard = 2 }, { until = 20, dp_shard = 1 }]
[[test]]
kind = "fault"
name = "killed"
parallelism.dp_shard = 2
checkpoint_every = 4
restarts = "torchrun"
faults = [{ kind = "kill", step = 6 }]
[[test]]
kind = "space_time"
name = "st"
product = 2
"""


def test_without_requeue_nothing_is_resumed(load):
    table = "ranks_per_node = 8\ncheckpoint_every = 5\nrequeue = false\n"
    assert load(HEAD + table).tests[0].recovery is None


def test_checkpoints_after_the_last_step_are_refused_where_they_are_asked_for(folder, user_file):
    mine = user_file("schema = 1\nranks_per_node = 8\ncheckpoint_every = 21\n")
    with pytest.raises(ConfigError) as caught:
        with_user(folder, mine)
    assert "mine.toml: checkpoint_every: 21 comes after the last step of 'control'" in str(
        caught.value
    )
    assert with_user(folder, mine, "checkpoint_every = 20\n").tests[0].resumes


def test_settings_of_checkpoints_are_the_harness_s_then(problems):
    text = HEAD.replace("[cluster]", 'set = { "checkpoint.interval" = 3 }\n[cluster]')
    (found,) = problems(text + "ranks_per_node = 8\ncheckpoint_every = 5\n")
    assert found.startswith(
        ": test[0].set.checkpoint.interval of 't': cannot be set here: converge"
    )
    assert "cluster.checkpoint_every" in found


def test_no_script_of_faults_is_restarted_by_a_cluster(problems):
    text = HEAD.replace("[cluster]", KINDS.replace('"torchrun"', '"cluster"') + "[cluster]")
    (found,) = problems(text + "ranks_per_node = 8\n")
    assert "test[2].restarts of 'killed': 'cluster' is not known" in found


HERE = HEAD.replace('launcher = "slurm"\n', "").replace("[cluster]\n", "")


def everywhere(head, every):
    return head.replace("schema = 1\n", f"schema = 1\ncheckpoint_every = {every}\n")


def test_on_this_machine_whoever_starts_converge_again_continues_a_run(load):
    experiment = load(everywhere(HERE + ANCHOR + KINDS, 5))
    continued = Recovery((), checkpoint_every=5, restarts=RestartOwner.USER, max_restarts=0)
    specs = [experiment.controls[0], experiment.anchor, *experiment.tests]
    by_kind = {spec.name.partition("_")[0]: spec.recovery for spec in specs}
    assert by_kind.pop("resized") is None
    assert by_kind.pop("killed").restarts is RestartOwner.TORCHRUN
    assert by_kind == {"control": continued, "anchor": continued, "t": continued, "st": continued}


@pytest.mark.parametrize(
    ("table", "every"),
    [("", 5), ("checkpoint_every = 7\n", 7), ("requeue = false\n", None)],
)
def test_a_cluster_may_have_its_own_number_of_steps_between_checkpoints(load, table, every):
    recovery = load(everywhere(HEAD, 5) + "ranks_per_node = 8\n" + table).tests[0].recovery
    assert (recovery and recovery.checkpoint_every) == every
    assert recovery is None or recovery.restarts is RestartOwner.CLUSTER


def test_checkpoints_that_are_never_written_are_refused(problems):
    (control, _) = problems(everywhere(HERE, 21))
    assert control == (
        ": checkpoint_every: 21 comes after the last step of 'control': training.steps is 20 "
        "(at most 20)"
    )
    trainer = 'kind = "command"\ncommand = ["python", "train.py"]\ncurves = "curve.csv"'
    mine = everywhere(HERE, 5).replace('train_config = "base.toml"', trainer)
    (found,) = [each for each in problems(mine) if ": checkpoint_every: " in each]
    assert found == (
        ": checkpoint_every: is set, but a run that continues needs checkpoints, and nothing says "
        'where the program writes them (add [trainer.checkpoints] with name = "step-{step}.pt" '
        "(docs/resumes.md), or leave it out: an interrupted run starts over)"
    )


# ------------------------------------------------------------------ Kubernetes

ON_KUBERNETES = """
hardware = "H100"
ranks_per_node = 8
[cluster.kubernetes]
image = "registry.example/torch:2.15"
claim = "shared"
mount = "/shared"
"""


def load_pods(folder, table, launcher=Launcher.KUBERNETES):
    (folder / "x.toml").write_text(HEAD + table)
    return load_experiment(folder / "x.toml", launcher=launcher)


def test_every_key_of_kubernetes_is_read(folder):
    further = (
        'namespace = "lab"\ngpu = "amd.com/gpu"\nqueue = "q"\npod.nodeSelector = { a = "b" }\n'
    )
    assert load_pods(folder, ON_KUBERNETES + further).cluster.kubernetes == Kubernetes(
        image="registry.example/torch:2.15",
        claim="shared",
        mount=Path("/shared"),
        namespace="lab",
        gpu="amd.com/gpu",
        queue="q",
        pod={"nodeSelector": {"a": "b"}},
    )
    assert load_pods(folder, ON_KUBERNETES).cluster.kubernetes.gpu == "nvidia.com/gpu"


def test_the_table_of_kubernetes_may_be_in_the_users_file(folder, user_file):
    text = "schema = 1" + ON_KUBERNETES.replace("[cluster.", "[")
    (folder / "x.toml").write_text(HEAD.replace("slurm", "kubernetes"))
    experiment = load_experiment(folder / "x.toml", cluster=user_file(text))
    assert experiment.cluster.kubernetes.claim == "shared"


def test_slurm_has_no_use_for_the_table_of_kubernetes(folder):
    assert load_pods(folder, ON_KUBERNETES, Launcher.SLURM).cluster.kubernetes is None


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('image = "registry.example/torch:2.15"', "", "cluster.kubernetes.image: is missing"),
        ('claim = "shared"', "", "cluster.kubernetes.claim: is missing"),
        ('claim = "shared"', 'claim = "My Claim"', "claim: must be a name of Kubernetes"),
        ('mount = "/shared"', "", "cluster.kubernetes.mount: is missing"),
        ('mount = "/shared"', 'mount = "shared"', "mount: must be an absolute path"),
        ("ranks_per_node = 8", "", 'launcher "kubernetes" needs the number of ranks per node'),
        ('hardware = "H100"', "", "cluster.hardware: is missing: on Kubernetes nothing else says"),
        ("ranks_per_node", 'partition = "p"\nranks_per_node', "partition: is of Slurm"),
        ("ranks_per_node", "max_jobs = 2\nranks_per_node", "use kubernetes.queue"),
        ("ranks_per_node", "requeue = true\nranks_per_node", "requeue: is of Slurm"),
        ("[cluster.kubernetes]", "[probe]", 'launcher "kubernetes" needs an image, and a claim'),
        ("[cluster.kubernetes]", "[cluster.kubernetes]\nqueues = 1", "cluster.kubernetes.queues"),
        ("[cluster.kubernetes]", "[cluster.kubernetes]\npod.volumes = []", "converge sets it"),
        ("[cluster.kubernetes]", "[cluster.kubernetes]\npod.a = inf", "JSON values only"),
        ("[cluster.kubernetes]", "[cluster.kubernetes]\nnamespace = 'a.b'", "digits and dashes"),
        *(
            ("[cluster.kubernetes]", f"[cluster.kubernetes]\npod.{field}", problem)
            for field, problem in (
                ("hostNetwork = true", "must not have hostNetwork: pods find each other"),
                ("subdomain = 'x'", "must not have subdomain: pods find each other"),
                ("activeDeadlineSeconds = 5", "activeDeadlineSeconds: use cluster.time"),
            )
        ),
    ],
)
def test_what_kubernetes_needs_is_said_by_key(folder, old, new, problem):
    assert old in ON_KUBERNETES
    with pytest.raises(ConfigError) as caught:
        load_pods(folder, ON_KUBERNETES.replace(old, new, 1))
    assert problem in str(caught.value)
