"""``[trainer] seed_checkpoint``: a distributed checkpoint, and what is none."""

import pytest

from converge_harness.surroundings import read_surroundings

TEXT = """
schema = 1
[trainer]
train_config = "base.toml"
seed_checkpoint = "weights/step-0"
[control]
parallelism = { dp_shard = 2 }
[[test]]
name = "tp"
parallelism = { dp_shard = 2, tp = 2 }
"""


@pytest.fixture
def weights(folder):
    checkpoint = folder / "weights" / "step-0"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_bytes(b"metadata")
    (checkpoint / "__0_0.distcp").write_bytes(b"shard")
    return checkpoint


def test_a_checkpoint_is_found_beside_the_file(load, weights):
    assert load(TEXT).seed_checkpoint == weights.resolve()


def no_folder(weights):
    weights.rename(weights.with_name("step-9"))


def a_file(weights):
    no_folder(weights)
    weights.write_text("x")


def no_metadata(weights):
    (weights / ".metadata").unlink()


def cut_short(weights):
    (weights / ".metadata").write_bytes(b"")


def no_shards(weights):
    (weights / "__0_0.distcp").rename(weights / "model.pt")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (no_folder, "there is no folder 'weights/step-0' (looked in: "),
        (a_file, "is a file"),
        (no_metadata, "has no .metadata: there is __0_0.distcp"),
        (cut_short, "has an empty .metadata"),
        (no_shards, "has no *.distcp shard: there is .metadata, model.pt"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_what_is_there(problems, weights, spoil, says):
    spoil(weights)
    (found,) = problems(TEXT)
    assert found.startswith(": trainer.seed_checkpoint: ")
    assert says in found
    assert spoil is no_folder or "a folder with .metadata and *.distcp shards" in found


def test_the_folder_above_shows_what_could_be_meant(problems, weights):
    (found,) = problems(TEXT.replace("weights/step-0", "weights"))
    assert "has no .metadata: there is step-0/" in found


def test_the_digest_changes_with_metadata_and_shards_and_not_with_the_place(load, weights):
    def digest(text=TEXT):
        return read_surroundings(load(text), str, on_gpu=False).seed_checkpoint

    first = digest()
    weights.rename(weights.with_name("step-8"))
    moved = TEXT.replace("step-0", "step-8")
    assert digest(moved) == first
    there = weights.with_name("step-8")
    (there / "__0_0.distcp").write_bytes(b"a longer shard")
    longer = digest(moved)
    (there / ".metadata").write_bytes(b"METADATA")
    assert len({first, longer, digest(moved)}) == 3
    assert digest(TEXT.replace('seed_checkpoint = "weights/step-0"\n', "")) is None
