"""``loader = "torchtitan"`` in real jobs: its stock loader over our corpus's documents."""

import importlib.metadata

import pytest


@pytest.fixture(scope="module")
def jobs():
    """The jobs of the dialect that this toolchain has."""
    if importlib.metadata.version("torchtitan").startswith("0.2."):
        import titan_0_2_jobs as dialect
    else:
        import titan_0_3_jobs as dialect
    return dialect


@pytest.fixture(scope="module")
def runs(jobs, tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("stock"))


def signals(steps):
    names = ("loss", "grad_norm", "loss_recomputed", "tokens", "batch_digest", "batch_agrees")
    return [[line[name] for name in names] for line in steps]


@pytest.mark.slow
def test_the_stock_loader_repeats_itself_but_not_at_another_degree(runs):
    control, in_force = runs.run("stock", loader="torchtitan")
    again, _ = runs.run("again", loader="torchtitan")
    assert signals(again) == signals(control)

    one_rank = {"dp_shard": 1, "overrides": {"training.local_batch_size": 8}}
    alone, _ = runs.run("alone", loader="torchtitan", **one_rank)
    assert all(a["batch_digest"] != b["batch_digest"] for a, b in zip(control, alone, strict=True))
    # What the same change of degree does with our own loader.
    ours, _ = runs.run("ours")
    ours_alone, _ = runs.run("ours_alone", **one_rank)
    assert [line["batch_digest"] for line in ours] == [line["batch_digest"] for line in ours_alone]

    assert str(runs.data / "text" / "documents.jsonl") in in_force["config"].values()
    assert (runs.folder / "stock" / "datasets").is_dir()


def test_a_loader_that_the_dialect_lacks_is_a_problem_of_its_key(jobs, tmp_path):
    from converge_harness.rank.start import entry

    jobs.preload()
    (problem,) = entry.check(str(jobs.write_job(tmp_path, loader="webdataset")))
    assert problem.key == "converge.data.loader"
    assert {"converge", "torchtitan"} <= set(problem.valid)


def test_only_our_own_loader_can_permute(jobs, tmp_path):
    from converge_harness.rank.start import entry

    jobs.preload()
    path = jobs.write_job(tmp_path, data=tmp_path, loader="torchtitan", repeat="permute")
    (problem,) = entry.check(str(path))
    assert problem.key == "repeats"
    assert "loader = 'torchtitan'" in problem.message
