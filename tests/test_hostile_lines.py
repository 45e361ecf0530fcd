"""Broken and hostile JSON lines, problems and arguments: each is refused in one sentence, and nothing is written."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_policy, refused
from test_hostile_trajectories import FILES

import evaluate
import train
from topr import trajectories
from topr.tokenizer import load_tokenizer
from topr.trajectories import read_trajectories

pytestmark = pytest.mark.timeout(30)  # nothing may hang


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A policy that takes chat messages."""
    folder = make_policy(tmp_path_factory.mktemp("policy") / "base")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def convert(run, policy, path, words: str = "") -> None:
    """Import, which must refuse."""
    arguments = "import", path, "--policy", policy, "--out", "out.parquet"
    refused(run, words or str(path), *arguments, main=trajectories.main)


def imported(run, policy, path) -> list:
    """Import, which must succeed."""
    code, _, err = run(trajectories.main, "import", path, "--policy", policy, "--out", "out.parquet")
    assert code == 0, err
    return read_trajectories("out.parquet")


def measure(run, policy, path, words: str = "", benchmark: str = "arithmetic", *arguments) -> None:
    """Evaluate on a file of problems, which must be refused."""
    arguments = "--policy", policy, "--benchmark", f"{benchmark}={path}", *arguments
    refused(run, words or str(path), *arguments, main=evaluate.main)


PLAIN = {"prompt": "1+1>", "response": "#2", "reward": 1}
LINE = json.dumps(PLAIN).encode()
BYTES = {
    "blank lines": b"\n \n\t\n\r\n",
    "no UTF-8": b'{"prompt": "\xff\xfe", "response": "2", "reward": 1}',
    "half a character": LINE + b"\n\xe2\x82",
    "Latin-1": '{"prompt": "é", "response": "2", "reward": 1}'.encode("latin-1"),
    "UTF-16": LINE.decode().encode("utf-16"),
    "UTF-16 without a mark": LINE.decode().encode("utf-16-le"),
    "UTF-32": LINE.decode().encode("utf-32"),
    "gzip": gzip.compress(LINE, mtime=0),
    "zip": b"PK\x03\x04" + bytes(60),
    "pickle": b"cposix\nsystem\n(S'touch PWNED'\ntR.",
    "NUL bytes": LINE[:10] + b"\0\0" + LINE[10:],
    "a NUL behind": LINE + b"\0",
    "two marks": b"\xef\xbb\xbf\xef\xbb\xbf" + LINE,
    "a mark within": LINE + b"\n\xef\xbb\xbf" + LINE,
    "cut off": LINE[:-5],
    "cut off in the second line": LINE + b"\n" + LINE[:20],
    "two on a line": LINE + LINE,
    "a comma behind": LINE + b",",
    "a list of them": b"[" + LINE + b"]",
    "indented": json.dumps(PLAIN, indent=1).encode(),
    "single quotes": str(PLAIN).encode(),
    "CSV": b"prompt,response,reward\n1,2,3\n",
    "YAML": b"prompt: 1\nresponse: 2\n",
    "Python": b"__import__('os').system('touch PWNED')",
    "a control character": b'{"prompt": "1\x1b[31m", "response": "2", "reward": 1}',
    "half a surrogate pair": b'{"prompt": "\\ud800", "response": "2", "reward": 1}',
    "half a surrogate pair as key": b'{"\\udfff": 1, "prompt": "1", "response": "2", "reward": 1}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep in a key": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b', "response": "2", "reward": 1}',
    "many digits": b'{"prompt": "1", "response": "2", "reward": ' + b"9" * 5000 + b"}",
    "a huge number": b'{"prompt": "1", "response": "2", "reward": 1' + b"0" * 400 + b"}",
    "a huge exponent": b'{"prompt": "1", "response": "2", "reward": 1e400}',
    "a million and one": b'{"prompt": "1", "response": "2", "reward": -1000001}',
    "NaN": b'{"prompt": "1", "response": "2", "reward": NaN}',
    "Infinity": b'{"prompt": "1", "response": "2", "reward": Infinity}',
    "-Infinity": b'{"prompt": "1", "response": "2", "reward": -Infinity}',
    "NaN where nobody looks": b'{"prompt": "1", "response": "2", "reward": 1, "more": [NaN]}',
    "a key twice": b'{"prompt": "1", "response": "2", "reward": 1, "reward": -1}',
    "a key twice inside": b'{"prompt": "1", "response": "2", "reward": 1, "more": {"a": 1, "a": 2}}',
    "a list": b"[1, 2]",
    "text": b'"prompt"',
    "a number": b"17",
    "null": b"null",
    "true": b"true",
    "an empty object": b"{}",
    "good lines, then a number": LINE + b"\n" + LINE + b"\n3",
    "a line without end": b" " * 2**25 + LINE,
    "text without end": b'{"prompt": "' + b"1" * 2**25 + b'", "response": "2", "reward": 1}',
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_to_import(run, policy, name):
    Path("bad.jsonl").write_bytes(BYTES[name])
    convert(run, policy, "bad.jsonl")
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("name", [name for name in BYTES if "without end" not in name])
def test_bytes_as_problems(run, policy, name):
    problem = BYTES[name].replace(b"response", b"gold")
    Path("bad.jsonl").write_bytes(problem)
    if name in ("a huge number", "a million and one"):  # a key that nobody reads
        problem = problem.replace(b'"gold"', b'"id"')
        Path("bad.jsonl").write_bytes(problem)
    measure(run, policy, "bad.jsonl")


