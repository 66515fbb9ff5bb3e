"""Stores and report folders of finished runs, damaged, then reported and run again.

Two matrices are damaged: one of plain Python programs (``tiny_matrix.py``), which can also be run
again; and the stored one of real torchtitan (``tests/samples``), whose records are given the seal
that today's runs have, and which can only be reported.

Bytes are damaged, files cut, emptied, removed, exchanged between runs, replaced by links, folders
and pipes; JSON gets other values and keys twice. The properties are those of ``fuzzing.py``, and:

- ``converge report`` gives no test set PASS that had none before, and none whose evidence is not
  what its run left: its own, its control's, or that of the control's repeats. What is evidence is
  listed here, not asked of converge: ``job.json``, and every curve, metrics file and tensor. A
  link to a file with the same bytes is the same.
- After ``converge run`` every verdict is the undamaged matrix's again. Or it exits with 2 (with 3,
  where a report cannot be written once jobs have run) and names a path: then that file's run folder
  (or the file, where it belongs to no run) is removed, as the error says, and asked again; after at
  most ``TRIES`` of these it is healed.

A record without a seal is one of an older release, whose evidence is taken as it is
(docs/architecture.md): where the damage takes a seal away and also changes that run's evidence,
nothing can tell, and PASS is not held against it. One damage in one file never does both.
"""

import hashlib
import io
import json
import os
import re
import shutil
import stat
from contextlib import redirect_stdout

from fuzzing import JUDGING_CODES, called, damaged_bytes, odd_value, only_json
from fuzzing import working_in as within
from stored_samples import copied
from tiny_matrix import RUN, VERDICTS, verdicts, write_matrix

from converge_harness.cli import main
from converge_harness.seal import evidence_of

TRIES = 8
NO_EVIDENCE = ("record.json", "program.log")
REPEATS = ("rerun", "ulp")


def prepare(folder):
    """Both matrices, each with a copy that is never touched."""
    tiny = folder / "tiny"
    tiny.mkdir()
    write_matrix(tiny)
    with within(tiny), only_json(), redirect_stdout(io.StringIO()):
        main(list(RUN))
    if verdicts(tiny / "out") != VERDICTS:
        raise RuntimeError(f"the undamaged matrix is judged {verdicts(tiny / 'out')}")
    (folder / "titan").mkdir()
    sample = copied("schema1", folder / "titan")
    for path in (sample / "store" / "runs").glob("*/record.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "evidence": evidence_of(path.parent)}))
    matrices = {"tiny": (tiny, tiny / "out"), "titan": (sample, sample / "report")}
    return {
        name: (place, out, _copy(place, folder / f"{name}.whole"), verdicts(out))
        for name, (place, out) in matrices.items()
    }


def _copy(source, target):
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target, symlinks=True)


def run(case, matrices):
    dice = case.dice
    name = "tiny" if dice.random() < 0.7 else "titan"
    place, out, whole, expected = matrices[name]
    _copy(whole, place)
    case.do(f"matrix {name}")
    for _ in range(dice.choice((1, 1, 1, 1, 2, 5))):
        _damage(case, place)
    try:
        _report(case, place, out, whole, expected)
        if name == "tiny":
            _run_again(case, place, out, expected)
    finally:
        _keep_files(case, place)


def _report(case, place, out, whole, expected):
    changed = _changed_runs(place, whole)
    case.do(f"runs whose evidence changed: {sorted(changed)}")
    unsealed = {each for each in changed if _seal(place, each) is None}
    _remove(out / "report.json")
    with within(place), only_json(unless=case.dice.random() < 0.02):
        ended = called(case, ("report", out.relative_to(place)), JUDGING_CODES)
    found = verdicts(out)
    shared = {each for each in changed - unsealed if _is_control(each)}
    for test, verdict in found.items():
        own = {each for each in changed - unsealed if _of_set(each) == test}
        if verdict == "PASS":
            case.require(expected.get(test) == "PASS", f"{test} PASS, which was none before")
            case.require(not own, f"{test} PASS with changed evidence of its own: {own}")
            case.require(not shared, f"{test} PASS with changed evidence to judge by: {shared}")
    as_sealed = _seals(place) == _seals(whole)
    if not changed and as_sealed and ended.code != 2 and found.keys() == expected.keys():
        case.require("PASS" in found.values() or ended.code == 3, "nothing passes any more")
    case.require(bool(found) or ended.code in (2, 3), "no report, and no error")


