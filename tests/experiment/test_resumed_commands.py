"""``kind = "elastic"`` and ``"fault"`` of a program of one's own: what it has to offer for them."""

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import FaultKind, Kind, Parallelism, RestartOwner, Segment
from converge_harness.plan.select import select
from converge_harness.run_folder.checkpoints import CheckpointForm

CHECKPOINTS = '[trainer.checkpoints]\nname = "step-{step}.pt"\n'
EVERY = '"--dir", "{checkpoint_dir}", "--every", "{checkpoint_every}", "--stop", "{stop_at}"'
ELASTIC = """
[[test]]
kind = "elastic"
name = "resized"
segments = [{ until = 4, dp_replicate = 2 }, { until = 20, local_batch_size = 4 }]
"""
FAULT = """
[[test]]
kind = "fault"
name = "broken"
parallelism = { dp_replicate = 2 }
checkpoint_every = 5
faults = [{ kind = "kill", step = 6, rank = 1 }, { kind = "preempt", step = 12 }]
"""


@pytest.fixture(autouse=True)
def script(folder):
    (folder / "train.py").touch()


def text(sets, *, options=EVERY, checkpoints=CHECKPOINTS, trainer="", top=""):
    return f"""schema = 1
{top}
[trainer]
kind = "command"
toolchain = "mine"
command = ["train.py", {options}]
{trainer}
{checkpoints}
[trainer.config]
training = {{ steps = 20, local_batch_size = 2, global_batch_size = 8 }}
[control]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
{sets}"""


def test_a_program_that_is_told_when_to_save_and_stop_can_be_resized_and_broken(load):
    resized, broken = load(text(ELASTIC + FAULT)).tests
    assert (resized.kind, resized.resumes) == (Kind.ELASTIC, True)
    assert resized.segments == (
        Segment(4, Parallelism(dp_replicate=2), 2),
        Segment(20, Parallelism(), 4),
    )
    assert broken.kind is Kind.FAULT
    assert [fault.kind for fault in broken.recovery.faults] == [FaultKind.KILL, FaultKind.PREEMPT]
    assert broken.trainer.settings.checkpoints == CheckpointForm("step-{step}.pt", None)


def test_folders_are_recognised_by_the_file_that_is_written_last(load):
    folders = '[trainer.checkpoints]\nname = "{step}.dcp"\nlast_file = ".metadata"\n'
    (test,) = load(text(FAULT, checkpoints=folders)).tests
    assert test.trainer.settings.checkpoints == CheckpointForm("{step}.dcp", ".metadata")


ONE_FILE = '[trainer.checkpoints]\nname = "last.pt"\n'
TRUNCATED = '"ckpt_torn", torn = "truncated"'


def test_a_name_may_be_the_step_alone(load):
    (test,) = load(text(FAULT, checkpoints=CHECKPOINTS.replace("step-{step}.pt", "{step}"))).tests
    assert test.trainer.settings.checkpoints == CheckpointForm("{step}", None)


def test_a_program_may_overwrite_one_file(load):
    resized, broken = load(text(ELASTIC + FAULT, checkpoints=ONE_FILE)).tests
    for each in (resized, broken):
        assert each.trainer.settings.checkpoints == CheckpointForm("last.pt", None)


def test_placeholders_may_be_in_the_environment(load):
    trainer = 'environment = { EVERY = "{checkpoint_every}", DIR = "{checkpoint_dir}" }'
    (test,) = load(text(FAULT, options="", trainer=trainer)).tests
    assert test.kind is Kind.FAULT


@pytest.mark.parametrize(
    ("missing", "kept", "refused", "why"),
    [
        (', "--stop", "{stop_at}"', FAULT, ELASTIC, "needs a program that stops where a"),
        (', "--every", "{checkpoint_every}"', ELASTIC, FAULT, "needs a program that writes"),
    ],
)
def test_what_a_program_does_not_offer_excludes_only_the_sets_that_need_it(
    load, problems, missing, kept, refused, why
):
    options = EVERY.replace(missing, "")
    experiment = load(text(kept + refused, options=options))
    (test,) = experiment.tests
    ((name, left_out),) = experiment.left_out.items()
    kind = Kind.ELASTIC if refused is ELASTIC else Kind.FAULT
    assert {test.name, name} == {"resized", "broken"}
    assert (left_out.kind, left_out.control, left_out.was_asked_for) == (kind, "ddp2", True)
    assert f"'{kind.value}' {why}" in left_out.why
    assert "in trainer.command" in left_out.why
    # Of nothing else, nothing is run.
    (found,) = problems(text(refused, options=options))
    assert f"kind of '{name}': {left_out.why}" in found