def test_other_bytes_are_welcome(run, policy):
    """A mark at the start, ends of line of any kind, blank lines, U+2028 in a text: the same trajectories."""
    second = json.dumps(PLAIN | {"reward": -1, "gold": "\u2028\x85"}, ensure_ascii=False).encode()
    Path("good.jsonl").write_bytes(LINE + b"\n" + second + b"\n")
    good = imported(run, policy, "good.jsonl")
    for content in (
        b"\xef\xbb\xbf" + LINE + b"\r\n" + second + b"\r\n",
        b"\n\n " + LINE + b" \n \n" + second,
        b"\r\n" + LINE.replace(b" ", b"\t") + b"\r\n\r\n" + second,
    ):
        Path("same.jsonl").write_bytes(content)
        assert imported(run, policy, "same.jsonl") == good


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_what_is_no_file_to_import(run, policy, name, end):
    if (name, end) == ("JSON", "jsonl"):
        pytest.skip("is what it should be, but for its keys")
    FILES[name](f"bad.{end}")
    convert(run, policy, f"bad.{end}")


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_problems(run, policy, name):
    FILES[name]("bad.jsonl")
    measure(run, policy, "bad.jsonl")


CHAT = [{"role": "user", "content": "1+1>"}, {"role": "assistant", "content": "#2"}]
TEXTS = [None, 1, 1.5, True, [], {}, [1], [[]], [{}], [None], ["1"], {"role": "user"}, {"content": "1"}]
TEXTS += [[{"role": "evil", "content": "1"}], [{"role": "user", "content": 1}], [{"role": ["user"], "content": "1"}]]
TEXTS += [[{"role": "user", "content": "1"}, None], [{"role": "user", "content": [{"type": "text", "text": "1"}]}]]
NUMBERS = [None, "1", "", [], [1], {}, {"a": 1}]
WRONG = {
    "plain": (PLAIN, {"prompt": TEXTS, "response": TEXTS, "reward": NUMBERS}),
    "conversation": ({"messages": CHAT, "reward": 1}, {"messages": [*TEXTS, "1", CHAT[:1]], "reward": NUMBERS}),
    "unpaired": (
        {"prompt": "1", "completion": "2", "label": True},
        {"prompt": TEXTS, "completion": TEXTS, "label": [*NUMBERS, 0, 1, 1.0, "true"]},
    ),
    "preference": (
        {"prompt": "1", "chosen": "2", "rejected": "3"},
        {"prompt": TEXTS[1:], "chosen": TEXTS, "rejected": TEXTS},
    ),
    "implicit": (
        {"chosen": CHAT, "rejected": CHAT},
        {"chosen": [*TEXTS, "1"], "rejected": [*TEXTS, "1", CHAT[:1], CHAT * 2]},
    ),
    "verl": ({"input": "1", "output": "2", "score": 1}, {"input": TEXTS, "output": TEXTS, "score": NUMBERS}),
    "OpenRLHF": ({"input": "1", "output": "2", "reward": 1}, {"input": TEXTS, "output": TEXTS, "reward": NUMBERS}),
    "optional": (
        PLAIN,
        {
            "prompt_id": [1.5, True, [], {}, ["1"]],
            "group": [1.5, False, [], {}, ["1"]],
            "finished": ["yes", 1, 0.0, [], {}],
            "valid": ["yes", 1, 0.0, [], {}],
            "answer": [True, [], {}, ["1"]],
            "gold": [True, [], {}, ["1"]],
        },
    ),
}