def _run_again(case, place, out, expected):
    for _ in range(TRIES):
        _remove(out / "report.json")
        with within(place), only_json():
            ended = called(case, RUN, JUDGING_CODES)
        refused = ended.code == 2 or (ended.code == 3 and "no verdict" in ended.err)
        if not refused:
            break
        if not _follow(case, place, ended.err):
            return
    case.require(verdicts(out) == expected, f"not healed: {verdicts(out)}")


def _follow(case, place, said):
    """Remove what an error names, as it says; whether it named anything."""
    joined = " ".join(said.split())
    names = re.findall(
        r"(?:(?<=\s)|^)((?:store|out|history)[/\w.\-]*)", joined.replace(f"{place}/", "")
    )
    for name in names:
        path = place / name.rstrip(".")
        parts = path.relative_to(place).parts
        if parts[:2] == ("store", "runs") and len(parts) > 2:
            path = place.joinpath(*parts[:3])
        if len(parts) > 1 and os.path.lexists(path):
            case.do(f"remove {path.relative_to(place)}, as told")
            _remove(path)
            return True
    case.require(names, "exit code 2 and no path of the store in the error")
    case.require(not names, f"what is named ({names}) is not there")
    return False


# --------------------------------------------------------------------- damage


def _damage(case, place):
    dice = case.dice
    roots = [place / "store"] * 5 + [place / ("out" if (place / "out").is_dir() else "report")]
    files = _files(dice.choice(roots))
    if not files:
        return
    path = dice.choice(files)
    how = dice.choice((*["bytes"] * 3, *HOW))
    case.do(f"{how}: {path.relative_to(place)}")
    if how == "bytes":
        content, what = damaged_bytes(path.read_bytes(), dice)
        case.do(what)
        path.write_bytes(content)
    else:
        HOW[how](case, path, files)