def test_of_a_set_that_is_left_out_other_mistakes_are_reported(problems):
    options = EVERY.replace(', "--stop", "{stop_at}"', "")
    (found,) = problems(text(f"{FAULT}{ELASTIC}set = {{ colour = 3 }}\n", options=options))
    assert "set.colour of 'resized': is not a key of the train config" in found


def test_a_fault_that_needs_the_probe_leaves_out_only_its_set(load):
    nan = KILLED.replace('"kill"', '"nan_batch"').replace("killed", "nan")
    experiment = load(text(KILLED + nan, trainer=BY_CURVE))
    assert [test.name for test in experiment.tests] == ["killed"]
    assert experiment.left_out["nan"].why == (
        "converge cannot make nan_batch in runs of a command trainer without the probe (one of "
        "kill, hang, ckpt_torn, preempt; the probe makes the others (docs/probe.md))"
    )


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (
            'restarts = "torchrun"',
            (
                "torchrun starts the program again without converge, and without the probe "
                "every start needs a curve of its own (restarts = 'harness', or the probe "
                "(docs/probe.md))"
            ),
        ),
        (
            "nodes = [1, 2]",
            "a command trainer without the probe runs on one node (leave it out)",
        ),
    ],
)
def test_a_set_of_which_no_curve_can_tell_leaves_out_only_itself(load, key, why):
    in_place = f"{KILLED.replace('killed', 'in_place')}{key}\n"
    experiment = load(text(KILLED + in_place, trainer=BY_CURVE))
    assert [test.name for test in experiment.tests] == ["killed"]
    assert experiment.left_out["in_place"].why == why


def test_a_selection_does_not_miss_the_sets_that_it_does_not_name(load):
    options = EVERY.replace(', "--stop", "{stop_at}"', "")
    experiment = load(text(FAULT + ELASTIC, options=options))
    assert select(experiment, ["broken"]).left_out == {}
    with pytest.raises(ConfigError, match="'resized' is left out: 'elastic' needs a program that"):
        select(experiment, ["resized"])


EVERY_4 = "checkpoint_every = 4"
IN_PLACE = f'{FAULT.replace("preempt", "kill")}restarts = "torchrun"\n'


def test_a_program_that_looks_for_its_checkpoint_can_be_restarted_in_place(load):
    (test,) = load(text(IN_PLACE)).tests
    assert test.recovery.restarts is RestartOwner.TORCHRUN


BY_CURVE = 'probe = false\ncurves = "{output}/loss.csv"\n'


def test_a_program_that_leaves_a_curve_of_each_start_can_be_resized(load):
    (test,) = load(text(ELASTIC, trainer=BY_CURVE)).tests
    assert (test.kind, test.trainer.can.probed) == (Kind.ELASTIC, False)


@pytest.mark.parametrize("launcher", ["torchrun", "composer", "deepspeed"])
def test_a_run_of_any_kind_continues_from_the_checkpoints_of_its_program(load, launcher):
    set_ = '[[test]]\nname = "alone"\nparallelism = {}\n'
    trainer = f'launcher = "{launcher}"'
    found = load(text(set_ + ELASTIC, trainer=trainer, top=EVERY_4))
    alone, *resized = found.tests
    for each in (*found.controls, alone):
        assert (each.kind, each.recovery.checkpoint_every) == (Kind.PARALLEL, 4)
        assert each.recovery.restarts is RestartOwner.USER
    assert all(each.recovery is None for each in resized)  # its segments say when it saves


STRUCK_BY_CURVE = {FaultKind.KILL, FaultKind.HANG, FaultKind.PREEMPT, FaultKind.CKPT_TORN}
KILLED = """
[[test]]
kind = "fault"
name = "killed"
parallelism = { dp_replicate = 2 }
checkpoint_every = 5
faults = [{ kind = "kill", step = 12 }]
"""


def test_such_a_program_can_be_killed_made_to_hang_or_asked_to_stop(load):
    (test,) = load(text(KILLED, trainer=BY_CURVE)).tests
    assert (test.kind, test.trainer.can.faults) == (
        Kind.FAULT,
        STRUCK_BY_CURVE,
    )
    assert (test.recovery.faults[0].step, test.recovery.faults[0].rank) == (12, 0)


