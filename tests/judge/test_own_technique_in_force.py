"""Whether a technique of the experiment file is in force, by what its ranks saw."""

import pytest
from judge_examples import in_force

from converge_harness.model import OwnTechnique, Parallelism, SetSpec, TrainConfig
from converge_harness.trainers.torchtitan import TORCHTITAN

APPLY, COUNT = "/home/me/features.py:use", "/home/me/features.py:count"
SEEN = {"name": "fused", "called": True, "changed": True, "count": None, "modules": ["RMSNorm"]}
UNSEEN = (
    "What it replaces elsewhere cannot be seen: count it in a function, and name that as in_force"
)


def clauses(own, *seen):
    spec = SetSpec(
        name="fused",
        parallelism=Parallelism(dp_shard=2),
        train_config=TrainConfig(path="x", settings={}),
        toolchain="torchtitan-0.3.0",
        own_techniques=(own,),
        trainer=TORCHTITAN,
    )
    ran = in_force(Parallelism(dp_shard=2), own_techniques=list(seen))
    return [each for each in TORCHTITAN.audit.not_in_force(spec, ran) if "fused" in each]


@pytest.mark.parametrize(
    ("own", "seen", "said"),
    [
        ({"apply": APPLY, "place": "model"}, SEEN, []),
        ({"apply": APPLY, "in_force": COUNT}, {**SEEN, "changed": False, "count": 9}, []),
        (
            {"apply": APPLY, "place": "model"},
            {**SEEN, "changed": False},
            [
                (
                    "fused is named but changed nothing: the model was the same after "
                    f"features.py:use. {UNSEEN}"
                )
            ],
        ),
        (
            {"apply": APPLY, "place": "config"},
            {**SEEN, "changed": False},
            [
                (
                    "fused is named but changed nothing: the config was the same after "
                    f"features.py:use. {UNSEEN}"
                )
            ],
        ),
        (
            {"apply": APPLY, "in_force": COUNT},
            {**SEEN, "count": 0},
            [
                "fused is named but changed nothing: features.py:count returned 0 on all ranks",
            ],
        ),
        (
            {"overrides": {"a.b": 1}},
            {**SEEN, "changed": False},
            [
                (
                    "fused is named but changed nothing: its keys have the values that they had "
                    "without it"
                )
            ],
        ),
        (
            {"apply": APPLY, "place": "model"},
            {**SEEN, "called": False},
            ["fused is named but features.py:use was not called"],
        ),
    ],
)
def test_what_is_said(own, seen, said):
    own = OwnTechnique("fused", "RMSNorm by our kernel", **own)
    assert [each for each in clauses(own, seen) if "a.b = 1" not in each] == said


def test_a_record_without_it():
    own = OwnTechnique("fused", "RMSNorm by our kernel", apply=APPLY, place="model")
    assert clauses(own) == ["fused is named but features.py:use was not called"]
