"""One thing changes between two commands: what depends on it is computed again, all else is kept,
and what does not fit together is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, make_policy, make_trajectories, rejected, slow, write
from safetensors.torch import load_file

import evaluate
import train
from topr.datamodule import TrajectoryDataModule
from topr.run.identity import policy_hash
from topr.tasks import Arithmetic
from topr.trajectories import read_metadata, read_trajectories
from topr.trajectories.__main__ import main as trajectories
from topr.trajectories.curate import curate

PARITY = """
from topr.tasks import Grade, Task


class Parity(Task):
    def grade(self, response, gold):
        right = len(response) % 2 {operator} 0
        return Grade(1.0 if right else -1.0, True, None)
"""
CHECKPOINT = "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint"
FEW = ["--data.batch_size=8", "--trainer.enable_progress_bar=false", CHECKPOINT]
FEW += ["--trainer.callbacks.init_args.every_n_train_steps=1"]
OPTIMIZER = "--model.optimizer"


@pytest.fixture
def task(run, monkeypatch):
    """Writes my_task.py, as a user does, with an operator; the next command imports it anew."""
    monkeypatch.syspath_prepend(run.folder)

    def task(operator):
        Path("my_task.py").write_text(PARITY.format(operator=operator))
        sys.modules.pop("my_task", None)

    yield task
    sys.modules.pop("my_task", None)


def succeed(run, main, *arguments) -> str:
    code, out, err = run(main, *arguments)
    assert code == 0, err
    return out


def grades(folder: Path) -> tuple[list, list]:
    """What decides a response and its scores, and its reward, of all files."""
    rows = []
    for path in sorted(folder.glob("*.parquet")):
        rows += read_trajectories(path)
    kept = [(row.prompt_id, row.response_ids, row.ref_logprobs, row.finished) for row in rows]
    return kept, [row.reward for row in rows]


def test_a_changed_grader_grades_kept_responses_again(run, tiny, task):
    _, arguments = tiny
    predict = ["predict", *arguments, "--model.task=my_task.Parity", "--data.out=out"]
    task("==")
    succeed(run, train.main, *predict)
    kept, before = grades(Path("out"))
    task("!=")
    assert "graded again" in succeed(run, train.main, *predict)
    assert grades(Path("out")) == (kept, [-reward for reward in before])
    assert len(set(before)) == 2
    assert "graded again" not in succeed(run, train.main, *predict)


def test_a_changed_grader_changes_an_evaluation(run, tiny, task):
    policy, _ = tiny
    command = ["--policy", policy, "--benchmark", "my_task.Parity=problems.jsonl"]
    command += ["--samples", 4, "--max_new_tokens", 8, "--out", "out"]
    shares = []
    for operator in ("==", "!="):
        task(operator)
        succeed(run, evaluate.main, *command)
        results = json.loads(Path("out/results.json").read_text())
        shares.append(results[str(policy)]["my_task.Parity"]["pass@1"]["mean"])
    assert shares[0] == pytest.approx(1 - shares[1]) != shares[1]
    assert len(list(Path("out").glob("responses/*/*.parquet"))) == 1


HELPERS = {
    "lib/rules.py": "from lib.deeper import ZERO\n\nEVEN = ZERO\n",
    "lib/deeper.py": "ZERO = 0\n",
}


@pytest.mark.parametrize(
    ("file", "code"), [("lib/rules.py", "EVEN = 1\n"), ("lib/deeper.py", "ZERO = 1\n")]
)
def test_a_change_in_what_a_grader_imports_is_noticed(run, tiny, task, file, code):
    """A constant, directly or by way of another module."""
    _, arguments = tiny
    predict = ["predict", *arguments, "--model.task=my_task.Parity", "--data.out=out"]
    task("==")
    grader = Path("my_task.py").read_text().replace("% 2 == 0", "% 2 == EVEN")
    Path("my_task.py").write_text("from lib.rules import EVEN\n" + grader)
    Path("lib").mkdir()
    for name, text in HELPERS.items():
        Path(name).write_text(text)
    succeed(run, train.main, *predict)
    _, before = grades(Path("out"))
    Path(file).write_text(code)
    for name in ("my_task", "lib", "lib.rules", "lib.deeper"):
        sys.modules.pop(name)
    assert "graded again" in succeed(run, train.main, *predict)
    assert grades(Path("out"))[1] == [-reward for reward in before]
    assert "graded again" not in succeed(run, train.main, *predict)
    for name in ("lib", "lib.rules", "lib.deeper"):
        sys.modules.pop(name, None)


WORDS = """
from topr.io.settings import plain
from topr.run.identity import source_hash
from topr.tasks import Grade, Task