def by(launcher, sets, *, trainer="", top=""):
    """An experiment whose ranks are started in another way, if need be by the whole command."""
    made = text(sets, trainer=f'launcher = "{launcher}"\n{trainer}', top=top)
    starts_python = launcher in ("composer", "deepspeed")
    return made if starts_python else made.replace('["train.py"', '["{python}", "train.py"')


@pytest.mark.parametrize("launcher", ["composer", "deepspeed", "mpirun", "none"])
def test_a_program_is_resized_and_broken_under_any_launcher(load, launcher):
    in_place = IN_PLACE.replace("broken", "in_place")
    experiment = load(by(launcher, ELASTIC + FAULT + in_place))
    resized, broken = experiment.tests
    assert (resized.kind, broken.kind) == (Kind.ELASTIC, Kind.FAULT)
    assert broken.trainer.can.faults == {*FaultKind} - {FaultKind.AGENT_LOSS, FaultKind.JOIN}
    # What needs torchrun leaves out its own set.
    assert "torchrun starts again only what it has started" in experiment.left_out["in_place"].why
    by_curve = load(by(launcher, ELASTIC + KILLED, trainer=BY_CURVE))
    assert [test.kind for test in by_curve.tests] == [Kind.ELASTIC, Kind.FAULT]


def test_ranks_that_start_on_a_cluster_alone_are_resized_and_not_broken(folder):
    path = folder / "x.toml"
    cluster = "[cluster]\nranks_per_node = 2\n"
    path.write_text(by("srun", ELASTIC + FAULT, top='launcher = "slurm"') + cluster)
    experiment = load_experiment(path)
    assert [test.name for test in experiment.tests] == ["resized"]
    assert experiment.left_out["broken"].why == (
        "'fault' needs ranks that converge or torchrun can start again: launcher = 'srun' starts "
        "them on a cluster only, where converge does not run (trainer.launcher = 'torchrun')"
    )


NODES_OF_2 = "[cluster]\nranks_per_node = 2\n"
SLURM = 'launcher = "slurm"'
NOT_THERE = "converge does not run next to the ranks of a cluster, so"


@pytest.mark.parametrize("trainer", ["", BY_CURVE], ids=["probed", "by its curve"])
@pytest.mark.parametrize("sets", [ELASTIC, KILLED], ids=["resized", "killed"])
def test_on_a_cluster_what_needs_converge_beside_the_ranks_leaves_out_only_itself(
    load, problems, sets, trainer
):
    alone = '[[test]]\nname = "alone"\nparallelism = {}\n'
    assert len(load(text(sets + alone, trainer=trainer)).tests) == 2
    on_nodes = load(text(sets + alone, trainer=trainer, top=SLURM) + NODES_OF_2)
    if sets is ELASTIC and not trainer:
        assert [test.name for test in on_nodes.tests] == ["resized", "alone"]
        return
    assert [test.name for test in on_nodes.tests] == ["alone"]
    ((_, left_out),) = on_nodes.left_out.items()
    assert left_out.was_asked_for
    why = (
        f"{NOT_THERE} without the probe nothing kills the program, or records how it was started "
        "again (trainer.probe = true (docs/probe.md), or run it here"
        if trainer
        else f'{NOT_THERE} it cannot restart them (restarts = "torchrun", or run it here'
    )
    assert left_out.why.startswith(why)
    # Of nothing else, nothing is run.
    (found,) = problems(text(sets, trainer=trainer, top=SLURM) + NODES_OF_2)
    assert left_out.why in found


@pytest.mark.parametrize(
    ("launcher", "change", "why"),
    [
        (
            "torchrun",
            ('"kill", step = 12', '"preempt", step = 12'),
            "preempt is caused by converge",
        ),
        (
            "torchrun",
            ("checkpoint_every", "nodes = [2, 2]\ncheckpoint_every"),
            "a scheduler decides",
        ),
        (
            "deepspeed",
            ("", ""),
            f'{NOT_THERE} it cannot restart them (trainer.launcher = "torchrun" and restarts = "t',
        ),
    ],
)
def test_on_a_cluster_each_fault_that_needs_converge_leaves_out_its_set(
    load, launcher, change, why
):
    sets = KILLED.replace(*change) + '[[test]]\nname = "alone"\nparallelism = {}\n'
    on_nodes = load(text(sets, trainer=f'launcher = "{launcher}"', top=SLURM) + NODES_OF_2)
    assert [test.name for test in on_nodes.tests] == ["alone"]
    assert on_nodes.left_out["killed"].why.startswith(why)