def _files(root):
    """Regular files below a folder, and links to such; pictures and pages aside."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and path.suffix not in (".html", ".md", ".png", ".svg", ".xml", ".lock")
    )


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _json_value(case, path, _files):
    try:
        value = json.loads(path.read_text())
    except ValueError:
        path.write_text("{}")
        return
    places = list(_places(value))
    if places:
        holder, key = case.dice.choice(places)
        holder[key] = odd_value(case.dice)
        case.do(f"{key} is {str(holder[key])[:60]!r}")
    path.write_text(json.dumps(value), errors="surrogatepass")


def _json_dropped(case, path, _files):
    try:
        value = json.loads(path.read_text())
    except ValueError:
        path.write_text("[]")
        return
    places = [each for each in _places(value) if isinstance(each[0], dict)]
    if places:
        holder, key = case.dice.choice(places)
        case.do(f"no {key}")
        del holder[key]
    path.write_text(json.dumps(value))


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(items):
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)


def _key_twice(case, path, _files):
    text = path.read_text(errors="replace")
    found = re.findall(r'"[^"\n]+": [^\s{\[][^\n,}]*', text)
    if found:
        entry = case.dice.choice(found)
        case.do(f"{entry} twice")
        text = text.replace(entry, f"{entry}, {entry}", 1)
    path.write_text(text)


def _of_another_run(case, path, files):
    others = [each for each in files if each.name == path.name and each != path]
    if others:
        other = case.dice.choice(others)
        case.do(f"content of {other.parent.name}")
        path.write_bytes(other.read_bytes())


def _exchanged(case, path, files):
    others = [each for each in files if each.name == path.name and each != path]
    if others:
        other = case.dice.choice(others)
        case.do(f"with that of {other.parent.name}")
        ours, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(ours)


def _link(case, path, files):
    to = case.dice.choice(("same", "other", "nothing", "itself", "null", "above"))
    case.do(f"to {to}")
    aside = path.with_name("aside.bin")
    if to == "same":
        path.rename(aside)
    target = {
        "same": aside,
        "other": case.dice.choice(files),
        "nothing": path.with_name("nothing"),
        "itself": path,
        "null": "/dev/null",
        "above": path.parent,
    }[to]
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _folder(_case, path, _files):
    path.unlink()
    path.mkdir()


def _pipe(_case, path, _files):
    path.unlink()
    os.mkfifo(path)


def _added(case, path, _files):
    name = case.dice.choice(("frozen.npz", "metrics.jsonl", "in_force.json", "x.json", ".hidden"))
    path.with_name(name).write_bytes(case.dice.choice((b"", b"{}", b'{"schema": 1}', b"\x00")))


def _folder_gone(_case, path, _files):
    shutil.rmtree(path.parent)


def _renamed(case, path, _files):
    path.rename(path.with_name(case.dice.choice(("job.json", "other", "record.json"))))


HOW = {
    "JSON value": _json_value,
    "JSON key dropped": _json_dropped,
    "JSON key twice": _key_twice,
    "empty": lambda _case, path, _files: path.write_bytes(b""),
    "removed": lambda _case, path, _files: path.unlink(),
    "of another run": _of_another_run,
    "exchanged": _exchanged,
    "link": _link,
    "a folder": _folder,
    "a pipe": _pipe,
    "no permission": lambda _case, path, _files: path.chmod(0),
    "added": _added,
    "folder gone": _folder_gone,
    "renamed": _renamed,
}


# ------------------------------------------------------------------- evidence


def _changed_runs(place, whole):
    """Names of the run folders whose evidence is not what it was."""
    ours, theirs = (_evidence(each / "store" / "runs") for each in (place, whole))
    return {name for name, digests in theirs.items() if ours.get(name) != digests}


def _evidence(runs):
    return {folder.name: _digests(folder) for folder in runs.iterdir() if folder.is_dir()}


def _digests(folder):
    """Digest by name of all that a run is judged by; a place of something else: its kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        known = path.suffix in (".json", ".jsonl", ".npz", ".csv", ".part")
        beside = path.parent.name == "logs" or (
            path.parent.name == "output" and path.name != "loss.csv"
        )
        if path.name in NO_EVIDENCE or path.name.startswith(".") or beside or not known:
            continue
        try:
            mode = path.stat().st_mode
        except OSError:
            found[name] = "cannot be followed"
            continue
        if stat.S_ISREG(mode):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not stat.S_ISDIR(mode):
            found[name] = "no file"
    return found


def _seals(place):
    """The seal of each run's evidence by the run's folder."""
    runs = place / "store" / "runs"
    return {folder.name: _seal(place, folder.name) for folder in runs.iterdir()}


def _seal(place, run):
    """The digests of a run's evidence as its record has them; None where there are none."""
    path = place / "store" / "runs" / run / "record.json"
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        evidence = json.loads(path.read_text())["evidence"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return evidence if isinstance(evidence, dict) else None


def _of_set(run):
    """The set whose run a folder holds."""
    return run.rpartition("-")[0]


def _is_control(run):
    """Whether the folder is a control's, or a repeat's of it."""
    name, _, repeat = _of_set(run).partition(".")
    return name in ("control", "fsdp2") and repeat in ("", *REPEATS)


def _keep_files(case, place):
    """Copied only when something is wrong; pipes and loops stay where they are."""
    if not case.wrong:
        return
    for path in sorted(place.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        to = case.folder / path.relative_to(place)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