class Words(Task):
    def __init__(self):
        self.units = {"cm", "m", "km", "mm", "dm"}
        self.others = frozenset(self.units)

    def grade(self, response, gold):
        return Grade(1.0, True, None)

print(source_hash(Words()))
"""


def test_a_task_that_holds_a_set_is_the_same_in_another_process(tmp_path):
    (tmp_path / "words.py").write_text(WORDS)
    hashes = set()
    for seed in "123":  # of the order of sets
        found = subprocess.run(
            [sys.executable, tmp_path / "words.py"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        hashes.add(found.stdout)
    assert len(hashes) == 1


def test_a_changed_gold_answer_is_graded_again(run, tiny):
    _, arguments = tiny
    predict = ["predict", *arguments, "--data.out=out"]
    succeed(run, train.main, *predict)
    kept, _ = grades(Path("out"))
    problems = Path("problems.jsonl")
    problems.write_text(problems.read_text().replace('"gold": "3"', '"gold": "4"'))
    succeed(run, train.main, *predict)
    assert grades(Path("out"))[0] == kept
    golds = {row.prompt: row.gold for row in read_trajectories("out/part-00000.parquet")}
    assert golds["2+1>"] == "4" and golds["1+1>"] == "2"


@pytest.fixture
def sources(tmp_path, policy):
    """Four files in which the groups have the same names: prompts, policies, iterations differ."""
    rows = make_trajectories(policy, 8)
    files = [write(tmp_path / "first.parquet", policy, rows)]
    prompts = make_trajectories(policy, 8, seed=1)
    files.append(write(tmp_path / "prompts.parquet", policy, prompts))
    files.append(write(tmp_path / "policy.parquet", policy, rows, policy="another"))
    files.append(write(tmp_path / "iteration.parquet", policy, rows, iteration=3))
    return list(map(str, files))


def groups(policy, files) -> list[list[int]]:
    """The rows of each group of a training set."""
    data = TrajectoryDataModule(str(policy), Arithmetic(), train=files)
    data.setup("fit")
    count = data.data.group.max() + 1
    return [np.flatnonzero(data.data.group == number).tolist() for number in range(count)]


def test_a_group_is_one_prompt_one_policy_one_iteration(policy, sources, tmp_path):
    expected = [list(range(start, start + 4)) for start in range(0, 32, 4)]
    assert groups(policy, sources) == expected
    curate("uniform", sources, tmp_path / "kept.parquet", budget=4)
    assert groups(policy, [str(tmp_path / "kept.parquet")]) == expected
    curate("uniform", sources, tmp_path / "fewer.parquet", budget=3)
    assert list(map(len, groups(policy, [str(tmp_path / "fewer.parquet")]))) == [3] * 8
    again = [
        sources[0],
        str(write(tmp_path / "again.parquet", policy, read_trajectories(sources[0]))),
    ]
    assert list(map(len, groups(policy, again))) == [8, 8]


def fit(run, arguments, *more) -> str:
    return succeed(run, train.main, "fit", *arguments, *FEW, *more)


CHANGES = {
    "data.batch_size": ["--data.batch_size=6"],
    "data.batching (data.whole_groups)": ["--data.whole_groups=true"],
    "data.advantage": ["--data.advantage=Baseline", "--data.advantage.init_args.c=0.1"],
    "model.gradient_clip_val": ["--model.gradient_clip_val=0.5"],
    "model.loss": ["--model.loss=topr.losses.TIS"],
    "model.optimizer": ["--model.optimizer.init_args.lr=0.5"],
    "seed_everything, data.val, data.test, data.sampling or the task": ["--seed_everything=7"],
    "data.val, data.test, data.sampling or the task": ["--data.samples=2"],
    "trainer.precision": ["--trainer.precision=bf16-mixed"],
    "trainer.limit_train_batches": ["--trainer.limit_train_batches=2"],
}


@pytest.fixture
def stopped(run, tiny):
    """A run that has made one update, and its checkpoint."""
    _, arguments = tiny
    fit(run, arguments, "--trainer.max_steps=1")
    (checkpoint,) = Path("runs/arithmetic/version_0/checkpoints").glob("*.ckpt")
    Path("runs/arithmetic/version_0/summary.json").unlink()
    return arguments, checkpoint


@pytest.mark.parametrize("where", ["last", slow("its path")])
def test_a_run_does_not_go_on_with_other_settings(run, stopped, where):
    arguments, checkpoint = stopped
    given = f"--ckpt_path={'last' if where == 'last' else checkpoint}"
    config = Path("runs/arithmetic/version_0/config.yaml")
    before = config.read_text()
    for name, change in CHANGES.items():
        words = f"of a run with another {name}"
        sentence = rejected(run, words, "fit", *arguments, *FEW, *change, given)
        assert f"--model.weights {checkpoint}" in sentence
    assert config.read_text() == before
    assert "resuming" in fit(run, arguments, "--ckpt_path=last", "--trainer.max_steps=2")
    assert config.read_text() != before


def test_a_run_does_not_go_on_with_other_data(run, stopped, tiny):
    arguments, _ = stopped
    policy, _ = tiny
    data = Path("train.parquet")
    original = data.read_bytes()
    write(data, policy, make_trajectories(policy, 15))
    given = ["fit", *arguments, *FEW, "--ckpt_path=last"]
    rejected(run, "of a run with another data.train;", *given)
    Path("moved.parquet").write_bytes(original)  # content counts, not the name
    assert "resuming" in fit(run, arguments, "--ckpt_path=last", "--data.train=moved.parquet")


def test_a_run_does_not_go_on_with_another_policy_or_problems(run, stopped, tiny):
    arguments, _ = stopped
    policy, _ = tiny
    given = ["fit", *arguments, *FEW, "--ckpt_path=last"]
    problems = Path("problems.jsonl")
    lines = problems.read_text()
    problems.write_text(lines.replace('"gold": "3"', '"gold": "4"'))
    rejected(run, "another data.val, data.test, data.sampling or the task", *given)
    problems.write_text(lines)
    make_policy(policy, seed=1)
    rejected(run, "another model.policy", *given)


def test_a_run_does_not_go_on_with_another_loss_or_advantage(run, tiny, monkeypatch):
    _, arguments = tiny
    monkeypatch.syspath_prepend(run.folder)
    own = ["--model.loss=my_loss.Own", "--data.advantage=my_loss.Sign"]
    code = Path("my_loss.py")
    code.write_text(
        "from topr.advantages import Baseline\nfrom topr.losses import TOPR\n"
        "class Own(TOPR):\n    factor = 1\nclass Sign(Baseline):\n    pass\n"
    )
    fit(run, arguments, *own, "--trainer.max_steps=1")
    given = ["fit", *arguments, *FEW, *own, "--ckpt_path=last"]
    code.write_text(code.read_text().replace("factor = 1", "factor = 3"))
    rejected(run, "of a run with another model.loss, data.advantage;", *given)
    sys.modules.pop("my_loss")


@pytest.mark.parametrize("place", ["optimizer", slow("lr_scheduler")])
def test_a_run_does_not_go_on_with_another_code_of_its_optimizer(run, tiny, monkeypatch, place):
    _, arguments = tiny
    monkeypatch.syspath_prepend(run.folder)
    code = Path("my_optim.py")
    code.write_text(
        "import torch\nclass Own(torch.optim.SGD):\n    factor = 1\n"
        "class Constant(torch.optim.lr_scheduler.ConstantLR):\n    pass\n"
    )
    own = {
        "optimizer": ["--model.optimizer=my_optim.Own", "--model.optimizer.lr=0.1"],
        "lr_scheduler": ["--model.lr_scheduler=my_optim.Constant"],
    }[place]
    fit(run, arguments, *own, "--trainer.max_steps=1")
    given = [*own, "--ckpt_path=last"]
    code.write_text(code.read_text().replace("factor = 1", "factor = 3"))
    sys.modules.pop("my_optim")
    words = "of a run with another code of model.optimizer or model.lr_scheduler;"
    rejected(run, words, "fit", *arguments, *FEW, *given)
    code.write_text(code.read_text().replace("factor = 3", "factor = 1"))
    sys.modules.pop("my_optim")
    assert "resuming" in fit(run, arguments, *given)
    sys.modules.pop("my_optim")


@pytest.mark.parametrize(
    ("made", "told", "named"),
    [
        ("--trainer.max_steps=2", "--trainer.max_steps=1", "trainer.max_steps;"),
        slow("--trainer.max_epochs=2", "--trainer.max_epochs=1", "trainer.max_epochs;"),
    ],
)
def test_a_run_that_has_gone_on_for_longer_keeps_its_policy(run, tiny, made, told, named):
    _, arguments = tiny
    fit(run, arguments, made)
    folder = Path("runs/arithmetic/version_0")
    policy = (folder / "policy/model.safetensors").read_bytes()
    summary = (folder / "summary.json").read_text()
    given = ["fit", *arguments, *FEW, told, "--ckpt_path=last"]
    rejected(run, f"of a run with another {named}", *given)
    assert (folder / "policy/model.safetensors").read_bytes() == policy
    assert (folder / "summary.json").read_text() == summary
    fit(run, arguments, made, "--ckpt_path=last")
    assert (folder / "policy/model.safetensors").read_bytes() == policy


def test_a_run_that_starts_afresh_in_its_folder_writes_its_own_hyperparameters(run, tiny):
    _, arguments = tiny
    given = ["fit", *arguments, *FEW, "--trainer.max_steps=1"]
    succeed(run, train.main, *given)
    folder = Path("runs/arithmetic/version_0")
    (folder / "summary.json").unlink()  # as if it had been killed before its first checkpoint
    for checkpoint in folder.rglob("*.ckpt"):
        checkpoint.unlink()
    before = (folder / "hparams.yaml").read_text()
    changed = "--model.gradient_clip_val=0.25"
    succeed(run, train.main, *given, "--ckpt_path=last", changed)
    after = (folder / "hparams.yaml").read_text()
    assert "gradient_clip_val: 0.25" in after and "gradient_clip_val: 0.25" not in before
    assert not Path("runs/arithmetic/version_1").exists()


def test_a_refused_run_keeps_what_it_logged(run, tiny):
    _, arguments = tiny
    csv = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs"]
    csv += ["--trainer.logger.name=csv", "--trainer.max_steps=2"]
    fit(run, arguments, *csv)
    rows = Path("runs/csv/version_0/metrics.csv").read_text()
    given = ["fit", *arguments, *FEW, *csv, "--ckpt_path=last", f"{OPTIMIZER}.init_args.lr=1"]
    code, _, error = run(train.main, *given)
    assert code == 2 and "of a run with another model.optimizer" in error
    assert Path("runs/csv/version_0/metrics.csv").read_text() == rows


def test_half_a_row_of_a_killed_run_is_dropped(run, tiny):
    _, arguments = tiny
    csv = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs"]
    csv += ["--trainer.logger.name=csv"]
    fit(run, arguments, *csv, "--trainer.max_steps=2")
    file = Path("runs/csv/version_0/metrics.csv")
    before = file.read_text()
    file.write_text(before + before.splitlines()[-1][:3])
    fit(run, arguments, *csv, "--trainer.max_steps=3", "--ckpt_path=last")
    assert len(file.read_text().splitlines()) > len(before.splitlines())


def test_a_resumed_run_stores_a_configuration_that_starts_anew(run, stopped):
    arguments, _ = stopped
    fit(run, arguments, "--trainer.max_steps=2", "--ckpt_path=last")
    config = yaml.safe_load(Path("runs/arithmetic/version_0/config.yaml").read_text())
    assert config["ckpt_path"] is None


def test_a_run_goes_on_beside_a_copy_of_it_and_without_a_checkpoint_that_was_moved(run, stopped):
    arguments, checkpoint = stopped
    shutil.copytree("runs/arithmetic/version_0", "runs/arithmetic/version_0_backup")
    checkpoint.rename(checkpoint.with_name("kept.ckpt"))
    fit(run, arguments, "--trainer.max_steps=2", "--ckpt_path=last")
    names = {path.name for path in checkpoint.parent.glob("*.ckpt")}
    assert "kept.ckpt" in names and len(names) == 2


def test_a_new_run_starts_from_the_weights_of_a_checkpoint(run, stopped, tiny):
    arguments, checkpoint = stopped
    policy, _ = tiny
    write(Path("other.parquet"), policy, make_trajectories(policy, 15))
    still = [f"{OPTIMIZER}=torch.optim.SGD", f"{OPTIMIZER}.init_args.lr=0"]
    more = [f"--model.weights={checkpoint}", "--data.train=other.parquet", *still]
    fit(run, arguments, *more, "--trainer.logger.init_args.name=new")
    exported = load_file("runs/new/version_0/policy/model.safetensors")
    stored = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, weight in exported.items():
        assert torch.equal(weight, stored[f"policy.model.{name}"])
    rejected(run, "is not a checkpoint", "fit", *arguments, *FEW, "--model.weights=train.parquet")
    given = ["fit", *arguments, *FEW, *more, f"--model.weights={exported_checkpoint()}"]
    given += ["--trainer.logger.init_args.name=new", "--ckpt_path=last"]
    rejected(run, "of a run with another model.weights", *given)


def exported_checkpoint() -> Path:
    """The last checkpoint of the run `new`."""
    (path,) = Path("runs/new/version_0/checkpoints").glob("*.ckpt")
    return path


def test_trajectories_are_of_the_weights_that_sampled_them(run, stopped, tiny, caplog):
    arguments, checkpoint = stopped
    policy, _ = tiny
    succeed(run, train.main, "predict", *arguments, "--data.out=base")
    given = ["predict", *arguments, f"--ckpt_path={checkpoint}"]
    rejected(run, "holds responses of another policy", *given, "--data.out=base")
    succeed(run, train.main, *given, "--data.out=trained")
    (base,) = Path("base").glob("*.parquet")
    (trained,) = Path("trained").glob("*.parquet")
    assert read_metadata(base)["policy"] == policy_hash(str(policy))
    exported = policy_hash("runs/arithmetic/version_0/policy")
    assert read_metadata(trained)["policy"] == exported != policy_hash(str(policy))
    new = ["--data.train=trained/*.parquet", "--trainer.logger.init_args.name=new"]
    fit(run, arguments, *new, f"--model.weights={checkpoint}")
    assert "another or an unknown policy" not in caplog.text
    fit(run, arguments, *new)
    assert "another or an unknown policy sampled 100%" in caplog.text


LORA = ["--config", ROOT / "configs" / "lora.yaml", "--model.lora.rank=2"]


@pytest.mark.parametrize(
    "change",
    [
        slow(["--model.lora.rank=3"]),
        ["--model.lora.alpha=3"],
        slow(["--model.lora.targets=[q_proj]"]),
        None,
    ],
)
def test_adapters_are_loaded_with_their_own_settings_or_not_at_all(run, tiny, change):
    _, arguments = tiny
    fit(run, arguments, *LORA, "--trainer.max_steps=1")
    (checkpoint,) = Path("runs/arithmetic/version_0/checkpoints").glob("*.ckpt")
    given = ["test", *arguments, f"--ckpt_path={checkpoint}"]
    rejected(run, "was written with model.lora", *given, *([*LORA, *change] if change else []))
    succeed(run, train.main, *given, *LORA)
    make_policy(tiny[0], seed=1, scale=0.5)
    rejected(run, "was trained from another model.policy", *given, *LORA)


def test_a_checkpoint_of_another_policy_is_not_loaded(run, stopped, tiny):
    arguments, checkpoint = stopped
    given = ["test", *arguments, f"--ckpt_path={checkpoint}"]
    rejected(run, "was written with model.lora None", *given, *LORA)
    wide = make_policy(Path("wide"), intermediate_size=32)
    slower = Path(shutil.copytree(tiny[0], "slower"))
    config = json.loads((slower / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (slower / "config.json").write_text(json.dumps(config))
    for other in (wide, slower):
        words = "was trained from another model.policy"
        rejected(run, words, *given, f"--model.policy={other}")
        start = ["fit", *arguments, *FEW, f"--model.weights={checkpoint}"]
        rejected(run, words, *start, f"--model.policy={other}")


@pytest.mark.parametrize("way", ["--ckpt_path", "--model.weights"])
def test_a_checkpoint_of_an_earlier_version_is_not_trusted(run, stopped, way):
    arguments, checkpoint = stopped
    content = torch.load(checkpoint, weights_only=True)
    for state in ({"validated": (-1, {})}, None):
        content["topr"] = state
        torch.save({key: part for key, part in content.items() if part is not None}, checkpoint)
        given = ["fit", *arguments, *FEW, f"{way}={checkpoint}"]
        rejected(run, f"{checkpoint} does not say what it was trained on", *given)


def test_results_are_not_replaced_without_a_word(run, tiny):
    policy, arguments = tiny
    Path("notes.parquet").write_text("mine")
    Path("rows.jsonl").write_text('{"prompt": "1>", "response": "2", "reward": 1}\n')
    commands = {
        "import": ["rows.jsonl", f"--policy={policy}"],
        "curate": ["uniform", "train.parquet"],
    }
    for name, rest in commands.items():
        given = [name, *rest, "--out=notes.parquet"]
        rejected(run, "--out notes.parquet exists", *given, main=trajectories)
        assert Path("notes.parquet").read_text() == "mine"
    succeed(run, trajectories, "curate", *commands["curate"], *given[-1:], "--overwrite=true")
    kept = len(read_trajectories("notes.parquet"))
    assert kept > 1
    everything = ["curate", "uniform", "*.parquet", *given[-1:], "--overwrite=true"]
    rejected(run, "notes.parquet is one of the files", *everything, main=trajectories)
    assert len(read_trajectories("notes.parquet")) == kept

    command = ["--policy", policy, "--benchmark", "arithmetic=problems.jsonl", "--out", "out"]
    command += ["--max_new_tokens", 8, "--samples"]
    succeed(run, evaluate.main, *command, 4)
    results = Path("out/results.json").read_text()
    succeed(run, evaluate.main, *command, 4)
    assert Path("out/results.json").read_text() == results
    rejected(run, "out holds results of other arguments", *command, 2, main=evaluate.main)
    assert Path("out/results.json").read_text() == results
    Path("out/arguments.json").unlink()  # as beside results of earlier versions
    rejected(run, "out holds results of other arguments", *command, 4, main=evaluate.main)
    succeed(run, evaluate.main, *command, 2, "--overwrite", "true")
    assert Path("out/results.json").read_text() != results
    hold = "from topr.io import lock; lock('held'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=run.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as other:  # fmt: skip
        other.stdout.readline()
        held = [*command, 2, "--out", "held"]
        rejected(run, "another process is writing to held", *held, main=evaluate.main)
        other.communicate(b"\n")


def test_responses_are_scored_when_they_are_to_be_trained_on(run, tiny, caplog):
    policy, arguments = tiny
    command = ["--policy", policy, "--benchmark", "arithmetic=problems.jsonl", "--out", "out"]
    command += ["--samples", 4, "--max_new_tokens", 8]
    succeed(run, evaluate.main, *command)
    train_on = ["fit", *arguments, *FEW, "--data.train=out/responses.parquet"]
    rejected(run, "out/responses.parquet holds responses without log-probs", *train_on)
    before = [row.response_ids for row in read_trajectories("out/responses.parquet")]
    succeed(run, evaluate.main, *command, "--log_probs", "true")
    rows = read_trajectories("out/responses.parquet")
    assert [row.response_ids for row in rows] == before
    succeed(run, train.main, *train_on, "--data.advantage.c=-2")
    assert "another or an unknown policy" not in caplog.text


def test_responses_of_several_tokenizers_are_not_trained_on(run, tiny):
    policy, arguments = tiny
    other = make_policy(Path("other"))
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["added_tokens"][0]["lstrip"] = True
    (other / "tokenizer.json").write_text(json.dumps(settings))
    command = ["--policy", policy, other, "--benchmark", "arithmetic=problems.jsonl"]
    command += ["--samples", 4, "--max_new_tokens", 8, "--log_probs", "true", "--out", "out"]
    succeed(run, evaluate.main, *command)
    train_on = ["fit", *arguments, *FEW, "--data.train=out/responses.parquet"]
    rejected(run, "out/responses.parquet has another tokenizer than", *train_on)


def test_a_loss_that_sees_signs_needs_them(run, tiny):
    policy, arguments = tiny
    rows = make_trajectories(policy)
    for row in rows:
        row.reward = float(row.reward > 0)
    write(Path("binary.parquet"), policy, rows)
    kto = ["--config", ROOT / "configs/loss/kto.yaml", "--data.train=binary.parquet"]
    rejected(run, "advantages are 0, but KTO sees their signs only", "fit", *arguments, *FEW, *kto)
    fit(run, arguments, *kto, "--data.advantage=Baseline", "--data.advantage.init_args.c=0.5")


def test_an_optimizer_that_needs_a_closure_is_refused(run, tiny):
    _, arguments = tiny
    words = "missing a required argument: 'closure'"
    rejected(run, words, "fit", *arguments, *FEW, f"{OPTIMIZER}=torch.optim.LBFGS")