def test_torchrun_restarts_a_program_on_a_cluster(load):
    in_place = f'{KILLED}restarts = "torchrun"\n'
    (test,) = load(text(in_place, top=SLURM) + NODES_OF_2).tests
    assert test.recovery.restarts is RestartOwner.TORCHRUN


NODES = """
[[test]]
kind = "fault"
name = "broken"
parallelism = { dp_replicate = 2 }
checkpoint_every = 5
restarts = "torchrun"
nodes = [1, 2]
faults = [{ kind = "agent_loss", step = 6 }, { kind = "join", step = 12 }]
"""


def test_nodes_of_a_program_may_leave_and_join(load):
    (test,) = load(text(NODES)).tests
    assert (test.recovery.nodes, test.recovery.first_nodes) == ((1, 2), 2)
    assert [fault.kind for fault in test.recovery.faults] == [FaultKind.AGENT_LOSS, FaultKind.JOIN]


NAMED = f'{EVERY}, "--resume", "{{resume_from}}"'


@pytest.mark.parametrize(
    ("checkpoints", "place"),
    [
        ('[trainer.checkpoints]\nnam = "step-{step}.pt"\n', "trainer.checkpoints.nam: unknown key"),
        (
            '[trainer.checkpoints]\nname = "a/last.pt"\n',
            "trainer.checkpoints.name: must be the name",
        ),
    ],
)
def test_of_a_mistake_in_the_table_nothing_follows(problems, checkpoints, place):
    found = problems(text(ELASTIC + FAULT, checkpoints=checkpoints))
    assert all("trainer.checkpoints." in each for each in found), found
    assert any(place in each for each in found), found


