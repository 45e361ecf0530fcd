"""Bad input and configuration: one clear sentence, exit code 2, nothing written."""

import io
import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_policy, make_trajectories, refused, write
from safetensors.torch import load_file, save_file

import evaluate
import train
from topr.tasks.imitation import make_tokenizer

CONFIG = ["--config", ROOT / "configs" / "arithmetic.yaml", "--data.val=null", "--data.test=null"]
LOSS = "--model.loss.init_args"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    policy = make_policy(folder / "base")
    return policy, write(folder / "train.parquet", policy, make_trajectories(policy))


def fit(policy, data, *arguments):
    return ["fit", *CONFIG, f"--model.policy={policy}", f"--data.train={data}", *arguments]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.train=missing.parquet"], "'missing.parquet' is no file"),
        (["--data.train=null"], "data.train is not set"),
        (["--data.val=missing.jsonl"], "missing.jsonl cannot be read"),
        (["--data.microbatch_tokens=9"], "raise data.microbatch_tokens"),
        (["--data.batch_size=0"], "data.batch_size is 0"),
        (["--data.bach_size=3"], "bach_size"),
        (["--model.loss.init_args.bplus=3"], "bplus"),
        (["--model.loss=topr.losses.TOPPER"], "TOPPER"),
        (["--model.task=topr.tasks.Geometry"], "Geometry"),
        (["--model.optimizer=torch.optim.Adamw"], "Adamw"),
        ([f"{LOSS}.a_minus=2"], "0 <= a <= b"),
        ([f"{LOSS}.b_plus=0.5"], "0 <= a <= b"),
        ([f"{LOSS}.baseline=0.1", f"{LOSS}.positive_share=0.2"], "both baseline = 0.1 and positive_share = 0.2"),
        ([f"{LOSS}.ratio=tokens"], "ratio"),
        (["--trainer.accumulate_grad_batches=2"], "data.microbatch_tokens"),
        (["--trainer.strategy=fsdp"], "configs/fsdp.yaml"),
        (["--trainer.strategy=lightning.pytorch.strategies.FSDPStrategy"], "configs/fsdp.yaml"),
        (["--data.num_workers=-1"], "data.num_workers is -1"),
        (["--model.threads=0"], "model.threads is 0"),
        (["--model.sampler.init_args.rows=0"], "rows is 0"),
        (["--trainer.accelerator=gpu"], "gpu"),
        (["--trainer.val_check_interval=5.5"], "val_check_interval"),
        (["--trainer.logger=false"], "leave the logger on"),
        (["--trainer.limit_train_batches=3"], "trainer.max_steps"),
        (["--model.loss=topr.losses.Loss"], "topr.losses.Loss"),
        (["--model.task=topr.tasks.Task"], "topr.tasks.Task"),
        (["--model.optimizer.init_args.lr=-1"], "model.optimizer refuses its arguments"),
        (["--trainer.precision=bf16-true"], "float32"),
        (["--model.policy=nowhere"], "neither a folder nor a model"),
        (["--config=nowhere.yaml"], "nowhere.yaml"),
        (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
    ],
    ids=lambda value: value[-1].lstrip("-") if isinstance(value, list) else "",
)
def test_bad_configuration(run, good, arguments, words):
    refused(run, words, *fit(*good, *arguments))


def test_unknown_subcommand(run):
    refused(run, "fitt", "fitt")


