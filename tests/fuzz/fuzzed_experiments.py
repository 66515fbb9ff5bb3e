"""Experiment files, and train configs, that are real ones of this project with something changed.

Each case takes a file of ``experiments/``, changes it (a text in the place of a number, a misspelt
key, NaN, a name that turns the direction of text, a table within a table within a table, bytes
that are no text, a key twice …), and has ``converge plan`` and ``converge toolchain list`` read it.
The properties are those of ``fuzzing.py`` with the exit codes 0 and 2, and:

- what certainly makes a file wrong is refused: text that is no TOML, a key that nobody knows in a
  table of fixed keys, a degree that is no whole number from 1 on, two test sets of one name, a
  tolerance or margin that is no number, no trainer, no control;
- what certainly changes nothing (comments, blank lines, another order of the tables' keys) plans
  the same jobs, to the letter.

What the change comes to is not always known: a list in the place of a text may be right somewhere,
and a file that is still right is planned. Of such a case only the first properties are asked.
"""

import copy
import re
import shutil
import tomllib

import tomli_w
from fuzzing import ODD_TEXTS, PLAN_CODES, ROOT, called, damaged_bytes, environment, odd_value
from fuzzing import working_in as within

NEEDS_A_CHECKPOINT = "upgrade.toml"
SOURCES = sorted(
    path for path in (ROOT / "experiments").glob("*.toml") if path.name != NEEDS_A_CHECKPOINT
)
FILE = "e.toml"
FIXED = ("control", "anchor", "probe", "parallelism", "trainer", "tolerance")
"""Tables whose keys are fixed; and ``test``, ``segments``, ``faults``, and the whole file."""


def prepare(folder):
    return folder


def run(case, _base):
    _lay_out(case.folder)
    dice = case.dice
    source = dice.choice(SOURCES)
    case.do(f"from {source.relative_to(ROOT)}")
    text = source.read_text()
    expected = "open"
    way = dice.random()
    if way < 0.60:
        content, expected = _with_another_tree(case, text)
    elif way < 0.75:
        content, expected = _with_another_text(case, text)
    elif way < 0.85:
        content, how = damaged_bytes(text.encode(), dice)
        case.do(how)
        if not _is_toml(content):
            expected = "refused"
    else:
        content = text.encode()
        _change_a_train_config(case, text)
    (case.folder / FILE).write_bytes(content)
    with within(case.folder), environment(CONVERGE_TOOLCHAINS=case.folder / "none"):
        planned = called(case, ("plan", FILE, *_options(case, expected)), PLAN_CODES)
        called(case, ("toolchain", "list", FILE, "--names"), PLAN_CODES)
        if expected == "same":
            (case.folder / FILE).write_text(text)
            whole = called(case, ("plan", FILE), PLAN_CODES)
            case.require(planned == whole, "another plan for what means the same")
    if expected == "refused":
        case.require(planned.code == 2, "a file that is certainly wrong is planned")


def _lay_out(folder):
    """All that experiment files name, beside the file: they find it there first."""
    for path in (ROOT / "experiments").iterdir():
        if path.suffix != ".toml":
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "train_configs", folder / "train_configs")


def _options(case, expected):
    if expected != "open":
        return ()
    return case.dice.choice(
        (
            *[()] * 6,
            ("--cover", "pairs", "--gpus", "8"),
            ("--ranks-per-node", "2"),
            ("--launcher", "slurm"),
            ("--only", "fsdp2_tp2"),
        )
    )


def _is_toml(content):
    try:
        tomllib.loads(content.decode())
    except (ValueError, RecursionError):
        return False
    return True


# ----------------------------------------------------------------------- trees


def _with_another_tree(case, text):
    tree = tomllib.loads(text)
    dice = case.dice
    if dice.random() < 0.08:
        case.do("another order of all keys")
        return tomli_w.dumps(_shuffled(tree, dice)).encode(), "same"
    for _ in range(dice.choice((0, 0, 0, 1, 2))):
        _change_something(case, tree)
    if dice.random() < 0.5 and _break_for_certain(case, tree):
        return _dumped(tree), "refused"
    _change_something(case, tree)
    return _dumped(tree), "open"


