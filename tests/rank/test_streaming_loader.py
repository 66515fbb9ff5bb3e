"""``loader = "streaming"``: what MosaicML Streaming keeps and does not, where a toolchain has it.

The package itself, in forked ranks; that its samples reach a real trainer shows the last test.
"""

import importlib.util

import pytest
import titan_0_3_jobs as jobs
from streaming_orders import Orders

from converge_harness.corpus import prepare
from converge_harness.model import SyntheticData

jobs.require_titan_0_3()
if importlib.util.find_spec("streaming") is None:
    pytest.skip("needs toolchain torchtitan-0.3.0-streaming", allow_module_level=True)

RESIZED = ((2, 4), (1, 4), (4, 4))
"""Data-parallel degree and steps of each segment."""
# The parents of forked ranks count what those leave to the resource tracker.
pytestmark = pytest.mark.filterwarnings("ignore:resource_tracker")


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    jobs.preload()
    folder = tmp_path_factory.mktemp("orders")
    data = prepare(SyntheticData(vocab_size=512, tokens=60_000), folder / "data").folder
    return Orders(folder, data)


@pytest.mark.parametrize("algorithm", ["py1s", "py1e", "py1br", "py2s", "naive", None])
def test_a_resume_in_mid_epoch_keeps_every_shuffle_on_any_degree(orders, algorithm):
    settings = {"shuffle_algo": algorithm} if algorithm else {"shuffle": False}
    control, state = orders.steps(2, 12, **settings)
    assert len({tuple(step) for step in control}) == 12
    assert (state["epoch"], state["sample_in_epoch"], state["consumed"]) == (0, 96, 96)
    assert orders.elastic(RESIZED, **settings) == control


def test_samples_are_those_of_our_own_loader(orders):
    """Unshuffled, the dataset is the corpus cut as ours is."""
    from converge_harness.rank.data_order import open_corpus

    corpus = open_corpus(orders.data)
    (first,), _ = orders.steps(1, 1, shuffle=False, num_canonical_nodes=1)
    own = [hash(tuple(corpus.sample(index, 128).inputs.tolist())) for index in range(8)]
    assert first == sorted(own)


def test_nodes_do_not_matter_while_canonical_nodes_are_fixed(orders):
    control, _ = orders.steps(2, 12)
    assert orders.elastic(RESIZED, ranks_per_node=1) == control


def test_canonical_nodes_left_to_the_package_are_those_of_the_first_segment(orders):
    settings = {"ranks_per_node": 1, "num_canonical_nodes": 0}
    control, _ = orders.steps(2, 12, **settings)
    assert orders.elastic(RESIZED, **settings) == control
    assert orders.elastic(((1, 4), (2, 8)), **settings)[0] != control[0]


def test_epochs_of_whole_steps_hold_and_their_tails_do_not(orders):
    whole, _ = orders.steps(2, 12, epoch_size=32)
    assert orders.elastic(RESIZED, epoch_size=32) == whole
    # Of 44 samples two ranks drop the last 4; one rank that accumulates makes half a step of them.
    cut, _ = orders.steps(2, 6, epoch_size=44)
    accumulated, _ = orders.steps(1, 6, epoch_size=44, local_batch_size=4)
    assert accumulated[:5] == cut[:5]
    assert accumulated[5] != cut[5]
    # 36 are padded to 40 on eight ranks, which makes a fifth step, and not on two.
    padded, _ = orders.steps(8, 5, epoch_size=36)
    alone, _ = orders.steps(2, 5, epoch_size=36)
    assert padded[:4] == alone[:4]
    assert padded[4] != alone[4]


def test_a_state_holds_the_seed_and_not_the_algorithm(orders):
    control, _ = orders.steps(2, 6)
    _, state = orders.steps(2, 4)
    assert orders.steps(2, 2, state=state, shuffle_seed=1)[0] == control[4:]
    assert orders.steps(2, 2, state=state, shuffle_algo="py1s")[0] != control[4:]


def test_an_epoch_without_a_whole_batch_is_refused(orders):
    with pytest.raises(Exception, match=r"set a larger dataloader\.epoch_size"):
        orders.steps(2, 1, epoch_size=4)


def test_nodes_of_unequal_size_are_refused(orders):
    with pytest.raises(Exception, match="3 data-parallel ranks are not a whole number of nodes"):
        orders.steps(3, 1, local_batch_size=1, ranks_per_node=2)


@pytest.mark.slow
def test_a_trainer_gets_the_same_samples_through_pipeline_stages(tmp_path):
    runs = jobs.Runs(tmp_path)
    control, in_force = runs.run("fsdp2", loader="streaming")
    assert all(line["batch_agrees"] for line in control)
    assert in_force["config"]["dataloader.shuffle_algo"] == "py1e"
    staged, _ = runs.run("staged", loader="streaming", pp=2, pipeline_schedule="1F1B")
    assert all(line["batch_agrees"] for line in staged)
    digests = [line["batch_digest"] for line in control]
    assert len(set(digests)) == 3
    assert [line["batch_digest"] for line in staged] == digests