@pytest.mark.parametrize(("form", "key"), [(form, key) for form in WRONG for key in WRONG[form][1]])
def test_wrong_values_of_every_key(run, policy, form, key):
    good, wrong = WRONG[form]
    Path("good.jsonl").write_text(json.dumps(good))
    imported(run, policy, "good.jsonl")
    for value in wrong[key]:
        Path("bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | {key: value}))
        convert(run, policy, "bad.jsonl", "2")  # the second
    if key in ("prompt_id", "group", "finished", "valid", "answer", "gold"):
        return
    Path("bad.jsonl").write_text(json.dumps({name: value for name, value in good.items() if name != key}))
    convert(run, policy, "bad.jsonl", "entry 1")


COLUMNS = {
    "bytes": pa.array([b"\xff"]),
    "time": pa.array([2**62], pa.timestamp("ms")),
    "decimal": pa.array([1]).cast(pa.decimal128(21, 2)),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
    "struct": pa.array([{"role": "user", "content": "1"}]),
    "lists": pa.array([[["1"]]]),
    "null": pa.nulls(1),
    "number": pa.array([1.5]),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("key", ["prompt", "response", "reward"])
def test_columns_to_import(run, policy, key, kind):
    if (key, kind) in (("reward", "number"), ("prompt", "struct")):
        pytest.skip("is welcome")
    table = pa.table({name: COLUMNS[kind] if name == key else pa.array([value]) for name, value in PLAIN.items()})
    pq.write_table(table, "bad.parquet")
    convert(run, policy, "bad.parquet")


PROBLEM = {"prompt": "1+1>", "gold": "2"}
PROBLEMS = {
    "arithmetic": (
        PROBLEM,
        {
            "prompt": [None, 1, True, [], {}, "", "1" * 40, "1" * 10_000],
            "gold": [None, 2, True, [], {}],
            "id": [1.5, True, [], {}],
        },
    ),
    "gsm8k": (
        {"question": "1+1?", "answer": "#### 2"},
        {"question": [None, 1, [], {}], "answer": [None, 2, [], {}, "", "two", "#### ", "#### two"]},
    ),
    "math500": (
        {"problem": "1+1?", "answer": "2"},
        {"problem": [None, 1, [], {}], "answer": [None, 2, [], {}], "solution": [1, [], {}]},
    ),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in PROBLEMS for key in PROBLEMS[name][1]])
def test_wrong_values_in_problems(run, policy, name, key):
    good, wrong = PROBLEMS[name]
    for value in wrong[key]:
        Path("bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | {key: value}))
        words = "problem '1': its prompt" if key == "prompt" and isinstance(value, str) else "bad.jsonl"
        measure(run, policy, "bad.jsonl", words, name)


def test_problems_of_one_id(run, policy):
    for ids in ((1, 1), ("a", "a"), (1, "1")):
        Path("bad.jsonl").write_text("\n".join(json.dumps(PROBLEM | {"id": id}) for id in ids))
        measure(run, policy, "bad.jsonl", "make ids unique")


VALUES = ["0", "-1", "1.5", "", "many", "nan", str(10**30)]
ARGUMENTS = {
    **dict.fromkeys(("samples", "rows", "microbatch-tokens", "threads", "critiques", "k"), VALUES),
    "max-new-tokens": VALUES,
    "threads": [*VALUES, "100000"],
    "k": [*VALUES, "17"],
    "seed": ["-1", "1.5", "", "x", "nan"],
    "top-k": ["-1", "1.5", "", "x", "nan"],
    "top-p": ["-1", "0", "1.01", "", "x", "nan", "inf"],
    "temperature": ["-1", "", "x", "nan", "inf", "1e-40", "1e300"],
    "stop": [""],
    "precision": ["", "16", "bf16-true"],
    "policy": ["", ".", "nowhere", "a/b", "../..", "/dev/null", "x" * 300, "x/y/z", "a\nb", "\x1b[31m"],
    "verifier": ["", ".", "nowhere", "a/b", "/dev/null"],
    "benchmark": ["", "=", "arithmetic=", "arithmetic=nowhere", "arithmetic=/dev/zero", "arithmetic=a/b:c", "gsm9k"],
    "out": ["problems.jsonl", "problems.jsonl/below", "/dev/null", "/dev/null/below", "/proc/below"],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_evaluate(run, policy, name):
    Path("problems.jsonl").write_text(json.dumps(PROBLEM))
    usual = {
        "policy": policy,
        "benchmark": "arithmetic=problems.jsonl",
        "out": "out",
        "max-new-tokens": 4,
        "threads": 1,
    }
    for value in ARGUMENTS[name]:
        arguments = [f"--{key}={setting}" for key, setting in (usual | {name: value}).items()]
        refused(run, "", *arguments, main=evaluate.main)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("import",),
        ("inspect",),
        ("export",),
        ("import", "a.jsonl", "--policy", "POLICY"),
        ("import", "a.jsonl", "--out", "out.parquet"),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "a.jsonl"),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "./link.parquet"),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "."),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", ""),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "a.jsonl/b.parquet"),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "a.jsonl/b/c.parquet"),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "/proc/b.parquet"),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "x" * 300),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "a\0b"),
        ("import", "a.jsonl", "--policy", "nowhere", "--out", "out.parquet"),
        ("import", "a.jsonl", "--policy", "a.jsonl", "--out", "out.parquet"),
        ("import", "a/b:train", "--policy", "POLICY", "--out", "out.parquet"),
        ("import", "", "--policy", "POLICY", "--out", "out.parquet"),
        ("import", "a\0b", "--policy", "POLICY", "--out", "out.parquet"),
        ("import", "x" * 300, "--policy", "POLICY", "--out", "out.parquet"),
        ("import", "a.jsonl", "--policy", "POLICY", "--out", "out.parquet", "--precision", "16"),
        *(
            ("import", "a.jsonl", "--policy", "POLICY", "--out", "o", f"--microbatch-tokens={n}")
            for n in (0, -1, 1, "x")
        ),
        *(("inspect", "a.parquet", f"--samples={n}") for n in (-1, "x", 1.5, 10**30)),
    ],
    ids=lambda value: " ".join(value)[:60].replace("\0", "NUL"),
)
def test_arguments_of_import_and_inspect(run, policy, arguments):
    Path("a.jsonl").write_bytes(LINE)
    Path("link.parquet").symlink_to("a.jsonl")
    refused(run, "", *(policy if word == "POLICY" else word for word in arguments), main=trajectories.main)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data.problems=/dev/zero"],
        ["--data.problems=null"],
        ["--data.problems=problems.jsonl/a"],
        ["--data.out=null"],
        ["--data.out="],
        ["--data.out=problems.jsonl"],
        ["--data.out=problems.jsonl/below"],
        ["--data.out=/proc/below"],
        ["--data.samples=0"],
        [f"--data.samples={10**30}"],
        ["--data.sampling.max_new_tokens=100"],
    ],
    ids=str,
)
def test_arguments_of_predict(run, policy, arguments):
    Path("problems.jsonl").write_text(json.dumps(PROBLEM))
    usual = ["--data.problems=problems.jsonl", "--data.out=out", "--data.samples=1", "--data.sampling.max_new_tokens=4"]
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}"]
    refused(run, "", "predict", *config, *usual, *arguments, main=train.main)