def test_policy_folders_without_a_model(run, good, tmp_path):
    policy, data = good
    for missing in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = shutil.copytree(policy, tmp_path / f"without-{missing}")
        (folder / missing).unlink()
        refused(run, str(folder), *fit(folder, data))
    (folder := tmp_path / "empty").mkdir()
    refused(run, "holds no model", *fit(folder, data))
    broken = shutil.copytree(policy, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x" * 100)
    refused(run, "broken", *fit(broken, data))


def test_every_command_leaves_no_trace(run, good, tmp_path):
    problems = ROOT / "data" / "arithmetic" / "val.jsonl"
    files = [f"--data.{split}={problems}" for split in ("val", "test", "problems")]
    for command in ("validate", "test", "predict"):
        refused(run, "nowhere", command, *CONFIG, *files, "--data.out=out", "--model.policy=nowhere")
    (tmp_path / "twice.jsonl").write_text('{"id": 1, "prompt": "1>", "gold": "1"}\n' * 2)
    refused(run, "make ids unique", "validate", *CONFIG, f"--model.policy={good[0]}", "--data.val=twice.jsonl")


def test_weights_that_are_missing_and_code_that_is_not_asked_for(run, good, tmp_path, monkeypatch):
    policy, data = good
    incomplete = shutil.copytree(policy, tmp_path / "incomplete")
    weights = load_file(incomplete / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    refused(run, "lacks the weights model.layers.1.mlp.up_proj.weight", *fit(incomplete, data))
    hostile = shutil.copytree(policy, tmp_path / "hostile")
    (hostile / "evil.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')")
    config = json.loads((hostile / "config.json").read_text()) | {"model_type": "evil"}
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (hostile / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    refused(run, str(hostile), *fit(hostile, data))
    assert not (tmp_path / "PWNED").exists()


def change(table: pa.Table, column: str, row: int, value) -> pa.Table:
    values = table[column].to_pylist()
    values[row] = value
    index = table.schema.get_field_index(column)
    return table.set_column(index, pa.field(column, table[column].type), pa.array(values, table[column].type))


BAD_ROWS = [
    ("ref_logprobs", lambda old: old[:-1], "row 5 (prompt '1'): response_ids and ref_logprobs differ in length"),
    ("ref_logprobs", lambda old: [math.nan] + old[1:], "row 5 (prompt '1'): ref_logprobs holds a log-prob that is"),
    ("ref_logprobs", lambda old: [0.5] + old[1:], "row 5"),
    ("ref_logprobs", lambda old: [-math.inf] + old[1:], "row 5"),
    ("ref_logprobs", lambda old: [None] + old[1:], "row 5"),
    ("ref_logprobs", lambda old: None, "ref_logprobs is null"),
    ("reward", lambda old: math.nan, "row 5 (prompt '1'): the reward is NaN or infinite"),
    ("reward", lambda old: None, "reward is null"),
    ("response_ids", lambda old: [], "the response is empty"),
    ("prompt_ids", lambda old: [], "prompt_ids is empty"),
    ("response_ids", lambda old: [20] + old[1:], "outside the policy's vocabulary of 20"),
    ("prompt_ids", lambda old: [-1] + old[1:], "outside the policy's vocabulary of 20"),
    ("prompt_ids", lambda old: old * 100, "raise data.microbatch_tokens or drop the row"),
]


@pytest.mark.parametrize(("column", "edit", "words"), BAD_ROWS)
def test_bad_rows(run, good, tmp_path, column, edit, words):
    policy, data = good
    table = pq.read_table(data)
    pq.write_table(change(table, column, 5, edit(table[column][5].as_py())), tmp_path / "bad.parquet")
    refused(run, words, *fit(policy, tmp_path / "bad.parquet"))


def test_bad_columns_and_files(run, good, tmp_path):
    policy, data = good
    table, bad = pq.read_table(data), tmp_path / "bad.parquet"
    for name in ("reward", "ref_logprobs", "prompt_ids", "group"):
        pq.write_table(table.drop_columns([name]), bad)
        refused(run, f"column '{name}' is missing", *fit(policy, bad))
    index = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(index, "reward", pa.array(["good"] * len(table))), bad)
    refused(run, "column 'reward' has type string, expected float", *fit(policy, bad))
    pq.write_table(table.set_column(index, "reward", pa.array([True] * len(table))), bad)
    refused(run, "write +1 and -1", *fit(policy, bad))
    pq.write_table(table.slice(0, 0), bad)
    refused(run, "holds no trajectory", *fit(policy, bad))
    bad.write_bytes(data.read_bytes()[:-100])
    refused(run, "no readable Parquet file", *fit(policy, bad))
    bad.write_text('{"prompt": "1"}')
    refused(run, "no readable Parquet file", *fit(policy, bad))
    pq.write_table(table.replace_schema_metadata({"topr": '{"schema": 9}'}), bad)
    refused(run, "schema 9", *fit(policy, bad))


def test_tokenizer_that_does_not_match(run, good, tmp_path):
    policy, data = good
    other = shutil.copytree(policy, tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["x"])
    tokenizer.save_pretrained(other)
    refused(run, "another tokenizer", *fit(other, data))


def test_log_probs_that_do_not_match_the_policy_that_claims_them(run, good, tmp_path):
    policy, _ = good
    wrong = write(tmp_path / "wrong.parquet", policy, make_trajectories(policy, shift=0.5))
    sentence = refused(run, "score the responses again", *fit(policy, wrong))
    assert "worst: row" in sentence
    honest = write(tmp_path / "honest.parquet", policy, make_trajectories(policy, shift=0.5), policy="another")
    code, _, err = run(train.main, *fit(policy, honest, "--trainer.enable_progress_bar=false"))
    assert code == 0, err
    both = write(tmp_path / "unknown.parquet", policy, make_trajectories(policy, 9), policy=None, precision=None)
    refused(run, "score the responses again", *fit(policy, f"[{wrong},{both}]"))  # the others do not excuse it
    rough = write(tmp_path / "rough.parquet", policy, make_trajectories(policy), precision="bf16-mixed")
    code, _, err = run(train.main, *fit(policy, rough, "--trainer.enable_progress_bar=false"))
    assert code == 0, err
    far = write(tmp_path / "far.parquet", policy, make_trajectories(policy, shift=3.0), precision="bf16-mixed")
    sentence = refused(run, "score the responses again", *fit(policy, far))
    assert "the median |log pi - log mu| per token" in sentence


def test_files_of_other_widths_are_welcome(run, good, tmp_path):
    policy, data = good
    table = pq.read_table(data)
    wide = {"prompt_ids": pa.large_list(pa.int64()), "ref_logprobs": pa.list_(pa.float64()), "reward": pa.int64()}
    for name, kind in {**wide, "group": pa.large_string()}.items():
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
    pq.write_table(table, tmp_path / "wide.parquet")
    for files in (tmp_path / "wide.parquet", f"[{tmp_path / 'wide.parquet'},{data}]"):
        code, _, err = run(train.main, *fit(policy, files, "--trainer.enable_progress_bar=false"))
        assert code == 0, err


def test_rewards_of_one_sign(run, good, tmp_path):
    policy, _ = good
    trajectories = make_trajectories(policy)
    for trajectory in trajectories:
        trajectory.reward = 1.0
    ones = write(tmp_path / "ones.parquet", policy, trajectories)
    refused(run, "every reward is 1", *fit(policy, ones, f"{LOSS}.positive_share=0.2"))
    with pytest.warns(UserWarning, match="only positives are learned"):
        code, out, err = run(train.main, *fit(policy, ones, "--trainer.enable_progress_bar=false"))
    assert code == 0, err
    for trajectory in trajectories:
        trajectory.reward = -1.0
    minus = write(tmp_path / "minus.parquet", policy, trajectories)
    overlay = ROOT / "configs" / "loss" / "positives_only.yaml"
    refused(run, "no trajectory has a gradient", *fit(policy, minus, "--config", overlay))


def test_predict_refuses_what_it_would_mix_up(run, good, tmp_path):
    policy, data = good
    problems = f"--data.problems={ROOT / 'data' / 'arithmetic' / 'val.jsonl'}"
    predict = ["predict", *CONFIG, f"--model.policy={policy}", problems]
    refused(run, "data.out is not set", *predict)
    (tmp_path / "out").mkdir()
    shutil.copy(data, tmp_path / "out" / "old.parquet")
    refused(run, "holds other trajectories", *predict, "--data.out=out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "nowhere", "--benchmark", "arithmetic"], "neither a folder nor a model"),
        (["--policy", "POLICY", "--benchmark", "algebra"], "'algebra' is unknown"),
        (["--policy", "POLICY", "--benchmark", "arithmetic=nowhere.jsonl"], "nowhere.jsonl"),
        (["--policy", "POLICY", "--benchmark", "arithmetic", "--samples", "0"], "--samples is 0"),
        (["--policy", "POLICY", "--benchmark", "arithmetic", "--rows", "0"], "--rows is 0"),
        (["--policy", "POLICY", "POLICY", "--benchmark", "arithmetic"], "twice"),
        (["--policy", "POLICY", "--benchmark", "arithmetic", "--temperature", "-1"], "temperature"),
    ],
)
def test_evaluate_refuses(run, good, arguments, words):
    here = {"POLICY": good[0], "arithmetic": f"arithmetic={ROOT / 'data' / 'arithmetic' / 'val.jsonl'}"}
    arguments = [here.get(argument, argument) for argument in arguments]
    refused(run, words, *arguments, main=evaluate.main)


def test_ratios_that_stay_one_are_warned_about(run, good):
    with pytest.warns(UserWarning, match="has not moved"):
        code, _, err = run(
            train.main, *fit(*good, "--data.batch_size=8", "--model.optimizer.init_args.lr=0"),
            "--trainer.enable_progress_bar=false",
        )  # fmt: skip
    assert code == 0, err


def test_ratios_that_move_are_not_warned_about(run, good, recwarn):
    code, _, err = run(train.main, *fit(*good, "--data.batch_size=8"), "--trainer.enable_progress_bar=false")
    assert code == 0, err
    assert not [str(w.message) for w in recwarn if "has not moved" in str(w.message)]
