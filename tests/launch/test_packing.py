import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_jobs import tiny_job

from converge_harness.launch.local.supervisor import Slots, cpu_slots, launch_order
from converge_harness.launch.progress import Pace, matrix_eta_s, remaining_s
from converge_harness.model import Role, Technique


def test_slots_are_taken_and_given_back():
    slots = Slots.of((0, 1, 2, 3))
    first, left = slots.take(3)
    assert (first, left.free) == ((0, 1, 2), (3,))
    assert not left.fits(2)
    assert left.give(first) == slots


def test_more_than_free_is_refused():
    with pytest.raises(ValueError, match="2 slots needed, 1 are free"):
        Slots.of((0,)).take(2)


@given(st.lists(st.integers(1, 4), max_size=20))
def test_no_slot_is_held_twice(sizes):
    slots, held = Slots.of(range(8)), []
    for size in sizes:
        if slots.fits(size):
            taken, slots = slots.take(size)
            held += taken
        elif held:
            slots, held = slots.give(held), []
        assert len(set(held)) == len(held)
        assert sorted([*held, *slots.free]) == list(range(8))


def test_how_many_ranks_share_a_gpu_depends_on_their_number_alone():
    slots = Slots.of((0, 0, 0, 0, 1, 1, 1, 1))
    one, left = slots.take(1)
    four, left = left.take(4)
    assert (one, sorted(four)) == ((0,), [0, 0, 1, 1])
    two, left = left.take(2)
    assert (sorted(two), left.free) == ([0, 1], (1,))
    assert left.fits(1)
    assert not left.fits(2)  # both on one GPU would be another set-up
    assert left.give(one).take(2)[0] in {(0, 1), (1, 0)}
    assert sorted(Slots.of((0, 0, 0, 1, 1)).take(5)[0]) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("cores", "wanted", "largest", "expected"),
    [(2, None, 2, 4), (2, None, 8, 8), (2, 2, 2, 2), (2, 2, 4, 4), (64, None, 2, 128)],
)
def test_cpu_slots_are_two_per_core_and_enough_for_the_largest_job(
    cores, wanted, largest, expected
):
    jobs = [tiny_job("small", ranks=1), tiny_job("large", ranks=largest)]
    assert len(cpu_slots(cores, jobs, wanted).free) == expected


def test_seed_first_then_the_longest():
    jobs = [
        tiny_job("two", ranks=2),
        tiny_job("eight", ranks=8),
        tiny_job("seed", role=Role.SEED, ranks=2),
        tiny_job("two compiled", ranks=2, techniques=(Technique.COMPILE,)),
    ]
    names = [job.name for job in launch_order(jobs)]
    assert names == ["seed", "eight", "two compiled", "two"]


def test_remaining_time_follows_the_pace():
    assert remaining_s(step=1, steps=11, since_first_step_s=0.0, made=0) is None
    assert remaining_s(step=6, steps=11, since_first_step_s=10.0, made=5) == 10.0


def test_forecast_of_a_matrix():
    assert matrix_eta_s([], [Pace(2)], slots=4) is None
    assert matrix_eta_s([(tiny_job("done"), 10.0)], [], slots=4) == 0.0
    done = [(tiny_job("done", ranks=2), 10.0)]
    # Two more of two ranks side by side take as long as one; four take twice as long.
    assert matrix_eta_s(done, [Pace(2)] * 2, slots=4) == 10.0
    assert matrix_eta_s(done, [Pace(2)] * 4, slots=4) == 20.0
    running = Pace(2, elapsed_s=5.0, remaining_s=25.0)
    assert matrix_eta_s([], [running], slots=4) == 25.0