def _dumped(tree):
    # A whole number of more digits than Python prints has to be written as what it is.
    return tomli_w.dumps(tree).encode("utf-8", "surrogatepass")


def _shuffled(value, dice):
    if isinstance(value, list):
        return [_shuffled(each, dice) for each in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    # The order of controls, of a config and of what a set changes is that of what is shown.
    dice.shuffle(keys)
    return {
        key: copy.deepcopy(value[key])
        if key in ("config", "set", "controls")
        else _shuffled(value[key], dice)
        for key in keys
    }


def _places(value, path=()):
    """Every place below a value: what holds it, its key there, and the path to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(items):
        yield value, key, (*path, key)
        if isinstance(each, dict | list):
            yield from _places(each, (*path, key))


def _change_something(case, tree):
    dice = case.dice
    places = list(_places(tree))
    if not places:
        return
    holder, key, path = dice.choice(places)
    how = dice.choice(("odd", "odd", "odd", "drop", "copy", "number", "text", "rename", "nest"))
    where = ".".join(map(str, path))
    case.do(f"{how} at {where}")
    if how == "drop":
        del holder[key]
    elif how == "copy":
        other, other_key, _ = dice.choice(places)
        holder[key] = copy.deepcopy(other[other_key]) if other_key in _keys(other) else 1
    elif how == "number" and isinstance(holder[key], int | float):
        holder[key] = dice.choice((-holder[key], holder[key] * 1000, holder[key] + 1, 0, 2**63))
    elif how == "text":
        holder[key] = dice.choice(ODD_TEXTS)
    elif how == "rename" and isinstance(holder, dict):
        holder[dice.choice(ODD_TEXTS)] = holder.pop(key)
    elif how == "nest":
        holder[key] = {key: holder[key]} if isinstance(key, str) else [holder[key]]
    else:
        holder[key] = odd_value(dice)


def _keys(value):
    return value if isinstance(value, dict) else range(len(value))


def _fixed_tables(tree):
    """Tables of which every key is known, with their paths."""
    yield tree, ()
    for holder, key, path in _places(tree):
        value = holder[key]
        if not isinstance(value, dict) or {"set", "config", "environment"} & set(path):
            continue
        listed = isinstance(key, int) and path[-2] in ("test", "segments", "faults")
        if listed or key in FIXED or (len(path) == 2 and path[0] == "controls"):
            yield value, path


def _break_for_certain(case, tree):
    """Make the tree wrong in a way that no other key can excuse; whether it could be done."""
    ways = (_misspelt, _misspelt, _unknown, _degree, _degree, _name_twice, _margin, _gone, _schema)
    return case.dice.choice(ways)(case, tree)


def _misspelt(case, tree):
    table, path = case.dice.choice(list(_fixed_tables(tree)))
    if not table:
        return False
    key = case.dice.choice(list(table))
    at = case.dice.randrange(len(key) + 1)
    table[f"{key[:at]}q{key[at:]}"] = table.pop(key)
    case.do(f"key {key!r} of {path} misspelt")
    return True


def _unknown(case, tree):
    table, path = case.dice.choice(list(_fixed_tables(tree)))
    name = f"x{case.dice.choice(ODD_TEXTS)}"
    table[name] = odd_value(case.dice)
    case.do(f"unknown key {name[:40]!r} in {path}")
    return True


def _degree(case, tree):
    tables = _fixed_tables(tree)
    degrees = [table for table, path in tables if path[-1:] == ("parallelism",) and table]
    if not degrees:
        return False
    table = case.dice.choice(degrees)
    wrong = (0, -3, 2.5, float("nan"), float("inf"), True, "2", [2], {"a": 2}, 10**400)
    table[case.dice.choice(list(table))] = value = case.dice.choice(wrong)
    case.do(f"a degree is {str(value)[:40]}")
    return True


def _tests(tree):
    tests = tree.get("test")
    whole = isinstance(tests, list) and all(isinstance(each, dict) for each in tests)
    return tests if whole else []


def _name_twice(case, tree):
    if not _tests(tree):
        return False
    tree["test"].append(copy.deepcopy(tree["test"][0]))
    case.do("a test set twice")
    return True


def _margin(case, tree):
    if not _tests(tree):
        return False
    wrong = (float("nan"), -1.0, float("inf"), "0.1", True, [0.1], {"x": 0.1})
    key, value = case.dice.choice(("margin", "tolerance")), case.dice.choice(wrong)
    if key == "tolerance" and not isinstance(value, dict):
        value = {"loss": value}
    case.dice.choice(tree["test"])[key] = value
    case.do(f"{key} is {value}")
    return True


def _gone(case, tree):
    key = case.dice.choice(("trainer", "control"))
    if not isinstance(tree.get(key), dict) or (key == "control" and "controls" in tree):
        return False
    del tree[key]
    case.do(f"no {key}")
    return True


def _schema(case, tree):
    wrong = (0, 2, -1, "1", 1.5, [1], True, float("nan"), 10**400)
    tree["schema"] = value = case.dice.choice(wrong)
    case.do(f"schema is {str(value)[:40]}")
    return True


# ----------------------------------------------------------------------- texts


def _with_another_text(case, text):
    """Changes that no tree can show: comments, keys twice, bytes that are no text."""
    dice = case.dice
    lines = text.split("\n")
    at = dice.randrange(len(lines))
    # Between the lines of a text in three quotes nothing is a comment.
    same = "open" if '"""' in text else "same"
    how = dice.choice(("comments", "twice", "empty", "binary", "deep", "marks", "line", "crlf"))
    case.do(how)
    if how == "comments":
        lines.insert(at, dice.choice(("", "  ", "# \u5b9f \u00fc", "#" * 1000)))
        content, expected = "\n".join(lines).encode(), same
    elif how == "crlf":
        content, expected = "\r\n".join(lines).encode(), same
    elif how == "twice":
        keys = [line for line in lines if re.match(r"[\w.]+ = [^\[{\n]+$", line)]
        line = dice.choice(keys)
        lines.insert(lines.index(line), line)
        content, expected = "\n".join(lines).encode(), "refused"
    elif how == "empty":
        content, expected = dice.choice((b"", b"\n", b"# nothing\n", b"\xef\xbb\xbf")), "refused"
    elif how == "binary":
        content, expected = dice.randbytes(dice.choice((1, 100, 10_000))) + b"\xff", "refused"
    elif how == "deep":
        deep = dice.choice((100, 1000, 20_000))
        shape = dice.choice(("[" * deep + "]" * deep, "{a=" * deep + "1" + "}" * deep))
        content, expected = f"x = {shape}\n{text}".encode(), "refused"
    else:
        if how == "marks":
            lines.insert(at, dice.choice(("\x00", "\x1b[2J", '\u202ex = "\u202e"', "= 1", "[[[")))
        else:
            del lines[at]
        content = "\n".join(lines).encode()
        expected = "open" if _is_toml(content) else "refused"
    return content, expected


def _change_a_train_config(case, text):
    """The experiment stays, what it names changes."""
    named = re.findall(r"train_configs/[\w.]+\.toml", text)
    if not named:
        case.do("names no train config")
        return
    path = case.folder / case.dice.choice(named)
    tree = tomllib.loads(path.read_text())
    case.do(f"train config {path.name}")
    if case.dice.random() < 0.3:
        content, how = damaged_bytes(path.read_bytes(), case.dice)
        case.do(how)
    else:
        _change_something(case, tree)
        content = _dumped(tree)
    path.write_bytes(content)
