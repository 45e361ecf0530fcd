"""Kill fit and predict again and again, and compare the results with runs that were not killed.

python tests/torture.py --kills 100

Half of the SIGKILLs come at a random time, half inside a random phase: an update, the writing of a
checkpoint, a validation, sampling, the writing of trajectories, the export. After each kill the
same command is started again, until it ends by itself. Then weights, trajectories, logged curves
and files must be those of a run that was not killed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from conftest import ROOT, make_policy, make_trajectories, write
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from topr.callbacks import export
from topr.evaluation import live, pipeline
from topr.module import PolicyModule
from topr.run.checkpoints import AtomicCheckpointIO
from topr.sampling import LocalSampler
from topr.trajectories import read_trajectories

PHASES = {
    "update": (PolicyModule, "check_update"),
    "checkpoint": (AtomicCheckpointIO, "save_checkpoint"),
    "validation": (PolicyModule, "log_validation"),
    "sampling": (LocalSampler, "sample"),
    "writing": (live, "write_trajectories"),
    "export": (export, "export_policy"),
}
SAMPLES = 3


class Command:
    """A command of train.py in forked processes, which have everything imported already.

    Args:
        folder: where they run, made here. `log.txt` gets their output, `phases.txt` a line for
            each phase entered.
    """

    def __init__(self, folder: Path, *arguments):
        self.folder = folder
        self.arguments = [str(argument) for argument in arguments]
        folder.mkdir(parents=True)

    def run(
        self, phase: str | None = None, entry: int = 1, delay: float = 0.0, kill: int = 9
    ) -> int:
        """The exit code; negative the signal by which the process ended.

        Args:
            phase: send a signal when it is entered; "start": when the process starts.
            entry: the how many-th time.
            delay: seconds after that.
            kill: number of the signal.
        """
        child = os.fork()
        if child == 0:
            self._child(phase, entry, delay, kill)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _child(self, phase: str | None, entry: int, delay: float, kill: int) -> None:
        entries: Counter = Counter()

        def enter(name: str) -> None:
            entries[name] += 1
            with open("phases.txt", "a") as file:
                file.write(f"{name}\n")
            if (name, entries[name]) != (phase, entry):
                return
            if delay:
                threading.Timer(delay, os.killpg, (0, kill)).start()
            else:
                os.kill(0 if kill == signal.SIGKILL else os.getpid(), kill)

        code = 1
        try:
            os.setpgid(0, 0)
            os.chdir(self.folder)
            log = open("log.txt", "a", buffering=1)  # noqa: SIM115
            sys.stdout = sys.stderr = log
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            pipeline.PART = 2
            for name, (owner, function) in PHASES.items():
                observe(owner, function, name, enter)
            sys.argv = ["train.py", *self.arguments]
            enter("start")
            train.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def phases(self) -> list[str]:
        return (self.folder / "phases.txt").read_text().split()


def observe(owner, function: str, phase: str, enter) -> None:
    """Call `enter` whenever a function is called."""
    original = getattr(owner, function)

    def observed(*arguments, **more):
        enter(phase)
        return original(*arguments, **more)

    setattr(owner, function, observed)


def curves(version: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run; of its speed the steps only."""
    events = EventAccumulator(str(version), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        measured = tag.startswith("speed")
        scalars = events.Scalars(tag)
        found[tag] = [(event.step, 0 if measured else repr(event.value)) for event in scalars]
    return found


def summary(version: Path) -> dict:
    return json.loads((version / "summary.json").read_text())


def files(version: Path) -> set[str]:
    """Names of a run's files but TensorBoard's, of which each process writes its own."""
    names = {str(path.relative_to(version)) for path in version.rglob("*")}
    return {name for name in names if "tfevents" not in name}


def assert_same_run(one: Path, other: Path) -> None:
    """Two finished runs have the same weights, bit for bit, curves, summary and files."""
    weights = [load_file(version / "policy" / "model.safetensors") for version in (one, other)]
    different = [name for name in weights[1] if not torch.equal(weights[0][name], weights[1][name])]
    assert not different, different
    mine, theirs = curves(one), curves(other)
    assert mine.keys() == theirs.keys()
    for tag, values in theirs.items():
        assert mine[tag] == values, tag
    assert summary(one) == summary(other)
    # ModelCheckpoint forgets an older checkpoint if it is killed just before it removes that
    more = {name for name in files(one) if not name.startswith("checkpoints/epoch=")}
    assert more <= files(other) <= files(one)


def check_fit(killed: Command, whole: Command) -> None:
    """A fit that was killed and resumed has the results of one that was not."""
    runs = [command.folder / "runs" / "arithmetic" for command in (killed, whole)]
    assert [path.name for path in runs[0].iterdir()] == ["version_0"]
    assert_same_run(runs[0] / "version_0", runs[1] / "version_0")


def check_predict(killed: Command, whole: Command) -> None:
    """A predict that was killed and started again has the results of one that was not."""
    parts = sorted(path.name for path in (whole.folder / "sampled").glob("*.parquet"))
    names = sorted(path.name for path in (killed.folder / "sampled").iterdir())
    assert names == [".lock", *parts]
    found = []
    for command in (killed, whole):
        rows = []
        for part in parts:
            rows += read_trajectories(command.folder / "sampled" / part)
        found.append(rows)
    assert found[0] == found[1]
    assert set(Counter(row.prompt_id for row in found[0]).values()) == {SAMPLES}


def torture(work: Path, kills: int, seed: int) -> Counter:
    """Kill `kills` times; returns the number of kills by command and moment.

    Raises:
        AssertionError: a result differs from that of a run that was not killed.
    """
    random.seed(seed)
    torch.set_num_threads(1)
    os.environ["HF_HOME"] = str(work / "hf")
    policy = make_policy(work / "base")
    data = write(work / "train.parquet", policy, make_trajectories(policy, 40))
    problems = work / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(10)))
    common = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}"]
    common += [f"--data.samples={SAMPLES}", "--trainer.enable_progress_bar=false"]
    fit = ["fit", *common, f"--data.train={data}", f"--data.val={problems}"]
    fit += [f"--data.test={problems}", "--data.batch_size=4", "--data.microbatch_tokens=60"]
    fit += ["--trainer.max_epochs=2", "--trainer.val_check_interval=0.3", "--ckpt_path=last"]
    fit += ["--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint"]
    fit += ["--trainer.callbacks.init_args.every_n_train_steps=2"]
    predict = ["predict", *common, f"--data.problems={problems}", "--data.out=sampled"]
    kinds = {"fit": (fit, check_fit), "predict": (predict, check_predict)}
    references = {}
    for name, (arguments, _) in kinds.items():
        whole = Command(work / f"whole-{name}", *arguments)
        began = time.monotonic()
        assert whole.run() == 0, whole.log
        seconds = time.monotonic() - began
        references[name] = whole, seconds, Counter(whole.phases())
    counts: Counter = Counter()
    run = 0
    while counts.total() < kills:
        name = "predict" if run % 3 == 2 else "fit"
        arguments, check = kinds[name]
        whole, seconds, entered = references[name]
        killed = Command(work / f"{name}-{run}", *arguments)
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            if counts.total() == kills:
                code = killed.run()
            elif random.random() < 0.5:
                phase = "start"
                code = killed.run(phase, 1, random.uniform(0.01, seconds))
            else:
                phase = random.choice([phase for phase in entered if phase != "start"])
                entry = random.randint(1, entered[phase])
                code = killed.run(phase, entry, 0.05 * random.random())
            counts[f"{name}, {phase}"] += code == -signal.SIGKILL
        assert code == 0, killed.log[-3000:]
        check(killed, whole)
        shutil.rmtree(killed.folder)
        run += 1
    counts["runs completed and compared"] = run
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="torture-"))
    counts = torture(work, args.kills, args.seed)
    shutil.rmtree(work)
    for moment, count in sorted(counts.items()):
        print(f"{moment:30} {count}")
    print("weights, trajectories, curves and files are those of runs that were not killed")


if __name__ == "__main__":
    main()