@pytest.mark.parametrize(
    ("sets", "changes", "expected"),
    [
        (
            ELASTIC,
            {"checkpoints": "", "options": '"--x"'},
            (
                "kind of 'resized': 'elastic' needs checkpoints, and nothing says where the "
                'program writes them (add [trainer.checkpoints] with name = "step-{step}.pt"'
            ),
        ),
        (
            "",
            {"checkpoints": ""},
            (
                "trainer.command[2]: {checkpoint_dir} has no value without the table "
                "trainer.checkpoints"
            ),
        ),
        (
            NODES.replace("torchrun", "harness"),
            {"trainer": 'launcher = "composer"'},
            (
                "converge cannot make agent_loss in runs of a command trainer without torchrun "
                "(one of kill, hang, nan_batch, ckpt_torn, disk_full, preempt; nodes that come and "
                'go are torchrun\'s agents: trainer.launcher = "torchrun")'
            ),
        ),
        (
            IN_PLACE,
            {"trainer": 'launcher = "deepspeed"'},
            (
                "torchrun starts again only what it has started, and another launcher starts the "
                "ranks of a command trainer without torchrun (restarts = 'harness', or "
                'trainer.launcher = "torchrun")'
            ),
        ),
        *(
            (
                KILLED.replace("kill", kind.value),
                {"trainer": BY_CURVE},
                (
                    f"converge cannot make {kind.value} in runs of a command trainer without the "
                    "probe (one of kill, hang, ckpt_torn, preempt; the probe makes the others "
                    "(docs/probe.md))"
                ),
            )
            for kind in FaultKind
            if kind not in STRUCK_BY_CURVE
        ),
        (
            KILLED.replace("kill", "ckpt_torn"),
            {"trainer": BY_CURVE},
            (
                "converge does not see when a command trainer without the probe writes its "
                "checkpoint, so it cannot end a rank that does (torn = 'truncated', or the probe"
            ),
        ),
        (
            KILLED.replace('"kill"', TRUNCATED),
            {"trainer": BY_CURVE},
            "no checkpoint is written at step 12 (checkpoint_every",
        ),
        (
            KILLED + 'restarts = "torchrun"\n',
            {"trainer": BY_CURVE},
            (
                "restarts of 'killed': torchrun starts the program again without converge, and "
                "without the probe every start needs a curve of its own (restarts = 'harness', or "
            ),
        ),
        (
            KILLED + "nodes = [1, 2]\n",
            {"trainer": BY_CURVE},
            "nodes of 'killed': a command trainer without the probe runs on one node",
        ),
        (
            KILLED.replace("kill", "preempt").replace("12", "5"),
            {"trainer": BY_CURVE},
            "none happens after a complete checkpoint, so there is nothing to recover from",
        ),
        (
            KILLED,
            {"trainer": BY_CURVE.replace(".csv", ".json")},
            "'fault' needs a curve that grows by rows: of one JSON value, a kill may leave half",
        ),
        (
            NODES.replace("torchrun", "harness"),
            {"options": NAMED},
            "faults of 'broken': when a node joins, torchrun starts the same command again, in",
        ),
        (
            KILLED.replace("12", "20"),
            {"trainer": BY_CURVE},
            "kill happens when step 20 has ended, and that is the last: nothing is left",
        ),
        (
            KILLED,
            {"trainer": BY_CURVE, "options": '"--dir", "{checkpoint_dir}"'},
            "'fault' needs a program that writes checkpoints while it trains",
        ),
        (
            KILLED,
            {"trainer": f"{BY_CURVE}mean_over = 10"},
            "'fault' needs the loss of every step, and mean_over says that a row is a mean over",
        ),
        (
            NODES,
            {"trainer": f'{BY_CURVE}launcher = "composer"'},
            "in runs of a command trainer without the probe and torchrun (one of kill, hang, ",
        ),
        (
            ELASTIC,
            {"trainer": f"{BY_CURVE}mean_over = 10"},
            "'elastic' needs the loss of every step, and mean_over says that a row is a mean over",
        ),
        (
            ELASTIC,
            {"trainer": BY_CURVE.replace("loss.csv", "trainer_state.json")},
            "'elastic' needs a curve of each start alone: trainer_state.json has the rows of all",
        ),
        (
            "",
            {"options": '"--stop", "{stop_at}"'},
            "trainer.checkpoints: is where converge looks, but nothing tells the program",
        ),
        *(
            (
                "",
                {"checkpoints": f'[trainer.checkpoints]\nname = "{name}"\n'},
                "trainer.checkpoints.name: must be the name of a file or folder with {step} for",
            )
            for name in ("", "..", "a/last.pt", "{rank}.pt", "{step}-{step}", "{step}{rank}")
        ),
        *(
            (
                "",
                {"checkpoints": f'{CHECKPOINTS}last_file = "{path}"\n'},
                "trainer.checkpoints.last_file: must be a path in the checkpoint",
            )
            for path in ("", "/x", "../x")
        ),
        (
            "",
            {"checkpoints": f'{ONE_FILE}last_file = ".metadata"\n'},
            "trainer.checkpoints.last_file: is in a folder, and 'last.pt' is one file, which every",
        ),
        *(
            (
                set_,
                {"checkpoints": ONE_FILE, "trainer": BY_CURVE},
                (
                    "needs {step} in the name of checkpoints: a curve does not show of which step "
                    "'last.pt' is, which every save overwrites"
                ),
            )
            for set_ in (ELASTIC, KILLED)
        ),
        (
            FAULT.replace('"kill", step = 6, rank = 1', f"{TRUNCATED}, step = 5"),
            {"checkpoints": ONE_FILE},
            "ckpt_torn with torn = 'truncated' cuts 'last.pt', the only checkpoint, so nothing",
        ),
        (
            FAULT.replace('"kill", step = 6', f"{TRUNCATED}, step = 5"),
            {},
            "the largest file is cut, whichever rank wrote it (leave rank out)",
        ),
        (
            IN_PLACE.replace("kill", "hang"),
            {},
            'torchrun does not detect a hanging rank (restarts = "harness")',
        ),
        (
            FAULT + "nodes = [1, 3]\n",
            {},
            "nodes of 'broken': dp_replicate 2 is not a multiple of 3 nodes: a node that leaves",
        ),
        *(
            (
                NODES,
                {"options": f'{EVERY}, "{{{name}}}"'},
                f"nodes of 'broken': {{{name}}} is put into the command once, and changes as nodes",
            )
            for name in ("ranks", "dp_replicate", "gradient_accumulation_steps")
        ),
        (
            IN_PLACE,
            {"options": NAMED},
            "restarts of 'broken': torchrun starts the same command again, in which {resume_from}",
        ),
        (
            "",
            {"top": "checkpoint_every = 4", "trainer": BY_CURVE},
            (
                "checkpoint_every: is set, but a run that continues needs the probe, which "
                "records what it resumes from (set probe = true, and call the probe in the program "
                "(docs/probe.md), or leave it out: an interrupted run starts over)"
            ),
        ),
        (
            "",
            {"top": "checkpoint_every = 4", "options": '"--dir", "{checkpoint_dir}"'},
            "nothing passes {checkpoint_every} to it (such as",
        ),
    ],
)
def test_what_cannot_be_resumed_is_said_before_a_start(problems, sets, changes, expected):
    found = problems(text(sets, **changes))
    assert any(expected in problem for problem in found), found
